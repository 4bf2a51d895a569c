"""Simulates machines, drafters and histories, on which the constants of the draft budget were chosen.

usage: python tools/fit_budget.py [CONSTANT VALUE...]

Prints the speed of the budget over that of plain decoding and of the best fixed number of drafts, in each situation;
with a constant of `foretell.engine.tuning`, the least and the mean for each of its values.
"""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from foretell.accept import Match
from foretell.core.context import Context, ModelOutput, StepResult, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.core.tree import root_tree, tree_from_lists
from foretell.draft import Continuation, Retriever
from foretell.engine.asking import Plan
from foretell.engine.budget import Budget
from foretell.engine.draft_account import DraftAccount
from foretell.engine.drafted_trees import DraftedTrees
from foretell.engine.method import BoundMethod, Method
from foretell.engine.statistics import StepTime
from foretell.engine.step_costs import StepLoad
from foretell.shape import Trie

LONGEST = 8
"""Most drafts of a request and step."""


class _Silent(Retriever):
    """Stands for the simulated drafter."""

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """Not called."""
        raise NotImplementedError


@dataclass
class Machine:
    """Seconds of passes by requests and drafts, and of drafting by requests, and the chances of drafts.

    A draft's chance given its parent is drawn around `chance`; the drafter knows it up to `bias`, a power.
    """

    seconds: Callable[[int, int], float]
    drafting: float = 0.002
    row: float = 0.0002
    """Of drafting for a further request."""
    chance: float = 0.7
    sampled_chance: float | None = None
    bias: float = 1.0
    reading: float = 0.0
    """Of the drafter, for a token that it has not read."""
    unread: int = 0
    """Such tokens of each request."""
    noise: Callable[[np.random.Generator], float] = lambda random: 1.0
    """Factor of each step's time."""


@dataclass
class Client:
    """A request of so many tokens."""

    length: int
    sampled: bool = False
    unread: int = 0
    """Tokens that the drafter has not read."""
    account: DraftAccount = field(default_factory=DraftAccount)
    done: int = 1
    """The first one comes with the prompt."""
    seconds: float = 0.0
    """Time of its steps."""

    @property
    def left(self) -> int:
        """Tokens to come."""
        return self.length - self.done


class Simulation:
    """Runs requests on a machine under a budget; `fixed`: always so many drafts, whatever the budget says."""

    def __init__(self, machine: Machine, seed: int = 0, fixed: int | None = None) -> None:
        self.machine, self.budget, self.fixed = machine, Budget(), fixed
        self.random = np.random.default_rng(seed)
        self.bound = BoundMethod(Method(_Silent(), Trie(LONGEST, elastic=True), Match()))
        self.seconds, self.tokens, self.drafting_steps = 0.0, 0, 0

    def run(self, clients: Sequence[Client], together: int = 1) -> float:
        """Decode the requests, so many at a time; tokens per second."""
        waiting, running = list(clients), list[Client]()
        seconds, tokens = self.seconds, self.tokens
        while waiting or running:
            while waiting and len(running) < together:
                running.append(waiting.pop(0))
            self._step(running)
            running = [client for client in running if client.left]
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _chain(self, client: Client) -> tuple[list[int], list[float]]:
        """Drafted tokens, of which 1 is right, and their scores."""
        m, tokens, scores, score = self.machine, list[int](), list[float](), 1.0
        mean = m.sampled_chance if client.sampled and m.sampled_chance is not None else m.chance
        for _ in range(min(LONGEST, client.left - 1)):
            chance = float(self.random.beta(4 * mean, 4 * (1 - mean)))
            right = (not tokens or tokens[-1] == 1) and self.random.random() < chance
            score *= chance**m.bias
            tokens.append(1 if right else 2)
            scores.append(score)
        return tokens, scores

    def _step(self, clients: Sequence[Client]) -> None:
        m, b = self.machine, self.budget
        count = len(clients)
        b.begin(
            StepLoad(
                tokens=count,
                is_decode=True,
                weights=[1.0] * count,
                room=[client.left - 1 for client in clients],
                left=[client.left for client in clients],
                sampled=[client.sampled for client in clients],
                accounts=[client.account for client in clients],
            )
        )
        plan = b.plan(self.bound, 0, range(count), lambda i: clients[i].unread)
        if self.fixed is not None:
            plan = Plan([i for i in range(count) if clients[i].left > 1]) if self.fixed else None
        tree, drafting = root_tree([0] * count), 0.0
        if plan is not None and plan.asked:
            chains = [self._chain(clients[i]) for i in plan.asked]
            kept = [sum(score >= plan.least_score for score in scores) for _, scores in chains]
            offered = tree_from_lists(
                [[0, *tokens[:n]] for (tokens, _), n in zip(chains, kept, strict=True)],
                [[-1, *range(n)] for n in kept],
                [[1.0, *scores[:n]] for (_, scores), n in zip(chains, kept, strict=True)],
            )
            drafting = m.drafting + m.row * (len(plan.asked) - 1)
            for i in plan.asked:
                drafting += m.reading * clients[i].unread
                clients[i].unread = 0
            offered = b.offer(self.bound, 0, plan.asked, offered)
            part = DraftedTrees(self.bound, plan.asked, offered, removable=True)
            b.choose([part])
            if self.fixed is not None:
                part.tree = offered.limit_drafts([self.fixed] * len(plan.asked))
            tree = part.tree.spread([0] * count, plan.asked)
        else:
            b.choose([])
        self._finish(clients, tree, drafting)

    def _finish(self, clients: Sequence[Client], tree: Any, drafting: float) -> None:
        paths, new, m = list[tuple[int, ...]](), list[tuple[int, ...]](), self.machine
        for row, client in enumerate(clients):
            nodes = [0, *tree.find_path(row, [1] * LONGEST)]
            paths.append(tuple(nodes))
            new.append((1,) * min(len(nodes), client.left))
        factor = m.noise(self.random)
        read = m.seconds(len(clients), tree.active_count - len(clients)) * factor
        drafting *= factor
        step = _result(tree, tuple(paths), tuple(new))
        self.budget.observe(step, StepTime(drafting, read, drafting + read), shared=False)
        self.seconds += drafting + read
        self.drafting_steps += tree.active_count > len(clients)
        for client, tokens in zip(clients, new, strict=True):
            client.done += len(tokens)
            client.seconds += drafting + read
            self.tokens += len(tokens)


_PLAIN = SamplingParams()


def _result(tree: Any, paths: tuple[tuple[int, ...], ...], new: tuple[tuple[int, ...], ...]) -> StepResult:
    count = len(paths)
    context = Context(
        tuple(range(count)),
        (TokenBuffer([0]),) * count,
        (_PLAIN,) * count,
        (CounterRNG(0),) * count,
        np.zeros(count, np.int64),
    )
    output = ModelOutput(torch.zeros(0, 1), np.zeros((0, 0), np.int64))
    return StepResult(context, tree, output, paths, new, (0,) * count)


def linear(slope: float, free: int = 0, base: float = 0.01) -> Callable[[int, int], float]:
    """Passes over more than `free` tokens whose further ones take a share of the first one's time."""
    return lambda requests, drafts: base * (1 + slope * max(0, requests + drafts - 1 - free))


def doubled(random: np.random.Generator) -> float:
    """Half of the steps take twice their time, and all vary by 5 %."""
    return (2.0 if random.random() < 0.5 else 1.0) * float(random.lognormal(0, 0.05))


def situations() -> Iterator[tuple[str, Machine, int]]:
    """Machines with drafters, and requests at a time."""
    slopes = {"free": (0.0, 16), "3 %": (0.03, 0), "10 %": (0.1, 0), "30 %": (0.3, 0)}
    for (name, (slope, free)), drafting, chance, together in itertools.product(
        slopes.items(), (0.0002, 0.002, 0.006), (0.3, 0.6, 0.9), (1, 4, 16, 64)
    ):
        machine = Machine(linear(slope, free), drafting, drafting / 10, chance)
        yield f"tokens {name}, drafting {drafting / 0.01:.0%}, chance {chance}, {together} together", machine, together
    for unread, slope, together in itertools.product((100, 1000), (0.05, 0.3), (1, 16)):
        machine = Machine(linear(slope), drafting=0.004, reading=25e-6, unread=unread)
        yield f"reads {unread} tokens, tokens {slope:.0%}, {together} together", machine, together
    for together in (1, 16):
        yield f"noisy, {together} together", Machine(linear(0.05), noise=doubled), together
        yield f"overconfident, {together} together", Machine(linear(0.05), bias=0.3), together


def gains(machine: Machine, together: int, seed: int = 0) -> tuple[float, float]:
    """Speed of the budget over that of plain decoding, and over the best fixed number of drafts, plain included."""

    def speed(fixed: int | None) -> float:
        simulation = Simulation(machine, seed, fixed)
        return simulation.run([Client(120, unread=machine.unread) for _ in range(4 * together + 8)], together)

    plain, *drafted = [speed(fixed) for fixed in (0, 1, 2, 4, LONGEST)]
    own = speed(None)
    return own / plain, own / max(plain, *drafted)


def main(arguments: Sequence[str]) -> None:
    """Print the table of all situations, or a summary for each value of a constant."""
    if not arguments:
        for name, machine, together in situations():
            over_plain, over_best = gains(machine, together)
            print(f"{name:60} {over_plain:5.2f} of plain, {over_best:5.2f} of the best fixed")
        return
    name, *values = arguments
    modules = [
        importlib.import_module(f"foretell.engine.{m}")
        for m in ("acceptance", "asking", "budget", "draft_account", "draft_source", "pass_times", "step_costs")
    ]
    for value in values:
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, type(getattr(module, name))(float(value)))
        found = [gains(machine, together) for _, machine, together in situations()]
        least, mean = min(g for g, _ in found), float(np.mean([b for _, b in found]))
        print(f"{name} {value}: at least {least:.3f} of plain, {mean:.3f} of the best fixed on the mean")


if __name__ == "__main__":
    main(sys.argv[1:])
