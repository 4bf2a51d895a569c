"""Errors that a client sees: OpenAI's shape, bounded in size."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from foretell.utils.validation import explain

MAX_MESSAGE_CHARS = 500
"""Characters of an error message; a body of megabytes is never echoed."""
MAX_PARAM_CHARS = 100
CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client went away; nobody reads it."""

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"

_ANTHROPIC_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable_error",
}


@dataclass
class ApiError(Exception):
    """An error with its HTTP status. `param`: the dotted field that is wrong; `code`: OpenAI's string."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, object]:
        """The body of OpenAI's API."""
        return {"error": self.detail}

    @property
    def anthropic_body(self) -> dict[str, object]:
        """The body of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self._sentence}}

    @property
    def ollama_body(self) -> dict[str, object]:
        """The body of Ollama's API."""
        return {"error": self._sentence}

    @property
    def _sentence(self) -> str:
        """The message, after the field that is wrong."""
        message = str(self.detail["message"])
        return message if self.param is None or message.startswith(self.param) else f"{self.detail['param']}: {message}"

    @property
    def detail(self) -> dict[str, object]:
        """The error object of OpenAI's API."""
        fallback = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = _TYPES.get(HTTPStatus(self.status), fallback) if self.status != CLIENT_CLOSED_REQUEST else fallback
        return {
            "message": _shorten(self.message, MAX_MESSAGE_CHARS),
            "type": kind,
            "param": None if self.param is None else _shorten(self.param, MAX_PARAM_CHARS),
            "code": self.code,
        }

    def response(self, path: str = "") -> Response:
        """The HTTP response, in the shape of the API that the path belongs to."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        body = self.ollama_body if path.startswith(OLLAMA_PATH) else body
        return Response(to_json(body), self.status, dict(self.headers), "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def unavailable(message: str, retry_after: int | None = None) -> ApiError:
    """Status 503: the server is loading, draining or restarting its engine."""
    headers = {"Connection": "close"} | ({} if retry_after is None else {"Retry-After": str(retry_after)})
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, headers=headers)


def overloaded(message: str, retry_after: int) -> ApiError:
    """Status 429: a limit of load is reached; the client should repeat the request later."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS, message, code="rate_limit_exceeded", headers={"Retry-After": str(retry_after)}
    )


def server_error(message: str) -> ApiError:
    """Status 500."""
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="server_error")


def validation_error(error: ValidationError) -> ApiError:
    """Status 400 for a body that pydantic refuses; `param` is the dotted field of its first error."""
    location = error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
    return bad_request(explain(error), ".".join(str(part) for part in location) or None)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
