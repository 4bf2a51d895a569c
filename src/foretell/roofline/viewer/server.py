"""The page on this machine: the standard library's server, bound to 127.0.0.1, one document."""

import errno
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def serve(make: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """A server for one page on 127.0.0.1, made once the port is ours; `port` 0 picks a free one.

    The caller runs and closes it.

    Raises:
        ValueError: the port is taken, not allowed, or no port at all.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is no port; use 0 (any free one) to 65535")
    made: list[bytes] = []

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
            answer = made[0] if found else b"There is one page here: /"
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
    made.append(make().encode())
    return server
