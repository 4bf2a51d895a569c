"""Self-distillation: the model answers prompts, its own or given ones, with the project's batched engine."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from foretell.accept import Match
from foretell.api import Model
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.engine.engine import Engine, Request
from foretell.engine.method import Method
from foretell.retrieval.corpus import tokenized
from foretell.shape import RootOnly
from foretell.train.data.dataset import DatasetWriter, DatasetManifest, DocumentRecord
from foretell.train.data.features import HiddenStateCache
from foretell.train.data.hidden_state_recorder import HiddenStateRecorder
from foretell.train.data.question_prefixes import QUESTION_PREFIXES

MIN_P = 0.05
"""Of sampled questions and answers: at temperature 1 a small model's tail is mostly noise."""
_MIN_QUESTION_TOKENS = 5
"""A question of fewer tokens asks nothing."""
_MAX_UNUSABLE_PROMPTS = 64
"""Prompts after which one should have been usable."""


class PromptSource:
    """Numbered prompts: from the model itself where `given` is None, else the given ones in turn."""

    def __init__(self, model: Model, manifest: DatasetManifest, given: Sequence[Sequence[int]] | None) -> None:
        self._model, self._manifest, self._given = model, manifest, given
        self._turn = model.codec.users_turn() if given is None else []
        self._seen: set[bytes] = set()

    @property
    def count(self) -> int | None:
        """How many there are; None: no end."""
        return None if self._given is None else len(self._given)

    def given_prompt(self, number: int) -> Sequence[int] | None:
        """The prompt of this number; None where the model has to write it first."""
        return None if self._given is None else self._given[number]

    def question_request(self, number: int) -> Request:
        """What has the model write question `number`."""
        sampling = SamplingParams(temperature=1.0, min_p=MIN_P, seed=_seed(self._manifest.seed, number, 0))
        begun = self._turn + self._model.codec.encode(self.question_prefix(number), special=False)
        return Request(begun, sampling, self._manifest.max_question, (), self._model.eos)

    def question_prefix(self, number: int) -> str:
        """How question `number` begins: freely every third time."""
        return "" if number % 3 == 0 else QUESTION_PREFIXES[(number - number // 3 - 1) % len(QUESTION_PREFIXES)]

    def prompt_from_question(self, number: int, tokens: Sequence[int], finished: bool) -> Sequence[int] | None:
        """The prompt that a written question makes; None for junk: cut off, too short, no words, repeating itself, or
        asked before.
        """
        if not finished or len(tokens) < _MIN_QUESTION_TOKENS or len(set(tokens)) < 0.3 * len(tokens):
            return None
        text = (self.question_prefix(number) + self._model.codec.decode(tokens)).strip()
        if not re.search(r"[^\W\d_]{2}", text):
            return None
        prompt = self._model.codec.chat([{"role": "user", "content": text}])
        key = self._key(prompt)
        if key in self._seen:
            return None
        self._seen.add(key)
        return prompt

    def mark_seen(self, prompts: Iterable[Sequence[int]]) -> None:
        """Prompts that an earlier run has answered already."""
        self._seen |= {self._key(p) for p in prompts}

    def _key(self, prompt: Sequence[int]) -> bytes:
        """Equal for prompts of the same words."""
        words = re.findall(r"\w+", self._model.codec.decode(prompt).lower())
        return sha256(" ".join(words).encode()).digest()[:12]


def _seed(seed: int, number: int, use: int) -> int:
    return (seed << 40) + (number << 1) + use


def generate_answers(
    model: Model,
    prompts: PromptSource,
    manifest: DatasetManifest,
    collection: DatasetWriter,
    rows: int,
    wanted: int,
    shelf: HiddenStateCache | None = None,
) -> Iterator[int]:
    """Fill `collection` until it has `wanted` tokens to be learned, or no prompt is left; yields new tokens decoded,
    step by step.

    Text `n` depends on the seed and `n` alone, so an interrupted run goes on where it was. The model's states at the
    answers go to `shelf`, which holds what the collection has.

    Raises:
        ValueError: the model writes nothing that can be asked.
    """
    listener = None if shelf is None else HiddenStateRecorder(shelf)
    method = model.method() if listener is None else Method(listener, RootOnly(), Match())
    engine = Engine(model.runner(), method, rows=rows)
    work = _GenerationQueue(model, prompts, manifest, collection, engine, listener)
    while True:
        while work.num_pending < 2 * rows and collection.num_learned_tokens < wanted and work.submit_next():
            pass
        if not engine.busy:
            return
        new = 0
        for update in engine.step():
            if update.error is not None:
                raise update.error
            new += len(update.tokens)
            work.on_update(update.request, update.tokens, update.finish_reason)
        if len(collection.known_numbers) >= _MAX_UNUSABLE_PROMPTS and not collection.num_learned_tokens:
            raise ValueError(
                f"{model.name} wrote {len(collection.known_numbers)} prompts and no usable question; give prompts with "
                f"--prompts FILE"
            )
        yield new
        if collection.num_learned_tokens >= wanted:
            return


@dataclass
class _PendingDocument:
    """A text being written: its number, its prompt once there is one, what has come of the present request."""

    number: int
    prompt: Sequence[int] | None
    new: list[int]
    greedy: bool


class _GenerationQueue:
    """Requests under way, and what becomes of them."""

    def __init__(
        self,
        model: Model,
        prompts: PromptSource,
        manifest: DatasetManifest,
        collection: DatasetWriter,
        engine: Engine,
        listener: HiddenStateRecorder | None,
    ) -> None:
        self._model, self._prompts, self._manifest = model, prompts, manifest
        self._collection, self._engine, self._listener = collection, engine, listener
        self._pending: dict[int, _PendingDocument] = {}
        self._next = 0

    @property
    def num_pending(self) -> int:
        """Texts under way."""
        return len(self._pending)

    def submit_next(self) -> bool:
        """Start the next text that is neither finished nor under way; False: there is none."""
        while self._next in self._collection.known_numbers:
            self._next += 1
        if self._next == self._prompts.count:
            return False
        number, self._next = self._next, self._next + 1
        prompt = self._prompts.given_prompt(number)
        # A draw per text, so that the share holds whatever the numbers are.
        greedy = CounterRNG(self._manifest.seed).uniform(number) < self._manifest.greedy_share
        text = _PendingDocument(number, prompt, [], greedy)
        self._submit(text, self._prompts.question_request(number) if prompt is None else self._answer_request(text))
        return True

    def _answer_request(self, text: _PendingDocument) -> Request:
        m = self._manifest
        sampled = SamplingParams(temperature=m.temperature, min_p=MIN_P, seed=_seed(m.seed, text.number, 1))
        return Request(
            text.prompt or (), SamplingParams() if text.greedy else sampled, m.max_answer, (), self._model.eos
        )

    def _submit(self, text: _PendingDocument, request: Request) -> None:
        if len(request.prompt) + 1 < self._model.config.context:
            self._pending[self._engine.submit(request)] = text
        else:
            self._collection.add(DocumentRecord(number=text.number, tokens=[], start=0))

    def on_update(self, request: int, tokens: Sequence[int], reason: str | None) -> None:
        """Note new tokens; a finished question becomes a request for its answer, a finished answer a record."""
        text = self._pending[request]
        text.new += tokens
        if reason is None:
            return
        del self._pending[request]
        if text.prompt is not None:
            tokens = [*text.prompt, *text.new]
            self._collection.add(DocumentRecord(number=text.number, tokens=tokens, start=len(text.prompt), greedy=text.greedy))
            if self._listener is not None:
                self._listener.store(tokens)
            return
        ended = text.new[-1] in self._model.eos
        text.prompt = self._prompts.prompt_from_question(text.number, text.new[:-1] if ended else text.new, ended)
        if text.prompt is None:
            self._collection.add(DocumentRecord(number=text.number, tokens=[], start=0))
        else:
            text.new = []
            self._submit(text, self._answer_request(text))


def generate_text_chunks(model: Model, texts: Iterator[str], collection: DatasetWriter, length: int, wanted: int) -> Iterator[int]:
    """Fill `collection` with plain text in pieces of `length` tokens until it has `wanted`; yields the tokens of each
    document.
    """
    number = 0
    for document in tokenized(texts, model.codec):
        for begin in range(0, len(document), length):
            piece = document[begin : begin + length]
            if len(piece) > 1:
                if number not in collection.known_numbers:
                    collection.add(DocumentRecord(number=number, tokens=piece.tolist(), start=0))
                number += 1
        yield len(document)
        if collection.num_learned_tokens >= wanted:
            return
