"""What the conversions of all APIs share."""

from collections.abc import Iterable, Iterator, Mapping
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


def to_body(kind: type[B], body: GenerationBody, fields: dict[str, Any]) -> B:
    """A body of another kind with the fields that all bodies share, and these.

    Raises:
        ApiError: a field is wrong, or several answers are asked for.
    """
    if (body.n or 1) > 1:
        raise bad_request("this API gives one answer; leave n out", "n")
    shared = {name: getattr(body, name) for name in GenerationBody.model_fields}
    given = shared | fields
    try:
        made = kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise validation_error(error) from error
    made.share_notes(body)
    return made


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of errors as the client knows them: by the name of the field, or of the whole path."""
    try:
        yield
    except ApiError as error:
        whole = error.param or ""
        name = names.get(whole) or names.get(whole.split(".")[0]) or whole
        if whole and error.message.startswith(whole):
            error.message = name + error.message.removeprefix(whole)
        error.param = name or None
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


def unknown_keys(part: Any, known: Iterable[str], place: str) -> list[str]:
    """The keys of a part beside these and its type, each after its place; none where the part is no object."""
    return [f"{place}.{key}" for key in part if key not in (*known, "type")] if isinstance(part, Mapping) else []


def _text_of_part(part: Any, param: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "document":
        return _text_of_document(part, param)
    text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise bad_request(
            f"a text part was expected, and found {show(kind)}; images are read in /v1/chat/completions", param
        )
    return text


def _text_of_document(part: Mapping[str, Any], param: str) -> str:
    """Title, context and text of a document of Anthropic's API."""
    source = part.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else source
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        raise bad_request(
            f"a document of plain text was expected (a source of type text or content), found {show(kind)}",
            f"{param}.source",
        )
    name = "data" if kind == "text" else "content"
    text = text_of(source.get(name), f"{param}.source.{name}")
    given = [string_of(part, key, param) for key in ("title", "context") if part.get(key) is not None]
    return "\n".join([*given, text])


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
