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
from foretell.accept.spectr import KSequentialSelection, residual_after_rejections
from foretell.api import Model
from foretell.catalogue import self_drafting
from foretell.core.context import Context
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft import online
from foretell.draft.base import Continuation
from foretell.engine.method import AnyMethod, Method
from foretell.lab.reproduce import Lab, LabRun, Run, claim_of
from foretell.model.block.decoder import SkipSet
from foretell.model.cache import layout
from foretell.model.cache.policy import SINKS, Observed, Retrieval
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.skip import default_skip
from foretell.retrieval.datastore import Datastore
from foretell.shape import BranchingTree

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


def copies_of_the_first(tree: TokenTree, rng: np.random.Generator) -> TokenTree:
    """Every chain holds the tokens of the first one."""
    token, q_index = tree.token.copy(), tree.q_index.copy()
    for row, depth in np.ndindex(tree.rows, int(tree.depth.max())):
        level = np.flatnonzero(tree.valid[row] & (tree.depth[row] == depth + 1))
        token[row, level], q_index[row, level] = token[row, level[:1]], q_index[row, level[:1]]
    return replace(tree, token=token, q_index=q_index)


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


class DividesByChains(KSequentialSelection):
    """Divides by the number of chains, not by the least valid factor, and ends the path where all tests reject, even if
    a chain holds the token that follows. As exact, and accepts less.
    """

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """The path as far as tests accept."""
        children, chains = tree.children(row), [tree.root(row)]
        while True:
            node, drafts = chains[0], [c for chain in chains for c in children.get(chain, ())]
            path, p = (
                tuple(tree.ancestors(row, node)[int(tree.prefix_length[row]) :]),
                distributions.probabilities(row, node),
            )
            if not drafts:
                return AcceptResult(path, distributions.sample(row, node))
            assert tree.q is not None
            q, tokens, k = (
                tree.q[row, tree.q_index[row, drafts[0]]].to(p),
                tree.token[row, drafts].tolist(),
                len(drafts),
            )
            uniform = [distributions.uniform(row, node, Stream.ACCEPT, trial) for trial in range(k)]
            accepted = [t for u, t in zip(uniform, tokens, strict=True) if u * k * float(q[t]) < float(p[t])]
            if not accepted:
                left = residual_after_rejections(p, q, k, k)
                return AcceptResult(path, sample_from(left, distributions.uniform(row, node, Stream.RESIDUAL)))
            chains = [c for c, token in zip(drafts, tokens, strict=True) if token == accepted[0]]
            if not distributions.goes_on(row, chains[0]):
                return AcceptResult(path, accepted[0])


def accepts(acceptor: Acceptor) -> Callable[[AnyMethod], AnyMethod]:
    """Mutation of the acceptor."""
    return lambda method: replace(method, accept=acceptor)


def one_branch(method: AnyMethod) -> AnyMethod:
    """The first child of every node is drafted and tested, and none of its siblings."""
    assert isinstance(method.tree, BranchingTree)
    return replace(method, tree=BranchingTree((1,) * max(map(len, method.tree.choices))))


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


def with_features(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[AnyMethod], AnyMethod]:
    """Mutation of the target's hidden states that the drafter sees."""

    def build(method: AnyMethod) -> AnyMethod:
        pending = method.draft._pending

        def changed(*arguments: Any) -> Any:
            token, states = pending(*arguments)
            return token, states._replace(hidden_states=[change(h) for h in states.hidden_states])

        method.draft._pending = changed
        return method

    return build


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


def corrections_left_out(method: AnyMethod) -> AnyMethod:
    """A place of a block does not know what was drafted before it."""
    method.draft.grow_dynamic_tree = lambda *_: None
    method.draft._scores_after = lambda nodes: (method.draft._blocks.logits_at(nodes), None)
    return method


def successors_of_another(method: AnyMethod) -> AnyMethod:
    """Every token gets the successors of the one with the next id."""
    paths = method.draft._paths
    method.draft._paths = lambda successors, *arguments: paths(np.roll(successors, 1, axis=0), *arguments)
    return method


def store_in_disorder(method: AnyMethod) -> AnyMethod:
    """The datastore holds the same tokens in any order."""
    tokens = np.random.default_rng(0).permutation(method.draft.store._tokens)
    method.draft.store = Datastore.from_documents([tokens.tolist()])
    return method


def copies_any_tokens(method: AnyMethod) -> AnyMethod:
    """The retriever promises as much as before, of other tokens."""
    retrieve = method.draft.retriever.retrieve

    def other(context: Context, budget: int) -> list[list[Continuation]]:
        return [
            [Continuation(tuple(t // 2 for t in c.tokens), c.cumulative_acceptance) for c in row]
            for row in retrieve(context, budget)
        ]

    method.draft.retriever.retrieve = other
    return method


def equally_sure(method: AnyMethod) -> AnyMethod:
    """All of a node's children have the same confidence."""
    best = method.draft.top_tokens

    def flat(*arguments: Any) -> Any:
        tokens = best(*arguments)
        return replace(tokens, probability=np.full_like(tokens.probability, 0.5))

    method.draft.grow_dynamic_tree = lambda *_: None
    method.draft.top_tokens = flat
    return method


def sure_by_rank(method: AnyMethod) -> AnyMethod:
    """A node's best, second, … child has the confidence that the fixed tree of the claim expects, in every place."""
    best, (_, fixed) = method.draft.top_tokens, claim_of("eagle2").runs
    rates = np.array(fixed.options_for(0)["acceptance"])

    def by_rank(*arguments: Any) -> Any:
        tokens = best(*arguments)
        probability = np.zeros_like(tokens.probability)
        probability[:, : len(rates)] = rates[: probability.shape[1]]
        return replace(tokens, probability=probability)

    method.draft.grow_dynamic_tree = lambda *_: None
    method.draft.top_tokens = by_rank
    return method


class WorstKeys(Retrieval):
    """Sorts in the wrong direction: keeps the keys with the lowest scores, without the first and the last ones."""

    def select(self, queries: torch.Tensor, keys: torch.Tensor, sums: torch.Tensor | None = None) -> torch.Tensor:
        """As many keys."""
        count, kept = keys.shape[1], min(keys.shape[1], self.budget)
        scores = self.scores(Observed(queries, keys, torch.zeros(keys.shape[:2]))).clone()
        scores[:, :SINKS] = scores[:, count - self.recent :] = float("inf")
        worst: torch.Tensor = scores.topk(kept, largest=False).indices.sort(-1).values
        return worst


def keeps_the_worst_keys(method: AnyMethod) -> AnyMethod:
    """Drafts over the keys that matter least."""
    runner = method.draft.runner
    runner.policy = WorstKeys(runner.policy.budget)
    return method


def never_learns(method: AnyMethod) -> AnyMethod:
    """No step is made."""
    method.draft.interval = 0
    return method


@contextmanager
def learns_the_opposite() -> Iterator[None]:
    """Every step moves away from the target."""
    loss = online.distillation_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "distillation_loss", lambda *arguments: -loss(*arguments))
        yield


@contextmanager
def first_attention_skipped() -> Iterator[None]:
    """As many sub-layers are left out, but the first ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            self_drafting,
            "default_skip",
            lambda layers: SkipSet(frozenset(range(len(default_skip(layers).attention)))),
        )
        yield


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
    "drafts at random": Mutant(
        ("ngram", "draft_model", "quantised_draft", "layer_skip", "eagle3", "dflash"), redrafted(at_random)
    ),
    "acceptor ignores the target": Mutant(("draft_model",), accepts(AcceptsAll())),
    "acceptor ignores its lenience": Mutant(("lenience_lossy",), accepts(LenientRejection(1.0))),
    "ancestors' mask dropped": Mutant(("eagle3",), world=no_tree_mask),
    "features of the target blank": Mutant(("eagle3",), with_features(torch.zeros_like)),
    "features permuted": Mutant(("eagle", "dflash"), with_features(lambda hidden: hidden.flip(-1))),
    "corrections left out": Mutant(("dflash",), corrections_left_out),
    "worst keys kept": Mutant(("sparse_kv_draft",), keeps_the_worst_keys),
    "heads permuted": Mutant(("medusa", "blockwise"), permuted_heads),
    "stages read one token": Mutant(("mlp_speculator",), forgets_the_token),
    "any position copied": Mutant(("ngram",), any_position),
    "window unused": Mutant(("lookahead",), window_unused),
    "never iterates": Mutant(("jacobi",), never_iterates),
    "first branch alone": Mutant(("specinfer",), one_branch),
    "chains are copies": Mutant(("spectr",), redrafted(copies_of_the_first)),
    "divided by the number of chains": Mutant(("spectr",), accepts(DividesByChains())),
    "successors of another token": Mutant(("recycling",), successors_of_another),
    "datastore in disorder": Mutant(("rest",), store_in_disorder),
    "first attention skipped": Mutant(("self_speculative",), world=first_attention_skipped),
    "copies of other tokens": Mutant(("hybrid_model",), copies_any_tokens),
    "equally sure of all tokens": Mutant(("eagle2",), equally_sure),
    "sure by rank alone": Mutant(("eagle2",), sure_by_rank),
    "never learns": Mutant(("online",), never_learns),
    "learns the opposite": Mutant(("online",), world=learns_the_opposite),
}
