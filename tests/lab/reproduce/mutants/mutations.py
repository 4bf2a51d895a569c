"""Methods that are broken in one characteristic way each, and the lab that decodes with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from foretell.accept.base import Acceptor, AcceptResult
from foretell.api import Model
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.engine.method import AnyMethod, Method
from foretell.lab.reproduce import Lab, LabRun, Run

Change = Callable[[TokenTree, np.random.Generator], np.ndarray]
"""New tokens of a tree of drafts."""


@dataclass(frozen=True)
class Mutant:
    """A way to break the methods of `claims`. `build`: the broken method in place of the right one."""

    claims: tuple[str, ...]
    build: Callable[[AnyMethod], AnyMethod]


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
    return np.asarray(rng.integers(0, 1000, tree.token.shape))


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


MUTANTS: Mapping[str, Mutant] = {
    "drafts at random": Mutant(("eagle3",), redrafted(at_random)),
    "acceptor ignores the target": Mutant(("draft_model",), accepts(AcceptsAll())),
    "heads permuted": Mutant(("medusa",), permuted_heads),
}
