"""A local HTTP server for the page, bound to 127.0.0.1."""

import errno
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
        """Answers every GET of / with the page."""

        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/"
            self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header(
                "Content-Security-Policy",
                "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:",
            )
            self.send_header("X-Content-Type-Options", "nosniff")
            answer = document[0] if found else b"There is one page here: /"
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

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
