"""Which requests may share what the engine remembers: those with the same API key and the same `cache_salt`."""

from contextvars import ContextVar

API_KEY: ContextVar[int | None] = ContextVar("API_KEY", default=None)
"""Number of the API key of the HTTP request that is being answered; None: it has none."""


def tenant_salt(cache_salt: str | None) -> str:
    """The engine's cache salt of the present HTTP request, whose body has this `cache_salt`.

    The salt of a key's requests never equals that of another key's, whatever their bodies say.
    """
    key = API_KEY.get()
    if key is None:
        return cache_salt or ""
    return f"key {key}/{cache_salt or ''}"
