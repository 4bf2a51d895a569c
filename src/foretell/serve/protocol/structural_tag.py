"""Structural tags: text with marked pieces that must match something (vLLM; the formats are xgrammar's)."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AnyText(_Part):
    """Any text."""

    type: Literal["any_text"]


class ConstString(_Part):
    """A text."""

    type: Literal["const_string"]
    value: str = Field(min_length=1)


class JsonValue(_Part):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool


class Pattern(_Part):
    """A regular expression."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1)


class Sequence(_Part):
    """Formats one after the other."""

    type: Literal["sequence"]
    elements: list["Format"] = Field(min_length=1)


class Alternatives(_Part):
    """One of some formats."""

    type: Literal["or"]
    elements: list["Format"] = Field(min_length=1)


class Tag(_Part):
    """A format between two texts."""

    type: Literal["tag"] = "tag"
    begin: str = Field(min_length=1)
    content: "Format"
    end: str


class TriggeredTags(_Part):
    """Any text; where a trigger stands in it, a tag begins that starts with the trigger."""

    type: Literal["triggered_tags"]
    triggers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    tags: list[Tag] = Field(min_length=1)
    at_least_one: bool = False
    stop_after_first: bool = False


class SeparatedTags(_Part):
    """Tags with a text between them."""

    type: Literal["tags_with_separator"]
    tags: list[Tag] = Field(min_length=1)
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    AnyText | ConstString | JsonValue | Pattern | Sequence | Alternatives | Tag | TriggeredTags | SeparatedTags,
    Field(discriminator="type"),
]


class StructuralTag(_Part):
    """What an answer must match."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format


class _Structure(_Part):
    begin: str = Field(min_length=1)
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    end: str


class Structures(_Part):
    """The older form: triggered tags with a JSON schema each."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[_Structure] = Field(min_length=1)
    triggers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)

    def as_format(self) -> TriggeredTags:
        """The same in the newer form."""
        tags = [
            Tag(begin=s.begin, end=s.end, content=JsonValue(type="json_schema", json_schema=s.schema_ or {}))
            for s in self.structures
        ]
        return TriggeredTags(type="triggered_tags", triggers=self.triggers, tags=tags)
