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

from foretell.accept import LenientRejection, Rejection
from foretell.accept.base import Acceptor, AcceptResult
from foretell.api import Model
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.engine.method import AnyMethod, Method
from foretell.lab.reproduce import Lab, LabRun, Run
from foretell.model.cache import layout
from foretell.model.cache.policy import Retrieval

Change = Callable[[TokenTree, np.random.Generator], np.ndarray]
"""New tokens of a tree of drafts."""


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
        token = type(self).change(tree, np.random.default_rng(sum(s.length for s in context.sequences)))
        drafted = tree.valid & ~tree.probe & (tree.depth > 0)
        return super().finish(replace(tree, token=np.where(drafted, token, tree.token)), context)


def redrafted(change: Change) -> Callable[[AnyMethod], AnyMethod]:
    """Mutation of the drafted tokens."""
    kind = type("Changed", (Redrafted,), {"change": staticmethod(change)})

    def build(method: AnyMethod) -> AnyMethod:
        made: AnyMethod = kind(**{f.name: getattr(method, f.name) for f in fields(Method)})
        return made

    return build


def at_random(tree: TokenTree, rng: np.random.Generator) -> np.ndarray:
    """Any tokens."""
    return rng.integers(0, 1000, tree.token.shape)


def shuffled(tree: TokenTree, rng: np.random.Generator) -> np.ndarray:
    """The tokens of a depth in another order: the same tokens below other parents."""
    token = tree.token.copy()
    for row in range(tree.rows):
        for depth in range(1, int(tree.depth[row].max()) + 1):
            nodes = np.flatnonzero(tree.valid[row] & (tree.depth[row] == depth))
            token[row, nodes] = np.roll(token[row, nodes], 1 + int(rng.integers(max(1, len(nodes) - 1))))
    return token


def alike(tree: TokenTree, rng: np.random.Generator) -> np.ndarray:
    """All drafts of a depth hold the token of the first: a tree that offers no choice."""
    token = tree.token.copy()
    for row in range(tree.rows):
        for depth in range(1, int(tree.depth[row].max()) + 1):
            nodes = np.flatnonzero(tree.valid[row] & (tree.depth[row] == depth))
            token[row, nodes] = token[row, nodes[:1]]
    return token


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


def constant_confidence(method: AnyMethod) -> AnyMethod:
    """The drafter is equally sure of the best tokens everywhere, so that a dynamic tree is the same in every step."""
    best = method.draft.top_tokens
    method.draft.grow_dynamic_tree = lambda *_: None

    def top_tokens(*arguments: Any, **named: Any) -> Any:
        top = best(*arguments, **named)
        return replace(top, probability=np.broadcast_to(0.5 ** np.arange(1.0, top.token.shape[1] + 1), top.token.shape))

    method.draft.top_tokens = top_tokens
    return method


def blind_features(method: AnyMethod) -> AnyMethod:
    """The drafter sees no hidden state of the target."""
    pending = method.draft._pending

    def without(*arguments: Any) -> Any:
        token, states = pending(*arguments)
        return token, replace(states, hidden_states=[torch.zeros_like(h) for h in states.hidden_states])

    method.draft._pending = without
    return method


@contextmanager
def no_tree_mask() -> Iterator[None]:
    """Every node of a tree sees all that were drafted before it, not its ancestors alone."""

    def visible(tree: TokenTree, i: int, base: int) -> Iterator[tuple[int, list[int]]]:
        return ((base + node + 1, []) for node in range(tree.nodes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_visible_slots", visible)
        yield


@contextmanager
def constant_scores() -> Iterator[None]:
    """All keys of the cache are thought to matter as much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Retrieval, "scores", lambda policy, queries, keys, sums: torch.zeros(keys.shape[:2]))
        yield


MUTANTS: Mapping[str, Mutant] = {
    "drafts at random": Mutant(
        (
            "ngram", "recycling", "lookahead", "draft_model", "specinfer", "spectr", "medusa", "blockwise",
            "mlp_speculator", "eagle3", "eagle2", "hybrid_model", "quantised_draft", "lenience_lossy",
        ),
        redrafted(at_random),
    ),
    "acceptor ignores the target": Mutant(
        ("ngram", "recycling", "lookahead", "draft_model", "medusa", "blockwise", "eagle3", "quantised_draft"),
        accepts(AcceptsAll()),
    ),
    "acceptor tests token by token": Mutant(("block_verification",), accepts(Rejection())),
    "acceptor ignores its lenience": Mutant(("lenience_lossy",), accepts(LenientRejection(1.0))),
    "tree mask dropped": Mutant(("medusa", "eagle3", "eagle2", "recycling"), world=no_tree_mask),
    "order of the tree shuffled": Mutant(("specinfer", "eagle2", "hybrid_model", "recycling"), redrafted(shuffled)),
    "branches alike": Mutant(("specinfer", "spectr", "eagle2"), redrafted(alike)),
    "heads permuted": Mutant(("medusa", "blockwise"), permuted_heads),
    "schedule constant": Mutant(("eagle2",), constant_confidence),
    "predictor constant": Mutant(("mlp_speculator",), forgets_the_token),
    "features blank": Mutant(("eagle3",), blind_features),
    "keys chosen blindly": Mutant(("sparse_kv_draft",), world=constant_scores),
}  # fmt: skip
