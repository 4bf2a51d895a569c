"""Chat completions and completions of OpenAI's API."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretell.serve.choices import Choices, Piece
from foretell.serve.formats.base import AnswerFormat, AnswerHead
from foretell.serve.sse import DONE, event


class OpenAIFormat(AnswerFormat):
    """What chat completions and completions have in common."""

    prefix: str
    """Of the answer's id."""
    object_name: str
    chunk_name: str

    def piece(self, piece: Piece, usage: Mapping[str, Any] | None) -> Iterator[bytes]:
        """A chunk; none while text is held back."""
        if piece.text or piece.finish_reason or piece.logprobs or self.head.token_ids:
            yield self._chunk([self._delta(piece)], usage)

    def end(self, usage: Mapping[str, Any], measurements: Mapping[str, Any]) -> Iterator[bytes]:
        """The chunk with the usage, if it is wanted, and the end."""
        if self.head.include_usage:
            yield self._chunk([], usage, measurements)
        yield DONE

    def complete(
        self,
        choices: Choices,
        pieces: Sequence[Piece],
        usage: Mapping[str, Any],
        measurements: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The whole answer."""
        ids = (
            {"prompt_token_ids": list(choices.all[0].request.prompt)}
            if self.head.token_ids and len(choices.all) == choices.per_prompt
            else {}
        )
        return {
            **self._head(self.object_name),
            "choices": [self._choice(piece) for piece in pieces],
            "usage": usage,
            **measurements,
            **ids,
            "foretell": self.head.extension,
        }

    @abstractmethod
    def _delta(self, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk."""

    @abstractmethod
    def _choice(self, piece: Piece) -> dict[str, Any]:
        """The choice of a whole answer."""

    def _ending(self, piece: Piece) -> dict[str, Any]:
        """What choices of both APIs end with."""
        ids = {"token_ids": list(piece.tokens)} if self.head.token_ids else {}
        return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason, **ids}

    def _head(self, name: str) -> dict[str, Any]:
        head = self.head
        return {
            "id": f"{self.prefix}-{head.number}",
            "object": name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        usage: Mapping[str, Any] | None = None,
        measurements: Mapping[str, Any] | None = None,
    ) -> bytes:
        shown = {} if usage is None and not self.head.include_usage else {"usage": usage}
        return event({**self._head(self.chunk_name), "choices": choices, **shown, **(measurements or {})})


class ChatFormat(OpenAIFormat):
    """Chat completions."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, choices: Choices) -> Iterator[bytes]:
        """The role of every choice."""
        for choice in choices.all:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self.head.logprobs.chat(piece),
            **self._ending(piece),
        }

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self.head.logprobs.chat(piece),
            **self._ending(piece),
        }


class CompletionFormat(OpenAIFormat):
    """Completions. `echoed`: the text of the prompt by choice, which goes before the answer; empty without `echo`."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, head: AnswerHead, echoed: Sequence[str] = ()) -> None:
        super().__init__(head)
        self._echoed = echoed
        self._offsets = dict[int, int](enumerate(map(len, echoed)))
        """Characters written so far, by choice."""

    def begin(self, choices: Choices) -> Iterator[bytes]:
        """The prompts, if they are echoed."""
        for index, text in enumerate(self._echoed):
            yield self._chunk([{"index": index, "text": text, "logprobs": None, "finish_reason": None}])

    def _delta(self, piece: Piece) -> dict[str, Any]:
        offset = self._offsets.get(piece.index, 0)
        self._offsets[piece.index] = offset + len(piece.text)
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self.head.logprobs.completion(piece, offset),
            **self._ending(piece),
        }

    def _choice(self, piece: Piece) -> dict[str, Any]:
        echoed = self._echoed[piece.index] if self._echoed else ""
        return {**self._delta(piece), "text": echoed + piece.text}
