"""Assembles the page, and says what it may do."""

import base64
import hashlib
from functools import cache
from importlib import resources
from types import MappingProxyType


def _text(name: str) -> str:
    return resources.files("foretell.serve.page").joinpath(name).read_text("utf-8")


_SCRIPTS = "helpers.js", "store.js", "markdown.js", "drafts.js", "page.js"


@cache
def document() -> str:
    """The HTML document with its style and script."""
    script = "".join(map(_text, _SCRIPTS))
    return _text("page.html").replace("/*STYLE*/", _text("page.css"), 1).replace("/*SCRIPT*/", script, 1)


def _hash(text: str) -> str:
    """The source expression of a content security policy for an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def headers() -> MappingProxyType[str, str]:
    """Headers of the document: only its own style and script run, and it talks to its own server only."""
    html = document()
    style = html.partition("<style>")[2].partition("</style>")[0]
    script = html.partition("<script>")[2].partition("</script>")[0]
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return MappingProxyType(
        {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
    )
