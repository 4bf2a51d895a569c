"""Speculation within the drafter: a small model drafts for the target, and another method drafts for the small
model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.ownership import Owner
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.draft.draft_model import read_backlog
from foretell.model.runner import Runner


@runtime_checkable
class DraftProposer(Protocol):
    """What drafts for the small model: a method, whose acceptor has no say because the small model's guesses are
    matched with its tree.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states it needs."""

    def propose(self, context: Context) -> TokenTree:
        """Trees below the last tokens."""

    def observe(self, step: StepResult) -> None:
        """Learn what happened."""

    def release(self, row: int) -> None:
        """Forget a row."""

    def rewind(self, row: int, length: int) -> int:
        """Prepare a row for a request that begins as its last one did."""

    def claim(self, owner: Owner) -> bool:
        """Serve this engine from now on."""


class CascadeDrafter(Predictor):
    """A draft model that reads ahead what `ahead` proposes (Cascade Speculative Drafting, arXiv 2312.11462; staged
    speculation, arXiv 2308.04623).

    The tree that `ahead` proposes below a text is read with the text's last token, in one pass. As long as the guesses
    that the shape then makes are in it, their scores are there already; a guess that is not costs a pass, as with
    `DraftModel`. Guesses and the laws they come from are those of the draft model alone, so every acceptor keeps its
    law and every seed its text: only the number of passes changes. Cascades nest.
    """

    label = "draft model, itself drafted for by n-gram copies or smaller models"

    def __init__(self, runner: Runner, proposer: DraftProposer, chunk: int = 512) -> None:
        self.runner, self.max_context = runner, runner.context
        self.proposer, self.hidden_layers = proposer, proposer.hidden_layers
        self.passes = 0
        """Passes of the draft model so far, catching up apart."""
        self._chunk = chunk
        self._rows: tuple[int, ...] = ()
        self._tree: TokenTree | None = None
        """What the model has read below each text's kept tokens; `live` marks just that."""
        self._logits: list[Float[torch.Tensor, "k v"]] = []
        self._at: Int[np.ndarray, "b n"] = np.zeros((0, 0), np.int64)

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Scores after the frontier, read now or ahead.

        Texts without room for children of the frontier are not read.
        """
        if tree.nodes == 1:
            self._begin(context)
        at = np.full(tree.token.shape, -1, np.int64)
        wanted = [
            (i, node, tree.token[i, tree.ancestors(i, node)[1:]].tolist())
            for i in range(tree.rows)
            for node in frontier[i].tolist()
            if tree.valid[i, node] and tree.depth[i, node] < context.max_depth[i]
        ]
        missing = [
            sorted({tuple(path) for j, _, path in wanted if j == i and not self._has(i, path)})
            for i in range(tree.rows)
        ]
        if any(missing):
            self._extend(missing)
        for i, node, path in wanted:
            at[i, node] = self._at[i, self._place(i, path)]
        return torch.cat(self._logits), at

    def _begin(self, context: Context) -> None:
        """Read everything unread and the tree that the other method proposes."""
        self._rows = context.rows
        read_backlog(self.runner, context, self._chunk)
        guess = self.proposer.propose(replace(context, max_depth=np.maximum(context.max_depth - 1, 0)))
        unread = [
            t.tokens[self.runner.length(row) if max_depth else -1 :].tolist()
            for row, t, max_depth in zip(context.rows, context.sequences, context.max_depth, strict=True)
        ]
        full = guess.with_prefix(unread)
        read = full.valid & (context.max_depth > 0)[:, None]
        self._tree = replace(full, valid=read, probe=np.zeros_like(read))
        self._logits, self._at = [], np.full(full.token.shape, -1, np.int64)
        self._read(read, read & (np.arange(full.nodes) >= full.prefix_length[:, None] - 1))

    def _extend(self, missing: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Read guesses that were not read ahead; all but the last token of each path has been."""
        assert self._tree is not None
        first, most = self._tree.nodes, max(len(m) for m in missing)
        parents = [[self._place(i, path[:-1]) for path in paths] for i, paths in enumerate(missing)]
        tree = self._tree.with_probes([[path[-1] for path in paths] for paths in missing], parents)
        new = tree.probe & (np.arange(first + most) >= first)
        self._tree = replace(tree, valid=tree.valid | new, probe=np.zeros_like(new))
        self._at = np.pad(self._at, ((0, 0), (0, most)), constant_values=-1)
        self._read(new, new)

    def _read(self, read: np.ndarray, scored: np.ndarray) -> None:
        """One pass over nodes of the tree, whose scores join those that are there."""
        assert self._tree is not None
        output = self.runner.forward(self._rows, self._tree, active=read, scored=scored)
        self.passes += 1
        before = sum(len(x) for x in self._logits)
        self._at = np.where(output.logit_index >= 0, output.logit_index + before, self._at)
        self._logits.append(output.logits)

    def _place(self, i: int, path: Sequence[int]) -> int:
        """Where the model read this path below the root of text `i`."""
        assert self._tree is not None
        nodes = self._tree.find_path(i, path)
        return nodes[-1] if nodes else int(self._tree.prefix_length[i]) - 1

    def _has(self, i: int, path: Sequence[int]) -> bool:
        assert self._tree is not None
        return len(self._tree.find_path(i, path)) == len(path)

    def observe(self, step: StepResult) -> None:
        """Keep what was read of the decided tokens, and tell the other method."""
        if self._tree is not None:
            for i, row in enumerate(step.context.rows):
                if row in self._rows and self._tree.valid[(mine := self._rows.index(row)), 0]:
                    prefix_length = range(int(self._tree.prefix_length[mine]))
                    self.runner.commit(row, [*prefix_length, *self._tree.find_path(mine, step.new_tokens[i][:-1])])
        self._tree, self._rows = None, ()
        self.proposer.observe(step)

    def release(self, row: int) -> None:
        """Forget a row: its request is over."""
        self.runner.truncate(row, 0)
        self.proposer.release(row)

    def rewind(self, row: int, length: int) -> int:
        """Keep what was read of the common tokens."""
        length = self.proposer.rewind(row, length)
        self.runner.truncate(row, length)
        return length

    def claim(self, owner: Owner) -> bool:
        """With the other method."""
        return any([super().claim(owner), self.proposer.claim(owner)])
