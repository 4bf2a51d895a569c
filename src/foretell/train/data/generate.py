"""Self-distillation data: the target answers prompts, its own or given ones."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from foretell.accept import Match
from foretell.api import Model
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.retrieval.corpus import tokenize_documents
from foretell.shape import RootOnly
from foretell.train.data.dataset import Dataset, DatasetManifest, DatasetWriter, DocumentRecord
from foretell.train.data.hidden_state_cache import HiddenStateCache
from foretell.train.data.hidden_state_recorder import HiddenStateRecorder
from foretell.train.data.question_prefixes import QUESTION_PREFIXES

MIN_P = 0.05
"""`min_p` of sampled questions and answers: at temperature 1 a small model often samples noise from the tail."""
_MIN_QUESTION_TOKENS = 5
_MIN_DISTINCT_TOKENS = 0.3
"""Smallest share of distinct tokens in a usable question; below it the model repeats itself."""
_MAX_UNUSABLE_PROMPTS = 64
"""Generation fails if none of the first so many prompts was usable."""


class PromptSource:
    """Numbered prompts: the given ones, or prompts that the model writes (`given` is None).

    Raises:
        ValueError: the model is to write prompts and has no chat template.
    """

    def __init__(self, model: Model, manifest: DatasetManifest, given: Sequence[Sequence[int]] | None) -> None:
        if given is None and model.codec.chat_template is None:
            raise ValueError(
                f"{model.name} has no chat template, so it writes no prompts: give beginnings of texts "
                "with --prompts FILE"
            )
        self._model, self._manifest, self._given = model, manifest, given
        self._user_turn = model.codec.user_turn_prefix() if given is None else []
        self._seen: set[bytes] = set()

    @property
    def count(self) -> int | None:
        """Number of prompts; None: no limit."""
        return None if self._given is None else len(self._given)

    def given_prompt(self, number: int) -> Sequence[int] | None:
        """The prompt with this number; None where the model has to write it."""
        return None if self._given is None else self._given[number]

    def question_request(self, number: int) -> Request:
        """The request that makes the model write question `number`."""
        sampling = SamplingParams(temperature=1.0, min_p=MIN_P, seed=_seed(self._manifest.seed, number, 0))
        prompt = self._user_turn + self._model.codec.encode(self.question_prefix(number), add_special_tokens=False)
        return Request(prompt, sampling, self._manifest.max_question, (), self._model.eos)

    def question_prefix(self, number: int) -> str:
        """First words of question `number`; empty for every third question."""
        return "" if number % 3 == 0 else QUESTION_PREFIXES[(number - number // 3 - 1) % len(QUESTION_PREFIXES)]

    def prompt_from_question(self, number: int, tokens: Sequence[int], finished: bool) -> Sequence[int] | None:
        """The prompt with a generated question; None if the question is truncated, short, repetitive, wordless or a
        duplicate.
        """
        repetitive = len(set(tokens)) < _MIN_DISTINCT_TOKENS * len(tokens)
        if not finished or repetitive or len(tokens) < _MIN_QUESTION_TOKENS:
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
        """Treat these prompts as duplicates: an earlier run has answered them."""
        self._seen |= {self._key(p) for p in prompts}

    def _key(self, prompt: Sequence[int]) -> bytes:
        """Equal for prompts of the same words."""
        words = re.findall(r"\w+", self._model.codec.decode(prompt).lower())
        return sha256(" ".join(words).encode()).digest()[:12]


def _seed(seed: int, number: int, use: int) -> int:
    """A sampling seed per document, for its question (`use` 0) and its answer (1)."""
    return (seed << 40) + (number << 1) + use


def generate_answers(
    model: Model,
    prompts: PromptSource,
    manifest: DatasetManifest,
    writer: DatasetWriter,
    rows: int,
    num_tokens: int,
    cache: HiddenStateCache | None = None,
) -> Iterator[int]:
    """Generate answers until the data set has `num_tokens` tokens to learn, or no prompt is left.

    Yields the number of new tokens after each decoding step. Document `n` depends on the seed and `n` alone, so an
    interrupted run can continue. With a `cache`, which covers the documents so far, the model's hidden states at the
    new documents are appended to it.

    Raises:
        ValueError: the model writes no usable questions.
    """
    recorder = None if cache is None else HiddenStateRecorder(cache)
    method = model.method() if recorder is None else Method(recorder, RootOnly(), Match())
    engine = Engine(model.runner(), method, rows=rows)
    queue = _GenerationQueue(model, prompts, manifest, writer, engine, recorder)
    while True:
        while queue.num_pending < 2 * rows and writer.num_learned_tokens < num_tokens and queue.submit_next():
            pass
        if not engine.busy:
            return
        new = 0
        for update in engine.step():
            if update.error is not None:
                raise update.error
            new += len(update.tokens)
            queue.on_update(update.request, update.tokens, update.finish_reason)
        if len(writer.known_numbers) >= _MAX_UNUSABLE_PROMPTS and not writer.num_learned_tokens:
            raise ValueError(
                f"{model.name} wrote {len(writer.known_numbers)} prompts and no usable question; give prompts with "
                f"--prompts FILE"
            )
        yield new
        if writer.num_learned_tokens >= num_tokens:
            return


def continue_answers(
    model: Model,
    manifest: DatasetManifest,
    writer: DatasetWriter,
    rows: int,
    num_tokens: int,
    given: Sequence[Sequence[int]] | None = None,
    hidden_layers: Sequence[int] = (),
) -> Iterator[int]:
    """`generate_answers` into a new or an existing set: answers to `given` prompts, or to prompts that the model
    writes. The hidden states of these layers are kept beside the new documents.

    Raises:
        ValueError: the model writes no usable questions.
    """
    source, lengths = PromptSource(model, manifest, given), list[int]()
    if writer.num_learned_tokens:
        written = Dataset.open(writer.folder)
        lengths = [len(d.tokens) for d in written]
        if given is None:
            source.mark_seen(d.tokens[: d.start].tolist() for d in written)
    cache = None
    if hidden_layers:
        states, fingerprint = writer.folder / "features", model.checkpoint.fingerprint()
        cache = HiddenStateCache(states, fingerprint, hidden_layers, lengths, model.config.hidden, None)
    yield from generate_answers(model, source, manifest, writer, rows, num_tokens, cache)


@dataclass
class _PendingDocument:
    """A document whose question or answer is being generated."""

    number: int
    prompt: Sequence[int] | None
    """None while the question is being generated."""
    greedy: bool
    new: list[int] = field(default_factory=list)
    """Tokens generated so far by the current request."""


class _GenerationQueue:
    """Submits requests for questions and answers, and writes finished documents."""

    def __init__(
        self,
        model: Model,
        prompts: PromptSource,
        manifest: DatasetManifest,
        writer: DatasetWriter,
        engine: Engine,
        recorder: HiddenStateRecorder | None,
    ) -> None:
        self._model, self._prompts, self._manifest = model, prompts, manifest
        self._writer, self._engine, self._recorder = writer, engine, recorder
        self._pending: dict[int, _PendingDocument] = {}
        self._next = 0

    @property
    def num_pending(self) -> int:
        """Documents in progress."""
        return len(self._pending)

    def submit_next(self) -> bool:
        """Submit the next document that is neither finished nor in progress; False: there is none."""
        while self._next in self._writer.known_numbers:
            self._next += 1
        if self._next == self._prompts.count:
            return False
        number, self._next = self._next, self._next + 1
        prompt = self._prompts.given_prompt(number)
        # Drawn per document, so that the share holds for any set of numbers.
        greedy = CounterRNG(self._manifest.seed).uniform(number) < self._manifest.greedy_share
        document = _PendingDocument(number, prompt, greedy)
        request = self._prompts.question_request(number) if prompt is None else self._answer_request(document)
        self._submit(document, request)
        return True

    def _answer_request(self, document: _PendingDocument) -> Request:
        m = self._manifest
        sampled = SamplingParams(temperature=m.temperature, min_p=MIN_P, seed=_seed(m.seed, document.number, 1))
        sampling = SamplingParams() if document.greedy else sampled
        return Request(document.prompt or (), sampling, m.max_answer, (), self._model.eos)

    def _submit(self, document: _PendingDocument, request: Request) -> None:
        if len(request.prompt) + 1 < self._model.config.context:
            self._pending[self._engine.submit(request)] = document
        else:
            self._discard(document)

    def _discard(self, document: _PendingDocument) -> None:
        self._writer.add(DocumentRecord(number=document.number, tokens=[], start=0))

    def on_update(self, request: int, tokens: Sequence[int], finish_reason: str | None) -> None:
        """Add new tokens; after a finished question request its answer, and write a finished answer."""
        document = self._pending[request]
        document.new += tokens
        if finish_reason is None:
            return
        del self._pending[request]
        if document.prompt is not None:
            tokens, start = [*document.prompt, *document.new], len(document.prompt)
            self._writer.add(DocumentRecord(number=document.number, tokens=tokens, start=start, greedy=document.greedy))
            if self._recorder is not None:
                self._recorder.store(tokens)
            return
        ended = document.new[-1] in self._model.eos
        question = document.new[:-1] if ended else document.new
        document.prompt, document.new = self._prompts.prompt_from_question(document.number, question, ended), []
        if document.prompt is None:
            self._discard(document)
        else:
            self._submit(document, self._answer_request(document))


def write_text_chunks(
    model: Model, texts: Iterator[str], writer: DatasetWriter, length: int, num_tokens: int
) -> Iterator[int]:
    """Write plain text in chunks of `length` tokens until the data set has `num_tokens`; yields the tokens of each
    text.
    """
    number = 0
    for document in tokenize_documents(texts, model.codec):
        for begin in range(0, len(document), length):
            chunk = document[begin : begin + length]
            if len(chunk) > 1:
                if number not in writer.known_numbers:
                    writer.add(DocumentRecord(number=number, tokens=chunk.tolist(), start=0))
                number += 1
        yield len(document)
        if writer.num_learned_tokens >= num_tokens:
            return
