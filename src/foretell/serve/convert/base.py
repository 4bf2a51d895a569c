"""What the conversions of all APIs share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from foretell.serve.errors import ApiError, bad_request, validation_error
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.generation import GenerationBody
from foretell.serve.protocol.responses import TextFormat
from foretell.utils.validation import show

B = TypeVar("B", bound=GenerationBody)


def to_chat(body: GenerationBody, **fields: Any) -> ChatBody:
    """A chat completion with the fields that all bodies share, and these; see `to_body`."""
    return to_body(ChatBody, body, fields)


def to_body(kind: type[B], body: GenerationBody, fields: Mapping[str, Any]) -> B:
    """A body of another kind with the fields that all bodies share, and these.

    Raises:
        ApiError: a field is wrong, or several answers are asked for.
    """
    if (body.n or 1) > 1:
        raise bad_request("this API gives one answer; leave n out", "n")
    shared = {name: getattr(body, name) for name in GenerationBody.model_fields}
    given = shared | fields
    try:
        return kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise validation_error(error) from error


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of errors as the client knows them: by the name of the field, or of the whole path."""
    try:
        yield
    except ApiError as error:
        whole = error.param or ""
        error.param = names.get(whole) or names.get(whole.split(".")[0]) or error.param
        raise


def text_of(content: Any, param: str) -> str:
    """The text of a content that is a string or a list of text parts, joined by line ends.

    Raises:
        ApiError: there is something else in it.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"a text or a list of text parts was expected, found {show(content)}", param)
    return "\n".join(_text_of_part(part, f"{param}.{i}") for i, part in enumerate(content))


def _text_of_part(part: Any, param: str) -> str:
    text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise bad_request(f"a text part was expected, as this model reads text only; found {show(kind)}", param)
    return text


def string_of(item: Mapping[str, Any], name: str, param: str) -> str:
    """A string of an item.

    Raises:
        ApiError: there is none.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"a string was expected, found {show(value)}", f"{param}.{name}")
    return value


def response_format(form: TextFormat | None, param: str) -> dict[str, Any] | None:
    """The `response_format` of a chat completion.

    Raises:
        ApiError: a JSON schema is missing.
    """
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema" and form.schema_ is None:
        raise bad_request("a JSON schema was expected, found none", f"{param}.schema")
    return {"type": form.type, "json_schema": None if form.schema_ is None else {"schema": form.schema_}}
