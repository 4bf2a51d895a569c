"""Foretell in the measurement of single steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.api import Model
from foretell.bench.machine import synchronize
from foretell.bench.peers.base import ForwardBackend
from foretell.bench.tracing import TracingRunner, prefill
from foretell.core.tree import tree_from_lists
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner

_WARM_UP_TOKENS = 4
"""New tokens of the first request that an engine decides before it is timed: by then every prompt has been read."""


class OwnForwardBackend(ForwardBackend):
    """`Runner.forward` over a chain or a binary tree; every node is scored."""

    def __init__(self, name: str, runner: Runner, branching: bool = False) -> None:
        self.name = name + (" tree" if branching else "")
        self._runner, self._branching = runner, branching

    @staticmethod
    def from_model(model: Model) -> "list[OwnForwardBackend]":
        """Chain and tree; where passes are replayed as CUDA graphs, both without graphs as well."""
        name, runner = f"foretell {model.precision}", model.runner()
        runners = {name: runner}
        if isinstance(runner, DecoderRunner) and isinstance(runner.network, GraphedDecoder):
            runners[f"{name} without graphs"] = DecoderRunner(runner.network.decoder)
        return [OwnForwardBackend(n, r, branching) for n, r in runners.items() for branching in (False, True)]

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read the tokens that every pass continues."""
        prefill(self._runner, tokens)

    def forward(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens; nothing is committed, so the next pass overwrites them."""
        parents = [(i - 1) // 2 if i and self._branching else i - 1 for i in range(len(tokens))]
        synchronize(self._runner.forward([0], tree_from_lists([tokens], [parents])).logits.device)


@dataclass(frozen=True)
class StepTiming:
    """A few engine steps: tokens decided, seconds in all, seconds in the target's passes."""

    tokens: int
    seconds: float
    verify_seconds: float


class EngineTimer:
    """Times steps of a whole engine that decodes `rows` sequences, after their prompts have been read."""

    def __init__(self, model: Model, method: str, rows: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        self._engine = Engine(
            TracingRunner(model.runner()), model.method(method), rows=rows, detokenizer=model.codec.detokenizer
        )
        prompts = [[*tokens[r:], *tokens[:r]] for r in range(rows)]
        requests = [self._engine.submit(Request(p, max_new_tokens=max_new_tokens)) for p in prompts]
        self._first = requests[0]
        while self._engine.statistics[self._first].new_tokens < _WARM_UP_TOKENS:
            self._engine.step()

    def run(self, steps: int) -> StepTiming:
        """Time some steps. The statistics of the first request give the share of the target's passes."""
        before, tokens = self._engine.statistics[self._first].verify_seconds, 0
        started = time.perf_counter()
        for _ in range(steps):
            for update in self._engine.step():
                if update.error is not None:
                    raise update.error
                tokens += len(update.tokens)
        seconds = time.perf_counter() - started
        return StepTiming(tokens, seconds, self._engine.statistics[self._first].verify_seconds - before)
