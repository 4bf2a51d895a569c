"""Who is measured: a method of ours at a precision, or a peer, each answering whole conversations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from foretell.api import Model
from foretell.bench.arrivals import Arrivals, Clock
from foretell.bench.machine import synchronize
from foretell.bench.peers.base import Peer
from foretell.bench.schema import Price, Record, Turn
from foretell.bench.tasks import Question
from foretell.catalogue import find
from foretell.catalogue.config import SpeculativeConfig
from foretell.core.context import ModelOutput
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree
from foretell.engine.engine import Engine, Request
from foretell.engine.statistics import RequestStatistics
from foretell.model.runner import Runner
from foretell.tokenizer.codec import Message

PLAIN = "autoregressive"


@dataclass(frozen=True)
class Limits:
    """How much is generated, and how."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    remember: bool = False
    """A method keeps what it learned from earlier questions, each repeat on its own; else every question meets one that
    remembers nothing.
    """


class Contender(ABC):
    """Answers questions under a clock."""

    name: str
    """Unique in a run: method or runtime, a slash, the precision."""
    lossless: bool = True

    @abstractmethod
    def answer(self, question: Question, plain: Record | None, repeat: int = 0) -> tuple[Turn, ...]:
        """Every turn of the conversation. `plain`: what plain decoding answered, where that is known.

        Raises:
            ValueError: the question does not fit the model.
        """


@dataclass(frozen=True)
class Spec:
    """A method as users write it: `name`, or `name@budget` for another number of drafted tokens."""

    text: str
    method: str
    config: SpeculativeConfig

    @staticmethod
    def parse(text: str) -> "Spec":
        """Read it.

        Raises:
            ValueError: unknown method (the nearest is suggested), a budget that is no number in range, or a method that
                reads none.
        """
        name, at, budget = text.partition("@")
        entry = find(name)
        if at and not (budget.isdigit() and 0 <= int(budget) <= 256):
            raise ValueError(
                f"{text}: after @ comes the number of drafted tokens, 0 to 256; write for example {name}@8"
            )
        config = SpeculativeConfig(num_speculative_tokens=int(budget)) if at else SpeculativeConfig()
        try:
            entry.parse_options(config)
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from error
        return Spec(entry.name + at + budget, entry.name, config)


class Watched(Runner):
    """Passes everything on to another runner and remembers each pass: its tree and what was kept of it."""

    def __init__(self, inner: Runner) -> None:
        self.inner, self.vocab, self.context = inner, inner.vocab, inner.context
        self.passes: list[tuple[TokenTree, tuple[int, ...]]] = []
        self._tree: TokenTree | None = None

    def length(self, row: int) -> int:
        """How many tokens of a row have been read and kept."""
        return self.inner.length(row)

    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Read nodes of a tree; see `Runner.forward`."""
        self._tree = tree
        output = self.inner.forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)
        # A GPU returns before it has finished: without this its work would count as accepting, not as verifying.
        synchronize(output.logits.device)
        return output

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree."""
        if self._tree is not None:
            self.passes.append((self._tree, tuple(path)))
        self.inner.commit(row, path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        self.inner.truncate(row, length)

    def acceptance(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Passes that tested, and that accepted, a draft at depth 1, 2, …: one is tested where all before it stood and
        the tree goes on.
        """
        tested: list[int] = []
        accepted: list[int] = []
        for tree, path in self.passes:
            depth = len(path) - int(tree.prefix_length[0])
            goes_on = path[-1] in tree.children(0)
            for counts, upto in ((tested, depth + goes_on), (accepted, depth)):
                counts += [0] * (upto - len(counts))
                for d in range(upto):
                    counts[d] += 1
        return tuple(tested), tuple(accepted)


class OwnContender(Contender):
    """A method of the catalogue, made afresh for every question or kept (`Limits.remember`); the turns of a
    conversation share it.
    """

    def __init__(
        self,
        model: Model,
        spec: Spec,
        limits: Limits,
        drafts: Sequence[Model | Path] = (),
        references: Sequence[str] = (),
    ) -> None:
        self.name = f"{spec.text}/{model.precision}"
        self._model, self._spec, self._limits = model, spec, limits
        self._drafts, self._references = tuple(drafts), tuple(references)
        self._runner = model.runner()
        self._kept: dict[int, Engine] = {}
        self.lossless = self._engine().method.lossless

    def _engine(self) -> Engine:
        method = self._model.method(
            self._spec.method, self._spec.config, drafts=self._drafts, references=self._references
        )
        return Engine(Watched(self._runner), method, rows=1)

    def answer(self, question: Question, plain: Record | None, repeat: int = 0) -> tuple[Turn, ...]:
        """Every turn; the next one is asked after the method's own answer."""
        engine = self._kept.get(repeat) or self._engine()
        if self._limits.remember:
            self._kept[repeat] = engine
        messages, turns = list[Message](), list[Turn]()
        sampling = SamplingParams(temperature=self._limits.temperature, seed=self._limits.seed)
        for text in question.turns:
            messages.append({"role": "user", "content": text})
            prompt = conversation(self._model, messages)
            request = Request(prompt, sampling, self._limits.max_new_tokens, eos=self._model.eos)
            turns.append(self._turn(engine, request))
            messages.append({"role": "assistant", "content": self._model.codec.decode(turns[-1].tokens)})
        return tuple(turns)

    def _turn(self, engine: Engine, request: Request) -> Turn:
        watched = engine.runner
        assert isinstance(watched, Watched)
        watched.passes = []
        clock = Clock()
        (done,) = engine.complete([request], lambda update: clock.note(update.tokens))
        stats = done.statistics
        tested, accepted = watched.acceptance()
        engine_says = {
            "passes": stats.target_passes,
            "drafted": stats.drafted,
            "tested": tested,
            "accepted": accepted,
            "draft_seconds": stats.draft_seconds,
            "verify_seconds": stats.verify_seconds,
            "step_seconds": stats.decode_seconds,
            "price": None if self.lossless else price(stats),
        }
        return arrived(self._model, request.prompt, clock.stop()).model_copy(update=engine_says)


class PeerContender(Contender):
    """Another runtime: the prompts of our plain decoding, and as many tokens as it wrote."""

    def __init__(self, peer: Peer, model: Model) -> None:
        self.name, self._peer, self._model = peer.name, peer, model

    def answer(self, question: Question, plain: Record | None, repeat: int = 0) -> tuple[Turn, ...]:
        """Every turn, after plain decoding's answers to the ones before."""
        if plain is None or plain.refused:
            raise ValueError("plain decoding has no answer to this question")
        messages, turns = list[Message](), list[Turn]()
        for text, done in zip(question.turns, plain.turns, strict=True):
            messages.append({"role": "user", "content": text})
            prompt = conversation(self._model, messages)
            turns.append(arrived(self._model, prompt, self._peer.generate(prompt, len(done.tokens))))
            messages.append({"role": "assistant", "content": self._model.codec.decode(done.tokens)})
        return tuple(turns)


def conversation(model: Model, messages: Sequence[Message]) -> list[int]:
    """Prompt tokens of a conversation; a model without chat template reads its texts one after another."""
    if model.codec.chat_template is not None:
        return model.tokens(messages)
    return model.tokens("\n\n".join(m["content"] for m in messages), raw=True)


def arrived(model: Model, prompt: Sequence[int], arrivals: Arrivals) -> Turn:
    """An answer with what every contender has to say about it."""
    text = model.codec.decode(arrivals.tokens).strip()
    retokenized = len(model.codec.encode(text, add_special_tokens=False)) if text else 0
    return Turn(
        prompt_tokens=len(prompt), tokens=arrivals.tokens, at=arrivals.at, count=arrivals.count, retokenized=retokenized
    )


def price(statistics: RequestStatistics) -> Price:
    """What a lossy method changed in this answer."""
    p = statistics.fidelity
    return Price(kl=p.mean_divergence, total_variation=p.mean_variation, changed=p.changed_share)
