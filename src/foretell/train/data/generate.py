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
from foretell.retrieval.corpus import tokenize_documents
from foretell.shape import RootOnly
from foretell.train.data.dataset import Collection, Manifest, Record
from foretell.train.data.features import Shelf
from foretell.train.data.listen import Listener
from foretell.train.data.openings import OPENINGS

MIN_P = 0.05
"""Of sampled questions and answers: at temperature 1 a small model's tail is mostly noise."""
_SHORTEST = 5
"""A question of fewer tokens asks nothing."""
_PATIENCE = 64
"""Prompts after which one should have been usable."""


class Prompts:
    """Numbered prompts: from the model itself where `given` is None, else the given ones in turn."""

    def __init__(self, model: Model, manifest: Manifest, given: Sequence[Sequence[int]] | None) -> None:
        self._model, self._manifest, self._given = model, manifest, given
        self._turn = model.codec.user_turn_prefix() if given is None else []
        self._seen: set[bytes] = set()

    @property
    def count(self) -> int | None:
        """How many there are; None: no end."""
        return None if self._given is None else len(self._given)

    def ready(self, number: int) -> Sequence[int] | None:
        """The prompt of this number; None where the model has to write it first."""
        return None if self._given is None else self._given[number]

    def asking(self, number: int) -> Request:
        """What has the model write question `number`."""
        sampling = SamplingParams(temperature=1.0, min_p=MIN_P, seed=_seed(self._manifest.seed, number, 0))
        begun = self._turn + self._model.codec.encode(self.opening(number), add_special_tokens=False)
        return Request(begun, sampling, self._manifest.max_question, (), self._model.eos)

    def opening(self, number: int) -> str:
        """How question `number` begins: freely every third time."""
        return "" if number % 3 == 0 else OPENINGS[(number - number // 3 - 1) % len(OPENINGS)]

    def asked(self, number: int, tokens: Sequence[int], finished: bool) -> Sequence[int] | None:
        """The prompt that a written question makes; None for junk: cut off, too short, no words, repeating itself, or
        asked before.
        """
        if not finished or len(tokens) < _SHORTEST or len(set(tokens)) < 0.3 * len(tokens):
            return None
        text = (self.opening(number) + self._model.codec.decode(tokens)).strip()
        if not re.search(r"[^\W\d_]{2}", text):
            return None
        prompt = self._model.codec.chat([{"role": "user", "content": text}])
        key = self._key(prompt)
        if key in self._seen:
            return None
        self._seen.add(key)
        return prompt

    def recall(self, prompts: Iterable[Sequence[int]]) -> None:
        """Prompts that an earlier run has answered already."""
        self._seen |= {self._key(p) for p in prompts}

    def _key(self, prompt: Sequence[int]) -> bytes:
        """Equal for prompts of the same words."""
        words = re.findall(r"\w+", self._model.codec.decode(prompt).lower())
        return sha256(" ".join(words).encode()).digest()[:12]


def _seed(seed: int, number: int, use: int) -> int:
    return (seed << 40) + (number << 1) + use


def answers(
    model: Model,
    prompts: Prompts,
    manifest: Manifest,
    collection: Collection,
    rows: int,
    wanted: int,
    shelf: Shelf | None = None,
) -> Iterator[int]:
    """Fill `collection` until it has `wanted` tokens to be learned, or no prompt is left; yields new tokens decoded,
    step by step.

    Text `n` depends on the seed and `n` alone, so an interrupted run goes on where it was. The model's states at the
    answers go to `shelf`, which holds what the collection has.

    Raises:
        ValueError: the model writes nothing that can be asked.
    """
    listener = None if shelf is None else Listener(shelf)
    method = model.method() if listener is None else Method(listener, RootOnly(), Match())
    engine = Engine(model.runner(), method, rows=rows)
    work = _Work(model, prompts, manifest, collection, engine, listener)
    while True:
        while work.waiting < 2 * rows and collection.learnable < wanted and work.begin():
            pass
        if not engine.busy:
            return
        new = 0
        for update in engine.step():
            if update.error is not None:
                raise update.error
            new += len(update.tokens)
            work.hear(update.request, update.tokens, update.finish_reason)
        if len(collection.numbers) >= _PATIENCE and not collection.learnable:
            raise ValueError(
                f"{model.name} wrote {len(collection.numbers)} prompts and no usable question; give prompts with "
                f"--prompts FILE"
            )
        yield new
        if collection.learnable >= wanted:
            return


@dataclass
class _Text:
    """A text being written: its number, its prompt once there is one, what has come of the present request."""

    number: int
    prompt: Sequence[int] | None
    new: list[int]
    greedy: bool


class _Work:
    """Requests under way, and what becomes of them."""

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        manifest: Manifest,
        collection: Collection,
        engine: Engine,
        listener: Listener | None,
    ) -> None:
        self._model, self._prompts, self._manifest = model, prompts, manifest
        self._collection, self._engine, self._listener = collection, engine, listener
        self._texts: dict[int, _Text] = {}
        self._next = 0

    @property
    def waiting(self) -> int:
        """Texts under way."""
        return len(self._texts)

    def begin(self) -> bool:
        """Start the next text that is neither finished nor under way; False: there is none."""
        while self._next in self._collection.numbers:
            self._next += 1
        if self._next == self._prompts.count:
            return False
        number, self._next = self._next, self._next + 1
        prompt = self._prompts.ready(number)
        # A draw per text, so that the share holds whatever the numbers are.
        greedy = CounterRNG(self._manifest.seed).uniform(number) < self._manifest.greedy_share
        text = _Text(number, prompt, [], greedy)
        self._submit(text, self._prompts.asking(number) if prompt is None else self._answering(text))
        return True

    def _answering(self, text: _Text) -> Request:
        m = self._manifest
        sampled = SamplingParams(temperature=m.temperature, min_p=MIN_P, seed=_seed(m.seed, text.number, 1))
        return Request(
            text.prompt or (), SamplingParams() if text.greedy else sampled, m.max_answer, (), self._model.eos
        )

    def _submit(self, text: _Text, request: Request) -> None:
        if len(request.prompt) + 1 < self._model.config.context:
            self._texts[self._engine.submit(request)] = text
        else:
            self._collection.add(Record(number=text.number, tokens=[], start=0))

    def hear(self, request: int, tokens: Sequence[int], reason: str | None) -> None:
        """Note new tokens; a finished question becomes a request for its answer, a finished answer a record."""
        text = self._texts[request]
        text.new += tokens
        if reason is None:
            return
        del self._texts[request]
        if text.prompt is not None:
            tokens = [*text.prompt, *text.new]
            self._collection.add(Record(number=text.number, tokens=tokens, start=len(text.prompt), greedy=text.greedy))
            if self._listener is not None:
                self._listener.store(tokens)
            return
        ended = text.new[-1] in self._model.eos
        text.prompt = self._prompts.asked(text.number, text.new[:-1] if ended else text.new, ended)
        if text.prompt is None:
            self._collection.add(Record(number=text.number, tokens=[], start=0))
        else:
            text.new = []
            self._submit(text, self._answering(text))


def pieces(model: Model, texts: Iterator[str], collection: Collection, length: int, wanted: int) -> Iterator[int]:
    """Fill `collection` with plain text in pieces of `length` tokens until it has `wanted`; yields the tokens of each
    document.
    """
    number = 0
    for document in tokenize_documents(texts, model.codec):
        for begin in range(0, len(document), length):
            piece = document[begin : begin + length]
            if len(piece) > 1:
                if number not in collection.numbers:
                    collection.add(Record(number=number, tokens=piece.tolist(), start=0))
                number += 1
        yield len(document)
        if collection.learnable >= wanted:
            return
