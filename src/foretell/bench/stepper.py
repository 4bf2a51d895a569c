"""Our own runtime as a contender of the step measurement."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretell.api import Model
from foretell.bench.contender import Watched
from foretell.bench.machine import synchronize
from foretell.bench.peers.base import Stepper
from foretell.core.tree import root_tree, tree_from_lists
from foretell.engine.engine import Engine, Request
from foretell.model.cuda_graph import GraphedDecoder
from foretell.model.runner import DecoderRunner, Runner


class OwnStepper(Stepper):
    """`Runner.forward` over a chain, or over a binary tree of as many nodes, every node scored."""

    def __init__(self, name: str, runner: Runner, branching: bool = False) -> None:
        self.name = name + (" tree" if branching else "")
        self._runner, self._branching = runner, branching

    @staticmethod
    def all_of(model: Model) -> "list[OwnStepper]":
        """Chain and tree; where passes are replayed as CUDA graphs, both without graphs as well."""
        name, runner = f"foretell {model.precision}", model.runner()
        runners = {name: runner}
        if isinstance(runner, DecoderRunner) and isinstance(runner.network, GraphedDecoder):
            runners[f"{name} without graphs"] = DecoderRunner(runner.network.decoder)
        return [OwnStepper(n, r, branching) for n, r in runners.items() for branching in (False, True)]

    def hold(self, text: Sequence[int]) -> None:
        """Read the text that every pass continues."""
        self._runner.truncate(0, 0)
        for start in range(0, len(text), 512):
            part = list(text[start : start + 512])
            tree = root_tree([part[-1]]).with_prefix([part])
            self._runner.forward([0], tree, scored=np.zeros_like(tree.valid))
            self._runner.commit(0, range(len(part)))

    def read(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens; nothing is kept, so the next pass overwrites them."""
        parents = [(i - 1) // 2 if i and self._branching else i - 1 for i in range(len(tokens))]
        synchronize(self._runner.forward([0], tree_from_lists([tokens], [parents])).logits.device)


@dataclass(frozen=True)
class Stretch:
    """A few engine steps: tokens decided, seconds in all, seconds in the target's pass."""

    tokens: int
    seconds: float
    verify: float


class EngineStretches:
    """Steps of a whole engine that decodes `rows` texts at once without end, past their prompts."""

    def __init__(self, model: Model, method: str, rows: int, text: Sequence[int], most: int) -> None:
        self._engine = Engine(
            Watched(model.runner()), model.method(method), rows=rows, detokenizer=model.codec.detokenizer
        )
        shifted = [[*text[r:], *text[:r]] for r in range(rows)]
        numbers = [self._engine.submit(Request(t, max_new_tokens=most)) for t in shifted]
        self._first = numbers[0]
        while self._engine.statistics[self._first].new_tokens < 4:
            self._engine.step()

    def run(self, steps: int) -> Stretch:
        """Time some steps; the first request's account tells how much of them the target took."""
        before, tokens = self._engine.statistics[self._first].verify_seconds, 0
        started = time.perf_counter()
        for _ in range(steps):
            tokens += sum(len(u.tokens) for u in self._engine.step())
        seconds = time.perf_counter() - started
        return Stretch(tokens, seconds, self._engine.statistics[self._first].verify_seconds - before)
