"""Chat completions and completions of OpenAI's API."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from foretell.engine.request import Request
from foretell.serve.choices import Choices, Piece
from foretell.serve.formats.base import AnswerFormat, AnswerHead, Counts
from foretell.serve.formats.parts import PartReader, calls_of, reasoning_of, text_of
from foretell.serve.sse import DATA, DONE, END, json_bytes
from foretell.serve.token_text import TextOffsets
from foretell.serve.tools.parts import CallPart, Part
from foretell.serve.usage import timings_so_far


class OpenAIFormat(AnswerFormat):
    """What chat completions and completions have in common."""

    prefix: str
    """Of the answer's id."""
    object_name: str
    chunk_name: str
    _choices: Choices | None = None
    """Of a stream."""

    def begin(self, choices: Choices) -> Iterator[bytes]:
        """What comes before the first token; nothing in completions."""
        self._choices = choices
        yield from ()

    def piece(self, piece: Piece, usage: Counts | None) -> Iterator[bytes]:
        """A chunk; none while text is held back."""
        delta, drafts = self._delta(piece), self.head.drafts
        if self._is_shown(delta) or piece.finish_reason or piece.logprobs or self.head.token_ids or piece.passes:
            own = {} if drafts is None else {"foretell": {"passes": drafts.passes(piece)}}
            if self.head.timings and self._choices is not None:
                own |= timings_so_far(self._choices)
            yield self._chunk([delta], usage, own)

    def progress(self, counts: Counts) -> bytes:
        """A chunk without choices."""
        return self._chunk([], None, {"prompt_progress": counts})

    def end(self, usage: Counts, measurements: Counts) -> Iterator[bytes]:
        """The chunk with the usage, if it is wanted, and the end."""
        drafts = self.head.drafts
        shown = drafts is not None or self.head.ends_with_extension
        own = {"foretell": {**self.head.extension, **({} if drafts is None else drafts.summary)}} if shown else {}
        if self.head.include_usage or own:
            yield self._chunk([], usage if self.head.include_usage else None, {**measurements, **own})
        yield DONE

    def complete(
        self, choices: Choices, pieces: Sequence[Piece], usage: Counts, measurements: Counts
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
            **self._of_prompt(choices, pieces),
            "foretell": {**self.head.extension, **self._drafts(pieces)},
        }

    @abstractmethod
    def _delta(self, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk."""

    @abstractmethod
    def _is_shown(self, delta: Mapping[str, Any]) -> bool:
        """Whether the choice of a chunk has new text or calls."""

    @abstractmethod
    def _choice(self, piece: Piece) -> dict[str, Any]:
        """The choice of a whole answer."""

    def _of_prompt(self, choices: Choices, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What a whole answer says of the prompt."""
        return {}

    def _drafts(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The passes of a whole answer."""
        drafts = self.head.drafts
        if drafts is None:
            return {}
        passes = [one for piece in pieces for one in drafts.passes(piece)]
        return {"passes": passes, **drafts.summary}

    def _prompt_logprobs(self, piece: Piece, request: Request) -> dict[str, Any]:
        if not self.head.prompt_logprobs:
            return {}
        return {"prompt_logprobs": self.head.logprobs.prompt(piece, request.prompt)}

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
        self, choices: list[dict[str, Any]], usage: Counts | None = None, measurements: Counts | None = None
    ) -> bytes:
        shown = {} if usage is None and not self.head.include_usage else {"usage": usage}
        own = json_bytes({"choices": choices, **shown, **(measurements or {})})
        return self._chunk_head + own[1:] + END

    @cached_property
    def _chunk_head(self) -> bytes:
        """What every chunk begins with, up to its own fields."""
        return DATA + json_bytes(self._head(self.chunk_name))[:-1] + b","


class ChatFormat(OpenAIFormat):
    """Chat completions. `echoed`: text that goes before each answer; `functions`: calls are written as before tools."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, head: AnswerHead, parts: PartReader, echoed: str = "", functions: bool = False) -> None:
        super().__init__(head)
        self._parts, self._echoed, self._functions = parts, echoed, functions

    def begin(self, choices: Choices) -> Iterator[bytes]:
        """The role of every choice."""
        yield from super().begin(choices)
        for choice in choices.all:
            delta = {"role": "assistant", "content": self._echoed}
            yield self._chunk([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _delta(self, piece: Piece) -> dict[str, Any]:
        parts = self._parts.read(piece)
        text, calls = text_of(parts), calls_of(parts)
        return {
            "index": piece.index,
            "delta": _reasoning(parts) | ({"content": text} if text else {}) | self._calls(calls, in_stream=True),
            "logprobs": self.head.logprobs.chat(piece),
            **self._chat_ending(piece),
        }

    def _is_shown(self, delta: Mapping[str, Any]) -> bool:
        return bool(delta["delta"])

    def _calls(self, calls: Sequence[CallPart], in_stream: bool) -> dict[str, Any]:
        """The calls of a message, or of a delta."""
        if not calls:
            return {}
        if self._functions:
            call = calls[0]
            return {"function_call": ({"name": call.name} if call.name else {}) | {"arguments": call.arguments}}
        return {"tool_calls": [({"index": call.index} if in_stream else {}) | _call(call) for call in calls]}

    def _chat_ending(self, piece: Piece) -> dict[str, Any]:
        reason = self._parts.finish_reason(piece)
        name = "function_call" if self._functions and reason == "tool_calls" else reason
        return self._ending(piece) | {"finish_reason": name}

    def _of_prompt(self, choices: Choices, pieces: Sequence[Piece]) -> dict[str, Any]:
        return self._prompt_logprobs(pieces[0], choices.all[0].request)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        parts = self._parts.read(piece)
        text, calls = self._echoed + text_of(parts), calls_of(parts)
        thought = _reasoning(parts)
        content = None if not text and (calls or thought or self._parts.must_call) else text
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": content, "refusal": None}
            | thought
            | self._calls(calls, in_stream=False),
            "logprobs": self.head.logprobs.chat(piece),
            **self._chat_ending(piece),
        }


def _reasoning(parts: list[Part]) -> dict[str, Any]:
    """The reasoning of some parts, under the names of DeepSeek's API and of vLLM."""
    text = reasoning_of(parts)
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: CallPart) -> dict[str, Any]:
    """A call, or further arguments of one."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionFormat(OpenAIFormat):
    """Completions. `echoed`: the text of the prompt by choice, which goes before the answer; empty without `echo`.
    `prompt_only`: it is the whole answer, and the new token is not shown.
    """

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, head: AnswerHead, requests: Sequence[Request], echoed: Sequence[str] = (), prompt_only: bool = False
    ) -> None:
        super().__init__(head)
        self._prompt_only = prompt_only
        self._requests, self._echoed = requests, dict(enumerate(echoed))
        self._offsets = dict[int, TextOffsets]()
        """Where tokens begin in the text, by choice."""

    def _delta(self, piece: Piece) -> dict[str, Any]:
        """A choice of a chunk, and of a whole answer, which is one chunk."""
        echoed = self._echoed.pop(piece.index, None)
        prompt = () if echoed is None else self._requests[piece.index].prompt
        logprobs = self.head.logprobs.completion(piece, self._places(piece, echoed), prompt)
        if self._prompt_only:
            logprobs = logprobs and {name: values[: len(prompt)] for name, values in logprobs.items()}
            reason = piece.finish_reason and "length"
            piece = replace(piece, text="", tokens=(), finish_reason=reason, stop_reason=None)
        return {
            "index": piece.index,
            "text": (echoed or "") + piece.text,
            "logprobs": logprobs,
            **self._ending(piece),
        }

    def _is_shown(self, delta: Mapping[str, Any]) -> bool:
        return bool(delta["text"])

    def _places(self, piece: Piece, echoed: str | None) -> list[int]:
        """Where the tokens of a piece begin in the text of its choice, and before them those of an echoed prompt."""
        if not piece.logprobs:
            return []
        request, before = self._requests[piece.index], list[int]()
        if piece.index not in self._offsets:
            self._offsets[piece.index] = self.head.logprobs.offsets(request.skip_special_tokens)
            if echoed is not None:
                before = self._offsets[piece.index].of_prompt(request.prompt, len(echoed))
        return [*before, *self._offsets[piece.index].of(piece.tokens)]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return self._delta(piece) | self._prompt_logprobs(piece, self._requests[piece.index])
