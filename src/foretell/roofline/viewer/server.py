"""A local HTTP server for the page and for what it asks, bound to 127.0.0.1."""

import errno
import json
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from foretell.roofline.viewer.answers import TOPICS, Answers
from foretell.roofline.viewer.page import page, saved_answers
from foretell.roofline.viewer.settings import MAX_CONFIG, SettingError

MAX_QUESTION = 4 * MAX_CONFIG
"""Bytes of a question: two settings, each with a config.json."""
_LOCAL = ("127.0.0.1", "localhost")


def serve(answers: Answers, port: int) -> ThreadingHTTPServer:
    """A server for one page on 127.0.0.1; `port` 0 takes a free one. The caller runs and closes it.

    Raises:
        ValueError: the port is in use, not permitted, or not a port number.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is no port; use 0 (any free one) to 65535")
    handler = partial(_Page, answers, page(answers).encode())
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use; choose another with --port, or 0 for any free one") from None
        raise ValueError(f"cannot listen on port {port}: {error.strerror}") from None


class _Page(BaseHTTPRequestHandler):
    """Answers GET of / with the page, and POST of a topic with figures or of /saved with a page to keep."""

    def __init__(self, answers: Answers, document: bytes, *request: Any) -> None:
        self._answers, self._document = answers, document
        super().__init__(*request)

    def do_GET(self) -> None:
        if not self._is_local():
            return
        is_page = self.path.split("?")[0] == "/"
        answer = self._document if is_page else b"There is one page here: /"
        self._answer(HTTPStatus.OK if is_page else HTTPStatus.NOT_FOUND, "text/html; charset=utf-8", answer)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        if not self._is_local():
            return
        try:
            body = self._compute(self._question())
            kind = "text/html; charset=utf-8" if self.path == "/saved" else "application/json"
            self._answer(HTTPStatus.OK, kind, body)
        except _RefusedError as refusal:
            self._refuse(refusal.status, str(refusal))
        except (ValueError, OverflowError) as error:
            field = error.field if isinstance(error, SettingError) else None
            self._refuse(HTTPStatus.BAD_REQUEST, str(error), field)

    def _is_local(self) -> bool:
        """Whether the request is for this page by a local name, and not from a page of another origin."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if urlsplit(f"//{host}").hostname in _LOCAL and origin in (None, f"http://{host}"):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "this page answers to its own address on this machine alone")
        return False

    def _question(self) -> dict[str, Any]:
        # Pages of other hosts cannot send this type without asking first, and are never permitted.
        if self.path[1:] not in (*TOPICS, "saved") or self.headers.get_content_type() != "application/json":
            paths = ", ".join(f"/{name}" for name in (*TOPICS, "saved"))
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"send a question as application/json to one of {paths}")
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_QUESTION:
            # Read some of it first: a client that still sends would not see the answer.
            self.rfile.read(min(int(length or 0), 4 * MAX_QUESTION) if length.isdigit() else 0)
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a question has at most 4 megabytes")
        try:
            question = json.loads(self.rfile.read(int(length)).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the question is not JSON: {error}") from None
        if not isinstance(question, dict):
            raise ValueError("a question is one object")
        return question

    def _compute(self, question: dict[str, Any]) -> bytes:
        if self.path == "/saved":
            return page(self._answers, saved_answers(self._answers, question)).encode()
        return json.dumps(self._answers.answer(self.path[1:], question), allow_nan=False).encode()

    def _refuse(self, status: HTTPStatus, sentence: str, field: str | None = None) -> None:
        self._answer(status, "application/json", json.dumps({"error": sentence, "field": field}).encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
            "connect-src 'self'",
        )
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal quiet."""


class _RefusedError(Exception):
    """A request that is none of the page's; `status`: of the answer."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
