"""Drafting with a smaller model: a second checkpoint, or the target's first layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from foretell.core.context import Context, StepResult, StepState
from foretell.core.tree import NodeMask, TokenTree, TreeBounds, TreeSizes, root_tree, tree_from_scores
from foretell.distributions.coupling import kernel_noise
from foretell.draft.base import Frontier, NodeLogits, Predictor
from foretell.model.kernels import NodeLimits
from foretell.model.run.runner import GrowsTrees, Runner, copy_row, offered

Inputs = Callable[[Sequence[int], TokenTree], TokenTree]
"""What a model reads of the nodes of some rows."""


@dataclass(frozen=True)
class _ReadTree:
    """The draft tree of a step, below all unread tokens, as it is in the model's cache."""

    rows: tuple[int, ...]
    tree: TokenTree
    read: NodeMask
    """Its nodes that the model has read."""


class OwnCache(Predictor):
    """Predictors that run a model of their own, `runner`, whose cache holds the tokens of the sequence that it has
    read.
    """

    runner: Runner

    def unread(self, context: Context, i: int) -> int:
        """The tokens that the model has not read."""
        return context.sequences[i].length - self.runner.length(context.rows[i])

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self.runner.truncate(row, 0)

    def rewind(self, row: int, length: int) -> int:
        """Keep the shared tokens."""
        self.runner.truncate(row, length)
        return length

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy the tokens that this model has read; it reads the others before its next draft."""
        copy_row(self.runner, source, target, self.runner.restorable(source, length))
        return length


class DraftModel(OwnCache):
    """Reads the same sequence as the target, with its own cache (Leviathan et al., arXiv 2211.17192; LayerSkip, arXiv
    2404.16710).

    It reads all tokens that it has not read (a prompt, the steps of another drafter) before its next draft, at most
    `chunk` at once.
    """

    label = "draft model"

    def __init__(self, runner: Runner, chunk: int = 512) -> None:
        self.runner, self.max_context = runner, runner.context
        self._chunk = chunk
        self._drafts = StepState[_ReadTree | None]()

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier, in one pass of the draft model (the first pass reads the unread tokens too).

        Requests whose frontier is at their maximum depth are not read.
        """
        before = self._drafts.of(context, None)
        first = before is None or tree.nodes == 1
        if first:
            read_backlog(self.runner, context, self._chunk)
        full = tree.with_prefix(unread_tokens(self.runner, context))
        shift = full.prefix_length - 1
        place = np.minimum(np.arange(tree.nodes) + shift[:, None], full.nodes - 1)
        wanted = np.zeros(full.token.shape, bool)
        np.put_along_axis(wanted, np.take_along_axis(place, frontier, 1), True, 1)
        growing = full.valid & (full.depth - shift[:, None] < context.max_depth[:, None])
        wanted &= growing
        output = self.runner.forward(context.rows, full, active=growing if first else wanted, scored=wanted)
        read = growing
        if before is not None and not first:
            read = np.pad(before.read, ((0, 0), (0, full.nodes - before.read.shape[1]))) | wanted
        self._drafts.put(context, _ReadTree(context.rows, full, read))
        return output.logits, np.take_along_axis(output.logit_index, place, 1)

    def grow_dynamic_tree(self, context: Context, sizes: TreeSizes, bounds: TreeBounds) -> TokenTree | None:
        """Trees in one call, where the network supports it."""
        return self._grow_tree(context, sizes, bounds, NodeLimits())

    def grow_chain(self, context: Context, length: int, limits: NodeLimits) -> TokenTree | None:
        """Chains in one call, where the network supports it."""
        return self._grow_tree(context, (length, 1, length), (0.0, 0.0), limits)

    def _grow_tree(
        self, context: Context, sizes: TreeSizes, bounds: TreeBounds, limits: NodeLimits
    ) -> TokenTree | None:
        active, grower = np.flatnonzero(context.max_depth), offered(self.runner, GrowsTrees)
        if not len(active) or grower is None:
            return None
        read_backlog(self.runner, context, self._chunk)
        unread, part = unread_tokens(self.runner, context), context.select(active.tolist())
        prefixes = root_tree(part.last_tokens).with_prefix([unread[i] for i in active])
        noise = kernel_noise(part, sizes[0])
        trees = grower.grow_dynamic_tree(part.rows, prefixes, part.max_depth, sizes, bounds, noise, limits)
        if trees is None:
            return None
        tree = tree_from_scores(
            context.last_tokens, active.tolist(), trees.token, trees.parent, trees.score, trees.count
        )
        full = tree.with_prefix(unread)
        read = np.arange(full.nodes) < full.prefix_length[:, None]
        if sizes[1] == 1:
            # The last token of a chain is not read; the cache slots of wider trees are not in the order of their nodes.
            read[:, :-1] |= full.valid[:, 1:]
        self._drafts.put(context, _ReadTree(context.rows, full, read & (context.max_depth > 0)[:, None]))
        return tree

    def observe(self, step: StepResult) -> None:
        """Keep the read nodes on the path of the new tokens; the last of these is the next root and stays unread."""
        drafts = self._drafts.of(step.context, None)
        if drafts is None:
            return
        for i, row in enumerate(step.context.rows):
            if row in drafts.rows:
                mine = drafts.rows.index(row)
                nodes = [
                    *range(int(drafts.tree.prefix_length[mine])),
                    *drafts.tree.find_path(mine, step.new_tokens[i][:-1]),
                ]
                path = list(takewhile(drafts.read[mine].__getitem__, nodes))
                if path:
                    self.runner.commit(row, path)


def unread_tokens(runner: Runner, context: Context) -> list[list[int]]:
    """The tokens that are not in the runner's cache, per request; for requests without a draft the last one only."""
    return [
        t.tokens[runner.length(row) if max_depth else -1 :].tolist()
        for row, t, max_depth in zip(context.rows, context.sequences, context.max_depth, strict=True)
    ]


def read_backlog(runner: Runner, context: Context, chunk: int, inputs: Inputs | None = None) -> None:
    """Read unread tokens in chunks until at most one chunk is left, for requests with a draft."""
    while True:
        behind = [
            (row, t.tokens[(have := runner.length(row)) : have + chunk].tolist())
            for row, t, max_depth in zip(context.rows, context.sequences, context.max_depth, strict=True)
            if max_depth and t.length - runner.length(row) > chunk
        ]
        if not behind:
            return
        rows, parts = zip(*behind, strict=True)
        tree = root_tree([p[-1] for p in parts]).with_prefix(parts)
        runner.forward(rows, tree if inputs is None else inputs(rows, tree), scored=np.zeros_like(tree.valid))
        for row in rows:
            runner.commit(row, range(chunk))
