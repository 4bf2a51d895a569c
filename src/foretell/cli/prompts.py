"""A file of prompts: one JSON value per line, with sampling parameters of its own where it names them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretell.catalogue import find
from foretell.core.parameter_fields import parameter_model
from foretell.core.parameters import PARAMETERS
from foretell.core.sampling import SamplingParams
from foretell.structured.outputs import StructuredOutputs
from foretell.tokenizer.codec import Message
from foretell.utils.validation import parse_json, validate


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


if TYPE_CHECKING:
    _Parameters = _Line
else:
    _Parameters = parameter_model("_Parameters", _Line, PARAMETERS)


class PromptLine(_Parameters):
    """The keys of a line: exactly one of `prompt`, `messages` and `turns`, and the generation parameters by their
    names. Other keys are ignored.

    `turns` are the user's messages of a conversation: each is answered after the earlier ones and their answers.
    `method`: what decodes it, by its name. `priority`: lower ones first.
    """

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    turns: Annotated[list[str], Field(min_length=1)] | None = None
    prediction: str | None = None
    """A text that the answer is expected to resemble."""
    structured_outputs: dict[str, Any] | None = None
    """The fields of `StructuredOutputs`."""
    raw: bool | None = None
    method: str | None = None
    priority: int = 0

    @model_validator(mode="before")
    @classmethod
    def _suggest_keys(cls, values: object) -> object:
        if isinstance(values, dict):
            for key in values:
                near = get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.8)
                if near and key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}: did you mean {near[0]!r}?")
        return values

    @model_validator(mode="after")
    def _one_kind(self) -> "PromptLine":
        if sum(x is not None for x in (self.prompt, self.messages, self.turns)) != 1:
            raise ValueError("give one of 'prompt', 'messages' and 'turns'")
        return self


@dataclass(frozen=True)
class PromptDefaults:
    """What the command line gives for all prompts; `parameters`: the generation parameters by their names."""

    parameters: Mapping[str, Any]
    raw: bool
    system: str | None
    allow_special_tokens: bool = False
    structured_outputs: StructuredOutputs | None = None
    prediction: str | None = None

    def options(self) -> dict[str, Any]:
        """The arguments of `Model.request` beside the prompt.

        Raises:
            ValueError: a parameter is wrong.
        """
        sampling = {name: value for name, value in self.parameters.items() if PARAMETERS[name].is_sampling}
        return {name: value for name, value in self.parameters.items() if name not in sampling} | {
            "sampling": SamplingParams(**sampling),
            "raw": self.raw,
            "allow_special_tokens": self.allow_special_tokens,
            "structured_outputs": self.structured_outputs,
            "prediction": self.prediction,
        }


@dataclass(frozen=True)
class PromptSpec:
    """A prompt and how it is answered: the conversation or raw text, and the user's turns that follow its answer."""

    prompt: str | tuple[Message, ...]
    turns: tuple[str, ...]
    options: Mapping[str, Any]
    """Arguments of `Model.request`."""
    method: str | None = None
    """What decodes it, by its name; None: the method of the command line."""
    priority: int = 0

    @property
    def raw(self) -> bool:
        """Whether the prompt is continued as it is, without the chat template."""
        return bool(self.options["raw"])

    @property
    def title(self) -> str:
        """The last user message, on one line."""
        last = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]
        return " ".join(last.split())


@dataclass(frozen=True)
class LineError:
    """A line that cannot be answered, with the reason."""

    number: int
    reason: str


def read_prompts(path: Path, defaults: PromptDefaults) -> Iterator[tuple[int, PromptSpec | LineError]]:
    """Every line that is not blank, with its number from 1."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                try:
                    yield number, apply_defaults(parse_line(raw), defaults)
                except ValueError as error:
                    yield number, LineError(number, str(error))


def read_all_prompts(path: Path) -> list[PromptSpec]:
    """All prompts of a file of JSON lines; of a conversation, its first turn.

    Raises:
        ValueError: an invalid line, or a file without prompts.
    """
    prompts = list[PromptSpec]()
    for number, line in read_prompts(path, PromptDefaults({}, False, None)):
        if isinstance(line, LineError):
            raise ValueError(f"{path}, line {number}: {line.reason}")
        prompts.append(line)
    if not prompts:
        raise ValueError(f"{path}: no prompts here; write one JSON object with 'prompt' per line")
    return prompts


def parse_line(raw: bytes) -> PromptLine:
    """Parse one line.

    Raises:
        ValueError: it is not JSON, or holds no prompt.
    """
    value = parse_json(raw)
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError("a JSON object with 'prompt', 'messages' or 'turns' was expected, or a string")
    return validate(PromptLine, value)


def apply_defaults(line: PromptLine, defaults: PromptDefaults) -> PromptSpec:
    """The prompt of a line; the defaults hold where the line names no parameter.

    Raises:
        ValueError: the prompt is empty, a parameter is out of range, there is no method of this name, or raw text has
            several turns or a system message.
    """
    given = line.model_dump(include={*PARAMETERS, "raw", "prediction"}, exclude_none=True)
    own: dict[str, Any] = {name: given.pop(name) for name in ("raw", "prediction") if name in given}
    if line.structured_outputs is not None:
        own["structured_outputs"] = _structured_outputs(line.structured_outputs)
    mixed = replace(defaults, **own, parameters={**defaults.parameters, **given})
    prompt, turns = _split_turns(line, mixed.raw, defaults.system)
    method = None if line.method is None else find(line.method).name
    return PromptSpec(prompt, turns, mixed.options(), method, line.priority)


def _structured_outputs(values: dict[str, Any]) -> StructuredOutputs:
    known = {f.name for f in fields(StructuredOutputs)}
    for key in values:
        if key not in known:
            raise ValueError(f"structured_outputs has no field {key!r}; known: {', '.join(sorted(known))}")
    return StructuredOutputs(**values)


def _split_turns(line: PromptLine, raw: bool, system: str | None) -> tuple[str | tuple[Message, ...], tuple[str, ...]]:
    """The first prompt, and the turns that follow its answer."""
    if line.messages is not None:
        return tuple(t.model_dump() for t in line.messages), ()
    turns: Sequence[str] = [line.prompt or ""] if line.turns is None else line.turns
    if raw and len(turns) > 1:
        raise ValueError("several turns need the chat template, and raw text was asked for")
    return with_system_message(turns[0], raw, system), tuple(turns[1:])


def with_system_message(text: str, raw: bool, system: str | None) -> str | tuple[Message, ...]:
    """The user's text as a prompt; a conversation where there is a system message.

    Raises:
        ValueError: the text is empty, or raw text has a system message.
    """
    if not text.strip():
        raise ValueError("the prompt is empty: write what the model should answer")
    if system is None:
        return text
    if raw:
        raise ValueError("a system message needs the chat template, and raw text was asked for; leave out one of them")
    return {"role": "system", "content": system}, {"role": "user", "content": text}


def read_texts(path: Path) -> tuple[str, ...]:
    """The prompts of such a file as texts; of a conversation, its last message.

    Raises:
        ValueError: as `read_all_prompts`.
    """
    prompts = (spec.prompt for spec in read_all_prompts(path))
    return tuple(p if isinstance(p, str) else p[-1]["content"] for p in prompts)
