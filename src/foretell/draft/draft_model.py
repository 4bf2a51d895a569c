"""A smaller model as drafter: a second checkpoint, or the target itself cut after some layers."""

from itertools import takewhile

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree, root_tree, tree_from_parents
from foretell.draft.base import Predictor
from foretell.model.runner import Runner


class DraftModel(Predictor):
    """Reads the same text as the target, with a cache of its own (Leviathan et al., arXiv 2211.17192; LayerSkip, arXiv
    2404.16710).

    It catches up by itself: whatever was decided without it (a prompt, the steps of another drafter) is read before its
    next guess. `chunk` is the most tokens it reads at once for that.
    """

    label = "draft model"

    def __init__(self, runner: Runner, chunk: int = 512) -> None:
        self.runner, self.max_context = runner, runner.context
        self._chunk = chunk
        self._tree: TokenTree | None = None
        """The tree under construction below everything unread, as this model's cache holds it."""
        self._read: Bool[np.ndarray, "b n"] = np.zeros((0, 0), bool)
        self._rows: tuple[int, ...] = ()

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Scores after the frontier, in one pass of the draft model over it (the first pass reads the backlog too).

        Texts without room for children of the frontier are not read.
        """
        if tree.nodes == 1:
            self._rows = context.rows
            read_backlog(self.runner, context, self._chunk)
        full = tree.with_prefix(self._unread(context))
        shift = full.prefix_length - 1
        place = np.minimum(np.arange(tree.nodes) + shift[:, None], full.nodes - 1)
        wanted = np.zeros(full.token.shape, bool)
        np.put_along_axis(wanted, np.take_along_axis(place, frontier, 1), True, 1)
        growing = full.valid & (full.depth - shift[:, None] < context.max_depth[:, None])
        wanted &= growing
        first = tree.nodes == 1
        output = self.runner.forward(context.rows, full, active=growing if first else wanted, scored=wanted)
        self._tree = full
        before = (
            np.zeros(full.token.shape, bool)
            if first
            else np.pad(self._read, ((0, 0), (0, full.nodes - self._read.shape[1])))
        )
        self._read = growing if first else before | wanted
        return output.logits, np.take_along_axis(output.logit_index, place, 1)

    def grow_dynamic_tree(
        self, context: Context, sizes: tuple[int, int, int], bounds: tuple[float, float]
    ) -> TokenTree | None:
        """Whole trees in one call, where the network can."""
        able = np.flatnonzero(context.max_depth)
        if not len(able):
            return None
        read_backlog(self.runner, context, self._chunk)
        unread, part = self._unread(context), context.select(able.tolist())
        prefixes = root_tree(part.last_tokens).with_prefix([unread[i] for i in able])
        trees = self.runner.grow_dynamic_tree(part.rows, prefixes, part.max_depth, sizes, bounds)
        if trees is None:
            return None
        whole = tree_from_parents(context.last_tokens, able, trees.token, trees.parent, trees.count)
        self._tree, self._rows = whole.with_prefix(unread), context.rows
        self._read = np.arange(self._tree.nodes) < self._tree.prefix_length[:, None]
        if sizes[1] == 1:
            # The last token of a chain is not read; those of wider trees do not lie in the order of their nodes.
            self._read[:, :-1] |= self._tree.valid[:, 1:]
        self._read &= (context.max_depth > 0)[:, None]
        return whole

    def _unread(self, context: Context) -> list[list[int]]:
        """Decided tokens that are not in this model's cache, of texts without room for drafts the last alone."""
        return [
            t.tokens[self.runner.length(row) if max_depth else -1 :].tolist()
            for row, t, max_depth in zip(context.rows, context.sequences, context.max_depth, strict=True)
        ]

    def observe(self, step: StepResult) -> None:
        """Keep what was read of the decided tokens; the last of these is the next root and stays unread."""
        if self._tree is None:
            return
        for i, row in enumerate(step.context.rows):
            if row in self._rows:
                mine = self._rows.index(row)
                nodes = [
                    *range(int(self._tree.prefix_length[mine])),
                    *self._tree.find_path(mine, step.new_tokens[i][:-1]),
                ]
                path = list(takewhile(self._read[mine].__getitem__, nodes))
                if path:
                    self.runner.commit(row, path)
        self._tree, self._rows = None, ()

    def release(self, row: int) -> None:
        """Forget a row: its request is over."""
        self.runner.truncate(row, 0)

    def rewind(self, row: int, length: int) -> int:
        """Keep what was read of the common tokens."""
        self.runner.truncate(row, length)
        return length


def read_backlog(runner: Runner, context: Context, chunk: int) -> None:
    """Read backlogs longer than a chunk, up to their last chunk, of texts that have room for drafts."""
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
        runner.forward(rows, tree, scored=np.zeros_like(tree.valid))
        for row in rows:
            runner.commit(row, range(chunk))
