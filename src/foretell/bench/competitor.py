"""What a run measures: a method of ours in one precision, or a peer. Both answer whole conversations."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretell.api import Model, named_inputs
from foretell.bench.peers.base import Peer
from foretell.bench.questions import Question
from foretell.bench.schema import Answer, MeanFidelityLoss, QuestionResult
from foretell.bench.timestamps import TokenTimer, TokenTimestamps
from foretell.bench.tracing import TracingRunner
from foretell.catalogue import find
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.inputs import NamedInputs
from foretell.core.sampling import SamplingParams
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.request import Request, Update
from foretell.engine.statistics import RequestStatistics
from foretell.load import load_draft
from foretell.tokenizer.codec import Message

PLAIN = "autoregressive"
_MAX_BUDGET = 256
"""Most drafted tokens that `name@budget` may ask for."""


@dataclass(frozen=True)
class GenerationSettings:
    """Length and sampling of the answers."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    remember: bool = False
    """A method keeps its state from question to question, separately for each repeat; else it is built afresh."""
    batch: int = 1
    """Questions that a method answers at the same time."""


class Competitor(ABC):
    """Answers questions and measures when the tokens arrive."""

    name: str
    """Unique in a run: method or runtime, a slash, the precision."""
    lossless: bool = True

    @abstractmethod
    def answer(self, question: Question, plain_result: QuestionResult | None, repeat: int = 0) -> tuple[Answer, ...]:
        """Answer every turn of a conversation. `plain_result`: plain decoding's answers, where they are known.

        Raises:
            ValueError: the question does not fit the model.
        """

    def answer_together(
        self, questions: Sequence[Question], plain_results: Sequence[QuestionResult | None], repeat: int = 0
    ) -> list[tuple[Answer, ...]]:
        """Answer several conversations, where the competitor can at the same time.

        Raises:
            ValueError: a question does not fit the model.
        """
        return [self.answer(*pair, repeat) for pair in zip(questions, plain_results, strict=True)]


@dataclass(frozen=True)
class MethodSpec:
    """A method of the catalogue with its options."""

    label: str
    """`method`, `method@budget`, or `method{option=value}`; without slashes."""
    method: str
    config: SpeculativeConfig
    source: str = ""
    """What it was parsed from."""

    @staticmethod
    def parse(text: str) -> "MethodSpec":
        """Parse `name`, `name@budget`, or the JSON of a speculative config that names a method.

        Raises:
            ValueError: unknown method (the nearest is suggested), a budget that is no number in range, or options that
                the method does not read.
        """
        if text.lstrip().startswith("{"):
            return MethodSpec._parse_config(text)
        name, at, budget = text.partition("@")
        entry = find(name)
        if at and not (budget.isdigit() and 0 <= int(budget) <= _MAX_BUDGET):
            raise ValueError(
                f"{text}: after @ comes the number of drafted tokens, 0 to {_MAX_BUDGET}; write for example {name}@8"
            )
        config = SpeculativeConfig(num_speculative_tokens=int(budget)) if at else SpeculativeConfig()
        try:
            entry.parse_options(config)
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from error
        return MethodSpec(entry.name + at + budget, entry.name, config, text)

    @staticmethod
    def _parse_config(text: str) -> "MethodSpec":
        config = SpeculativeConfig.parse(text)
        if config.method is None:
            raise ValueError(f'speculative config {text}: it names no method: add "method"')
        entry = find(config.method)
        entry.parse_options(config)
        given = {"model": config.model} if config.model else {}
        options = {name: str(value).rpartition("/")[2] for name, value in (given | dict(config.options)).items()}
        label = ", ".join(f"{name}={value}" for name, value in options.items())
        return MethodSpec(f"{entry.name}{{{label}}}" if label else entry.name, entry.name, config, text)

    @staticmethod
    def parse_all(texts: Sequence[str]) -> "list[MethodSpec]":
        """Plain decoding and these methods, without duplicates."""
        specs = map(MethodSpec.parse, [PLAIN, *texts])
        return list({s.label: s for s in specs}.values())


class Conversation:
    """The messages of a conversation with one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._messages: list[Message] = []

    def add_user(self, text: str) -> list[int]:
        """Add a message of the user; prompt tokens of the conversation.

        A model without chat template reads the messages one after another.
        """
        self._messages.append({"role": "user", "content": text})
        if self._model.codec.chat_template is not None:
            return self._model.tokens(self._messages)
        return self._model.tokens("\n\n".join(m["content"] for m in self._messages), raw=True)

    def add_answer(self, tokens: Sequence[int]) -> None:
        """Add an answer of the model."""
        self._messages.append({"role": "assistant", "content": self._model.codec.decode(tokens)})


class MethodCompetitor(Competitor):
    """A method of the catalogue. The turns of a conversation share one engine.

    `drafts` and `references` are for all methods of a run, of which this one uses what it can; with `own_drafts` the
    drafts are for it alone.

    Raises:
        ValueError: the method cannot be built, or does not use its own drafts.
    """

    def __init__(
        self,
        model: Model,
        spec: MethodSpec,
        settings: GenerationSettings,
        drafts: Sequence[Model | Path] = (),
        references: Sequence[str] = (),
        own_drafts: bool = False,
    ) -> None:
        self.name, self.label = f"{spec.label}/{model.precision}", spec.label
        self._model, self._spec, self._settings = model, spec, settings
        self._drafts, self._references = tuple(drafts), tuple(references)
        self._runner = model.runner()
        self._engines: dict[int, Engine] = {}
        method = self._build_engine().method
        self.lossless, self.inputs = method.lossless, method.inputs
        self.drafter = method.drafter_label or method.draft.label
        self.shared = named_inputs(() if own_drafts else self._drafts, self._references)
        if own_drafts:
            named_inputs(self._drafts).require_used({spec.label: method.inputs})

    def _build_engine(self) -> Engine:
        method = self._model.method(
            self._spec.method, self._spec.config, drafts=self._drafts, references=self._references, shared=True
        )
        # As in a running server, the times of passes are those that the model's earlier answers took.
        budget = Budget(self._model.pass_times, every_method=False)
        return Engine(TracingRunner(self._runner), method, rows=self._settings.batch, budget=budget)

    def answer(self, question: Question, plain_result: QuestionResult | None, repeat: int = 0) -> tuple[Answer, ...]:
        """Answer every turn; each prompt contains the method's own earlier answers."""
        return self._answer_batch([question], repeat)[0]

    def answer_together(
        self, questions: Sequence[Question], plain_results: Sequence[QuestionResult | None], repeat: int = 0
    ) -> list[tuple[Answer, ...]]:
        """Answer the conversations turn by turn, the same turn of all of them in one batch."""
        if len(questions) == 1:
            return [self.answer(questions[0], plain_results[0], repeat)]
        return self._answer_batch(questions, repeat)

    def _answer_batch(self, questions: Sequence[Question], repeat: int) -> list[tuple[Answer, ...]]:
        engine = self._engines.get(repeat) or self._build_engine()
        if self._settings.remember:
            self._engines[repeat] = engine
        conversations = [Conversation(self._model) for _ in questions]
        answers = [list[Answer]() for _ in questions]
        sampling = SamplingParams(temperature=self._settings.temperature, seed=self._settings.seed)
        for turn in range(max(len(q.turns) for q in questions)):
            asked = [i for i, q in enumerate(questions) if turn < len(q.turns)]
            prompts = [conversations[i].add_user(questions[i].turns[turn]) for i in asked]
            requests = [Request(p, sampling, self._settings.max_new_tokens, eos=self._model.eos) for p in prompts]
            for i, answer in zip(asked, self._complete(engine, requests), strict=True):
                answers[i].append(answer)
                conversations[i].add_answer(answer.tokens)
        return [tuple(each) for each in answers]

    def _complete(self, engine: Engine, requests: Sequence[Request]) -> list[Answer]:
        runner = engine.runner
        assert isinstance(runner, TracingRunner)
        runner.passes = []
        traces = dict[int, _RequestTrace]()

        def note(update: Update) -> None:
            traces.setdefault(update.request, _RequestTrace(started)).add(update, engine)

        started = time.perf_counter()
        completions = engine.complete(requests, note)
        # Numbers increase in the order of submission.
        ordered = [traces[number] for number in sorted(traces)]
        begun = max(t.timer.seconds[0] for t in ordered)
        answers = list[Answer]()
        for request, completion, trace in zip(requests, completions, ordered, strict=True):
            statistics = completion.statistics
            tested, accepted = runner.count_acceptance(trace.row) if trace.row is not None else ((), ())
            counts = {
                "passes": statistics.target_passes,
                "drafted": statistics.drafted,
                "tested_per_position": tested,
                "accepted_per_position": accepted,
                "draft_seconds": statistics.draft_seconds,
                "verify_seconds": statistics.verify_seconds,
                "step_seconds": statistics.decode_seconds,
                "read_per_pass": trace.read_per_pass,
                "requests_per_pass": trace.requests_per_pass,
                "fidelity": None if self.lossless else _mean_fidelity_loss(statistics),
            }
            timestamps = trace.timer.timestamps().from_time(begun)
            answers.append(timed_answer(self._model, request.prompt, timestamps).model_copy(update=counts))
        return answers


class _RequestTrace:
    """Arrival times of a request's tokens, its row, and what the passes after its prompt read."""

    def __init__(self, started: float) -> None:
        self.timer = TokenTimer(started)
        self.row: int | None = None
        self._read = self._requests = self._passes = 0

    def add(self, update: Update, engine: Engine) -> None:
        """Note an update right after its step."""
        self.timer.add(update.tokens)
        counts = engine.last_step.counts
        if self.row is None:
            self.row = engine.row(update.request)
        if not counts.reads_prompt:
            self._read, self._requests = self._read + counts.read, self._requests + counts.requests
            self._passes += 1

    @property
    def read_per_pass(self) -> float:
        """Mean tokens that a pass reads of a request."""
        return self._read / self._requests if self._requests else 0.0

    @property
    def requests_per_pass(self) -> float:
        """Mean requests in a pass."""
        return self._requests / self._passes if self._passes else 1.0


def use_of_inputs(competitors: Sequence[MethodCompetitor], peers: Sequence[str] = ()) -> list[str]:
    """Which methods use the drafts that were named for all of them, in a sentence where some do not. `peers`: those
    that draft with the draft model.

    Raises:
        ValueError: no method uses the drafts, or the references.
    """
    most = max(competitors, key=lambda c: len(c.shared.drafts) + len(c.shared.speculators)).shared
    NamedInputs(references=most.references).require_used({c.label: c.inputs for c in competitors})
    sharing = {c.label: c.inputs for c in competitors if c.shared.drafts or c.shared.speculators}
    sharing |= {name: frozenset({"drafts"}) for name in peers}
    return replace(most, references=()).use(sharing)


class PeerCompetitor(Competitor):
    """Another runtime: reads the prompts of our plain decoding and writes as many tokens."""

    def __init__(self, peer: Peer, model: Model) -> None:
        self.name, self._peer, self._model = peer.name, peer, model

    def answer(self, question: Question, plain_result: QuestionResult | None, repeat: int = 0) -> tuple[Answer, ...]:
        """Answer every turn; each prompt contains plain decoding's earlier answers."""
        if plain_result is None or plain_result.error:
            raise ValueError("plain decoding has no answer to this question")
        conversation, answers = Conversation(self._model), list[Answer]()
        for text, plain in zip(question.turns, plain_result.answers, strict=True):
            prompt = conversation.add_user(text)
            answers.append(timed_answer(self._model, prompt, self._peer.generate(prompt, len(plain.tokens))))
            conversation.add_answer(plain.tokens)
        return tuple(answers)


def load_drafts(references: str | None, precision: str, device: str) -> list[Model | Path]:
    """Draft models and speculators of a comma-separated list."""
    return [load_draft(r, precision, device) for r in (references or "").split(",") if r]


def timed_answer(model: Model, prompt: Sequence[int], timestamps: TokenTimestamps) -> Answer:
    """An answer with what is known of every competitor: tokens and times."""
    text = model.codec.decode(timestamps.tokens).strip()
    return Answer(
        prompt_tokens=len(prompt),
        tokens=timestamps.tokens,
        arrival_seconds=timestamps.seconds,
        arrival_counts=timestamps.counts,
        retokenized_tokens=len(model.codec.encode(text, add_special_tokens=False)) if text else 0,
    )


def _mean_fidelity_loss(statistics: RequestStatistics) -> MeanFidelityLoss:
    loss = statistics.fidelity
    return MeanFidelityLoss(kl=loss.mean_divergence, total_variation=loss.mean_variation, changed=loss.changed_share)
