"""A client of a soak test: sends requests, and checks that the answers are complete."""

import json
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 300.0
"""Seconds without a byte after which a request has failed, where nothing else is asked for."""
CHAT = "/v1/chat/completions"
BUSY = (429, 503)
WORDS = (
    "river", "stone", "light", "answer", "garden", "number", "window", "letter", "music", "winter", "engine", "market",
    "silver", "paper", "forest", "table", "bridge", "morning", "color", "weather", "doctor", "island", "history",
    "question", "circle", "bottle",
)  # fmt: skip
Json = dict[str, Any]


class SoakError(Exception):
    """The server did something wrong."""


class BusyError(Exception):
    """The server refused a request because of load."""


@dataclass(frozen=True)
class SoakTarget:
    """The server that is loaded."""

    url: str
    api_key: str = ""
    model: str | None = None
    context: int = 2048
    """Tokens that its model reads."""
    chars_per_token: float = 1.0
    """Of the words of its prompts."""
    max_tokens: int = 48
    timeout: float = TIMEOUT
    """Seconds without a byte after which a request has failed."""

    def connect(self) -> HTTPConnection:
        """A new connection."""
        address = urlsplit(self.url)
        return HTTPConnection(address.hostname or "", address.port or 80, timeout=self.timeout)

    def headers(self) -> dict[str, str]:
        """Of every request."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", "Connection": "close"} | key

    def head(self, path: str, length: int) -> bytes:
        """The head of a request as bytes."""
        address = urlsplit(self.url)
        lines = [f"POST {path} HTTP/1.1", f"Host: {address.netloc}", f"Content-Length: {length}"]
        return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in self.headers().items()), "", ""]).encode()


@dataclass
class KnownAnswers:
    """The first answer to every fixed request; later ones must be equal."""

    differences: list[str] = field(default_factory=list)
    """For every other answer: the request, and the two texts from where they part."""
    _texts: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, name: str, text: str) -> None:
        """Compare an answer with the first one."""
        with self._lock:
            first = self._texts.setdefault(name, text)
            if first != text:
                same = sum(takewhile(bool, (a == b for a, b in zip(first, text, strict=False))))
                shown = [f"{t[same : same + 40]!r}" for t in (first, text)]
                self.differences.append(f"{name}: after {same} characters {shown[1]} instead of {shown[0]}")


class SoakClient:
    """Sends requests to a server."""

    def __init__(self, target: SoakTarget, known: KnownAnswers, seed: int) -> None:
        self.target, self.known, self.rng = target, known, random.Random(seed)

    def chat(self, prompt: str, **fields: Any) -> Json:
        """The body of a chat request."""
        return {"messages": [{"role": "user", "content": prompt}], "max_tokens": self.target.max_tokens} | fields

    def long_text(self, tokens: int) -> str:
        """The same words again and again, about so many tokens."""
        text = " ".join(WORDS) + " "
        size = int(tokens * self.target.chars_per_token)
        return (text * (size // len(text) + 1))[:size]

    def text(self, words: int) -> str:
        """So many words at random."""
        return " ".join(self.rng.choices(WORDS, k=words))

    def open(self) -> socket.socket:
        """A plain connection."""
        address = urlsplit(self.target.url)
        return socket.create_connection((address.hostname or "", address.port or 80), self.target.timeout)

    def send(self, body: Json) -> socket.socket:
        """Send a chat request; the connection."""
        data, connection = json.dumps(body).encode(), self.open()
        connection.sendall(self.target.head(CHAT, len(data)) + data)
        return connection

    def exchange(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a body, or ask for a document (None); status and body of the answer."""
        connection = self.target.connect()
        try:
            connection.request("GET" if body is None else "POST", path, body, self.target.headers())
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Json) -> Json:
        """The answer to a request that must succeed."""
        status, data = self.exchange(path, json.dumps(body).encode())
        _check_status(status, data)
        answer: Json = json.loads(data)
        return answer

    def stream(self, body: Json) -> str:
        """The text of a streamed answer, which must be complete."""
        connection = self.target.connect()
        try:
            data = json.dumps(body | {"stream": True})
            connection.request("POST", CHAT, data, self.target.headers())
            response = connection.getresponse()
            if response.status != 200:
                _check_status(response.status, response.read())
            return "".join(_pieces(response))
        finally:
            connection.close()


def _pieces(response: HTTPResponse) -> Iterator[str]:
    """The texts of a stream, which must be complete."""
    reason = None
    for line in response:
        if line.startswith(b"data: [DONE]"):
            expect(reason in ("stop", "length"), f"a finish reason, found {reason!r}")
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise SoakError(str(event["error"])[:200])
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
                yield choice["delta"].get("content") or ""
    raise SoakError("the stream broke off")


def _check_status(status: int, data: bytes) -> None:
    if status in BUSY:
        raise BusyError
    expect(status == 200, f"status 200, found {status}: {data[:200]!r}")


def expect(condition: bool, what: str) -> None:
    """Raise `SoakError` unless a condition holds."""
    if not condition:
        raise SoakError(f"expected {what}")


def find_target(url: str, api_key: str, max_tokens: int, timeout: float = TIMEOUT) -> SoakTarget:
    """The server with its model. Its clients wait so many seconds for a byte.

    Raises:
        ValueError: it does not answer.
    """
    target = SoakTarget(url if "://" in url else f"http://{url}", api_key, max_tokens=max_tokens, timeout=timeout)
    client, text = SoakClient(target, KnownAnswers(), 0), " ".join(WORDS)
    try:
        status, data = client.exchange("/v1/models", None)
        if status != 200:
            raise ValueError(f"{url} answers {status}: {data[:200].decode(errors='replace')}")
        model = json.loads(data)["data"][0]
        tokens = client.post("/tokenize", {"prompt": text})["count"]
    except (OSError, HTTPException) as error:
        raise ValueError(f"{url} does not answer: {error}; start the server first") from error
    except (SoakError, BusyError, KeyError) as error:
        raise ValueError(f"{url} is no `foretell serve`: {error}") from error
    return replace(target, model=model["id"], context=model["max_model_len"], chars_per_token=len(text) / tokens)
