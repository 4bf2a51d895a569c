"""What a wire format of an API provides."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.serve.choices import Choices, Piece
from foretell.serve.drafts import DraftWriter
from foretell.serve.errors import ApiError
from foretell.serve.logprobs import LogprobWriter
from foretell.serve.sse import DONE, EVENTS, PING, event

Counts = Mapping[str, Any]
"""Tokens of an answer (`usage`), or its times (`measurements`), by the names of their fields."""


@dataclass(frozen=True)
class AnswerHead:
    """What stands in every chunk of an answer, and what its request wants to see."""

    model: str
    fingerprint: str
    logprobs: LogprobWriter
    include_usage: bool = False
    continuous_usage: bool = False
    timings: bool = False
    """Whether every chunk has the timings so far."""
    token_ids: bool = False
    """Whether the ids of the prompt's and the answer's tokens are reported."""
    prompt_logprobs: bool = False
    extension: Mapping[str, Any] = field(default_factory=dict)
    """Foretell's own object: what is needed to repeat the answer."""
    ends_with_extension: bool = False
    """Whether the last chunk of a stream has it even where drafts are not asked for."""
    drafts: DraftWriter | None = None
    """Where the request asks for its drafts."""
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)


class AnswerFormat(ABC):
    """Writes an answer of one API: as one object, or as a stream of events."""

    media_type = EVENTS
    """Of a stream."""
    filler = PING
    """What keeps a silent stream open that has not begun."""

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    def begin(self, choices: Choices) -> Iterator[bytes]:
        """Events before the first token; only some APIs have any."""
        yield from ()

    @abstractmethod
    def piece(self, piece: Piece, usage: Counts | None) -> Iterator[bytes]:
        """Events of new text. `usage`: so far, if the request wants it in every chunk."""

    @abstractmethod
    def end(self, usage: Counts, measurements: Counts) -> Iterator[bytes]:
        """Events after the last piece."""

    @abstractmethod
    def complete(
        self, choices: Choices, pieces: Sequence[Piece], usage: Counts, measurements: Counts
    ) -> dict[str, Any]:
        """The whole answer as one object; `pieces`: one per choice."""

    def progress(self, counts: Counts) -> bytes:
        """An event about the prompt, before the first token; only some APIs have one."""
        return b""

    def ping(self) -> Iterator[bytes]:
        """What keeps a silent stream open."""
        yield self.filler

    def error(self, error: ApiError) -> Iterator[bytes]:
        """Events of an error after the stream has begun."""
        yield event(error.body)
        yield DONE
