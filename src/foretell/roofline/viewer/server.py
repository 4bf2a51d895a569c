"""A local HTTP server for the page and for models that are pasted into it, bound to 127.0.0.1."""

import errno
import json
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from foretell.roofline.viewer.data import pasted_model

MAX_CONFIG = 1_000_000
"""Bytes of a config.json that is accepted."""


def serve(make: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """A server for one page on 127.0.0.1; `port` 0 takes a free one. The caller runs and closes it.

    `make` returns the page; it is called after the port is bound.

    Raises:
        ValueError: the port is in use, not permitted, or not a port number.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is no port; use 0 (any free one) to 65535")
    document: list[bytes] = []

    class Page(BaseHTTPRequestHandler):
        """Answers GET of / with the page, and POST of /model with the graphs of a config.json."""

        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/"
            answer = document[0] if found else b"There is one page here: /"
            self._answer(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND, "text/html; charset=utf-8", answer)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            status, found = self._model()
            self._answer(status, "application/json", json.dumps(found, allow_nan=False).encode())

        def _model(self) -> tuple[HTTPStatus, dict[str, Any]]:
            # Pages of other hosts cannot send this type without asking first, and are never permitted.
            if self.path != "/model" or self.headers.get_content_type() != "application/json":
                return HTTPStatus.NOT_FOUND, {"error": "send a config.json as application/json to /model"}
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > MAX_CONFIG:
                # Read some of it first: a client that still sends would not see the answer.
                self.rfile.read(min(int(length or 0), 16 * MAX_CONFIG) if length.isdigit() else 0)
                return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": "a config.json has at most a megabyte"}
            try:
                return HTTPStatus.OK, pasted_model(self.rfile.read(int(length)).decode("utf-8"))
            except (ValueError, OverflowError) as error:
                return HTTPStatus.BAD_REQUEST, {"error": str(error)}

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

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Page)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use; choose another with --port, or 0 for any free one") from None
        raise ValueError(f"cannot listen on port {port}: {error.strerror}") from None
    document.append(make().encode())
    return server
