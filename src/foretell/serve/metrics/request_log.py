"""Structured logs: one JSON object per line, with the id of the HTTP request; texts only if they are asked for."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from foretell.engine.request import Request, Update
from foretell.serve.request_id import REQUEST_ID

log = logging.getLogger(__name__)
NAMESPACE = "foretell.serve"
MAX_TEXT_CHARS = 20_000
"""Of a logged prompt or answer."""


class JsonFormatter(logging.Formatter):
    """A record as a JSON object; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        fields = getattr(record, "fields", {})
        if "request_id" not in fields and (number := REQUEST_ID.get()):
            entry["request_id"] = number
        entry |= fields
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class _StandardError(logging.Handler):
    """Writes to what is standard error at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        with suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def log_as_json() -> None:
    """Write what the server logs to standard error, as JSON."""
    handler = _StandardError()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(NAMESPACE)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


@dataclass
class _Live:
    request_id: str
    request: Request
    text: list[str]
    tokens: int = 0


class RequestLog:
    """Logs every request of the engine once it is over; `decode` makes text of prompts, None: texts are not logged."""

    def __init__(self, method_of: Callable[[Request], str], decode: Callable[[Sequence[int]], str] | None) -> None:
        self._method_of, self._decode = method_of, decode
        self._live = dict[int, _Live]()

    def opened(self, ticket: int, request: Request) -> None:
        """A request was given to the engine."""
        self._live[ticket] = _Live(REQUEST_ID.get(), request, [])

    def updated(self, ticket: int, at: float, update: Update) -> None:
        """A request has got something."""
        live = self._live[ticket]
        live.tokens += len(update.tokens)
        if self._decode is not None:
            live.text.append(update.text)
        if update.finish_reason is not None:
            self._write(self._live.pop(ticket), update)

    def lost(self, ticket: int) -> None:
        """A request has ended with its engine, or was refused by it."""
        live = self._live.pop(ticket, None)
        if live is not None:
            log.warning("request lost", extra={"fields": {"request_id": live.request_id}})

    def _write(self, live: _Live, update: Update) -> None:
        statistics = update.statistics
        fields: dict[str, Any] = {
            "request_id": live.request_id,
            "method": self._method_of(live.request),
            "finish_reason": update.finish_reason,
            "prompt_tokens": len(live.request.prompt),
            "completion_tokens": live.tokens,
        }
        if statistics is not None:
            fields |= {
                "cached_tokens": statistics.cached_tokens,
                "drafted_tokens": statistics.drafted,
                "accepted_tokens": sum(statistics.accepted_per_position),
                "queue_seconds": round(statistics.queue_seconds, 6),
                "prefill_seconds": round(statistics.prefill_seconds, 6),
                "decode_seconds": round(statistics.decode_seconds, 6),
            }
        if self._decode is not None:
            prompt = self._decode(live.request.prompt)
            fields |= {"prompt": prompt[:MAX_TEXT_CHARS], "answer": "".join(live.text)[:MAX_TEXT_CHARS]}
        log.info("request", extra={"fields": fields})
