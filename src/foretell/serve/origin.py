"""Which hosts and origins may call: protects servers on 127.0.0.1 from web pages (DNS rebinding, forged requests)."""

from collections.abc import Collection, Sequence
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.serve.errors import ApiError

_LOCAL = "localhost"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SHOWN = 100


def is_local(host: str) -> bool:
    """Whether this address is reached from the same machine only."""
    return host == _LOCAL or (_is_address(host) and ip_address(host).is_loopback)


class OriginMiddleware:
    """Refuses requests for a host that is not ours, and writing requests of pages of another origin, with status 403.

    `hosts`: the names that clients may call the server by, beside IP addresses and localhost, which no foreign page can
    have (DNS rebinding needs a name); None: any. `origins`: whose pages may call; `*`: all. A page of the server's own
    host may always call. Requests without an `Origin` header do not come from a page of another origin.

    Starlette's `TrustedHostMiddleware` is not used: it cuts a host at the first colon, also that in an IPv6 address,
    and has no rule for all addresses.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Sequence[str]) -> None:
        self._app, self._origins = app, frozenset(origins)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        problem = self._problem(Headers(scope=scope), scope["method"]) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            error = ApiError(HTTPStatus.FORBIDDEN, problem, code="forbidden")
            await error.response(scope["path"])(scope, receive, send)

    def _problem(self, headers: Headers, method: str) -> str | None:
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            return "the request names several hosts"
        host = hosts[0] if hosts else ""
        if host and not self._is_ours(host):
            name = _name(host)[:_SHOWN]
            return f"this server is not {name!r}; start it with --allowed-hosts {name} if clients shall call it so"
        origin = headers.get("origin")
        if origin is None or method in _SAFE_METHODS or {origin, "*"} & self._origins:
            return None
        if host and urlsplit(origin).netloc.lower() == host.lower():
            return None
        shown = origin[:_SHOWN]
        return f"pages of {shown} may not call this server; start it with --allowed-origins {shown} to let them"

    def _is_ours(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = _name(host)
        return name in self._hosts or name == _LOCAL or name.endswith(f".{_LOCAL}") or _is_address(name)


def _name(host: str) -> str:
    """The name or address in a `Host` header, without port and in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
