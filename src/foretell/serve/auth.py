"""API keys: compared in constant time, with a limit of concurrent requests for each."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.serve.errors import ApiError, overloaded
from foretell.serve.metrics.rejections import Rejections
from foretell.serve.tenants import API_KEY

OPEN_PATHS = ("/health", "/live", "/")
"""Paths that need no key: what load balancers ask, and the page, which asks for a key itself."""
RETRY_SECONDS = 1


def read_keys(given: Sequence[str], file: Path | None, environment: str) -> tuple[str, ...]:
    """The keys of a command line, of a file with one per line (# begins a comment), and of a variable with commas.

    Raises:
        ValueError: a key is empty or no ASCII text, or the file has none.
        OSError: the file cannot be read.
    """
    lines = [] if file is None else [line.strip() for line in file.read_text("utf-8").splitlines()]
    in_file = [line for line in lines if line and not line.startswith("#")]
    if file is not None and not in_file:
        raise ValueError(f"{file}: no API key in it; write one per line")
    keys = [*given, *in_file, *(key.strip() for key in environment.split(",") if key.strip())]
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("an API key is empty, or has spaces or letters beyond ASCII; choose another")
    return tuple(dict.fromkeys(keys))


class KeyMiddleware:
    """Asks for a key (`Authorization: Bearer` or `x-api-key`), and limits the concurrent requests of each."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], per_key: int, rejections: Rejections) -> None:
        self._app, self._per_key, self._rejections = app, per_key, rejections
        self._digests = [_digest(key) for key in keys]
        self._running = Counter[int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        key = self._find(Headers(scope=scope))
        if self._digests and key is None:
            error = ApiError(
                HTTPStatus.UNAUTHORIZED,
                "a valid API key is needed, as Authorization: Bearer KEY or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope["path"])(scope, receive, send)
            return
        owner = -1 if key is None else key
        if self._per_key and self._running[owner] >= self._per_key:
            self._rejections.count("key")
            error = overloaded(f"more than {self._per_key} requests at a time with one key", RETRY_SECONDS)
            await error.response(scope["path"])(scope, receive, send)
            return
        API_KEY.set(key)
        self._running[owner] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[owner] -= 1

    def _find(self, headers: Headers) -> int | None:
        """Number of the key that a request has; every key is compared, so that time tells nothing about them."""
        scheme, _, value = headers.get("authorization", "").partition(" ")
        given = value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest, matched = _digest(given), None
        for number, known in enumerate(self._digests):
            matched = number if hmac.compare_digest(digest, known) else matched
        return matched


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
