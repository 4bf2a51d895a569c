"""Methods that are broken in one characteristic way each, and the lab that decodes with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.accept import LenientRejection
from foretell.accept.base import Acceptor, AcceptResult
from foretell.api import Model
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.engine.method import AnyMethod, Method
from foretell.lab.reproduce import Lab, LabRun, Run
from foretell.model.cache import layout
from foretell.model.kernels.decoder import NativeDecoder

Change = Callable[[TokenTree, np.random.Generator], TokenTree]
"""The tree of drafts with other tokens."""


@dataclass(frozen=True)
class Mutant:
    """A way to break the methods of `claims`. `build`: the broken method in place of the right one. `world`: what else
    is broken while it decodes.
    """

    claims: tuple[str, ...]
    build: Callable[[AnyMethod], AnyMethod] = lambda method: method
    world: Callable[[], AbstractContextManager[None]] = nullcontext


class MutantLab(Lab):
    """A lab whose runs of one kind are those of a broken method; the others are the right lab's."""

    def __init__(self, lab: Lab, broken: Run, mutant: Mutant) -> None:
        self.__dict__.update(lab.__dict__)
        self._lab, self._broken, self._mutant = lab, broken, mutant
        # Under the same keys as the right method's, and not kept beside them.
        self._runs, self._store = {}, SimpleNamespace(append=lambda record: None)  # type: ignore[assignment]

    def run(self, run: Run) -> LabRun:
        """The answers of a run."""
        if run is not self._broken:
            return self._lab.run(run)
        with self._mutant.world():
            return super().run(run)

    def build(self, run: Run, options: Mapping[str, object], drafts: Sequence[Model | Path]) -> AnyMethod:
        """The broken method."""
        return self._mutant.build(super().build(run, options, drafts))


class Redrafted(Method[Any]):
    """A method whose drafted tokens are changed before they are verified."""

    change: Change

    def finish(self, tree: TokenTree, context: Context) -> TokenTree:
        """The tree with other tokens."""
        rng = np.random.default_rng(sum(s.length for s in context.sequences))
        return super().finish(type(self).change(tree, rng), context)


def redrafted(change: Change) -> Callable[[AnyMethod], AnyMethod]:
    """Mutation of the drafted tokens."""
    kind = type("Changed", (Redrafted,), {"change": staticmethod(change)})

    def build(method: AnyMethod) -> AnyMethod:
        made: AnyMethod = kind(**{f.name: getattr(method, f.name) for f in fields(Method)})
        return made

    return build


def with_tokens(tree: TokenTree, token: np.ndarray) -> TokenTree:
    """The tree with these tokens as drafts that were not sampled."""
    drafted = tree.valid & ~tree.probe & (tree.depth > 0)
    return replace(tree, token=np.where(drafted, token, tree.token), q_index=np.full_like(tree.q_index, -1), q=None)


def at_random(tree: TokenTree, rng: np.random.Generator) -> TokenTree:
    """Any tokens."""
    return with_tokens(tree, rng.integers(0, 1000, tree.token.shape))


class AcceptsAll(Acceptor):
    """Accepts the first child of every node, whatever the target says."""

    lossless = True
    same_seed = True

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """The first path, and the target's token after it."""
        children, node, path = tree.children(row), tree.root(row), list[int]()
        while node in children and distributions.goes_on(row, children[node][0]):
            path.append(node := children[node][0])
        return AcceptResult(tuple(path), distributions.sample(row, node))


def accepts(acceptor: Acceptor) -> Callable[[AnyMethod], AnyMethod]:
    """Mutation of the acceptor."""
    return lambda method: replace(method, accept=acceptor)


def permuted_heads(method: AnyMethod) -> AnyMethod:
    """Every head predicts the position of another one."""
    compute = method.draft._compute_all
    method.draft._compute_all = lambda texts: compute(texts).flip(0)
    return method


def forgets_the_token(method: AnyMethod) -> AnyMethod:
    """The stages of a recurrent speculator read the same token, whatever was drafted."""
    step = method.draft.network.draft_step
    method.draft.grow_dynamic_tree = lambda *_: None
    method.draft.network.draft_step = lambda state, token, stage: step(
        state, token if stage == 0 else torch.zeros_like(token), stage
    )
    return method


def blind_features(method: AnyMethod) -> AnyMethod:
    """The drafter sees no hidden state of the target."""
    pending = method.draft._pending

    def without(*arguments: Any) -> Any:
        token, states = pending(*arguments)
        return token, states._replace(hidden_states=[torch.zeros_like(h) for h in states.hidden_states])

    method.draft._pending = without
    return method


def any_position(method: AnyMethod) -> AnyMethod:
    """Copies from any position of the text, not from behind the last tokens."""

    def find(sequence: np.ndarray, searched: int, most: int) -> tuple[int, tuple[int, ...]]:
        at = int(np.random.default_rng(len(sequence)).integers(len(sequence)))
        return 1, tuple(sequence[at : at + most].tolist())

    method.draft.find = find
    return method


def window_unused(method: AnyMethod) -> AnyMethod:
    """The n-grams that the window completes are dropped."""
    start = method.draft._start

    def without(*arguments: Any) -> Any:
        state = start(*arguments)
        advance = state.window.advance
        state.window.advance = lambda *a: advance(*a)[:0]
        return state

    method.draft._start = without
    return method


def never_iterates(method: AnyMethod) -> AnyMethod:
    """The guesses stay what they were at first."""
    method.draft.observe = lambda step: method.draft._iterate.clear()
    return method


@contextmanager
def no_tree_mask() -> Iterator[None]:
    """Every node of a tree sees all that were drafted before it, not its ancestors alone."""

    def visible(tree: TokenTree, i: int, base: int) -> Iterator[tuple[int, list[int]]]:
        return ((base + node + 1, []) for node in range(tree.nodes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_visible_slots", visible)
        patch.setattr(NativeDecoder, "forwards_trees", False)
        yield


MUTANTS: Mapping[str, Mutant] = {
    "drafts at random": Mutant(("ngram", "draft_model", "quantised_draft", "eagle3"), redrafted(at_random)),
    "acceptor ignores the target": Mutant(("draft_model",), accepts(AcceptsAll())),
    "acceptor ignores its lenience": Mutant(("lenience_lossy",), accepts(LenientRejection(1.0))),
    "ancestors' mask dropped": Mutant(("eagle3",), world=no_tree_mask),
    "features of the target blank": Mutant(("eagle3",), blind_features),
    "heads permuted": Mutant(("medusa",), permuted_heads),
    "stages read one token": Mutant(("mlp_speculator",), forgets_the_token),
    "any position copied": Mutant(("ngram",), any_position),
    "window unused": Mutant(("lookahead",), window_unused),
    "never iterates": Mutant(("jacobi",), never_iterates),
}
