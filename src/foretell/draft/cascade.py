"""Speculative decoding of the draft model: another method drafts for the small model, which drafts for the target."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import BindingEngine
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.draft.draft_model import read_backlog, unread_tokens
from foretell.model.run.runner import Runner, copy_row


@runtime_checkable
class DraftProposer(Protocol):
    """A method that drafts for the small model; its acceptor is not used, as the small model's drafts are matched with
    its tree.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states it needs."""

    def propose(self, context: Context) -> TokenTree:
        """Draft trees below the last tokens."""

    def observe(self, step: StepResult) -> None:
        """Update its state after a step."""

    def release(self, row: int) -> None:
        """Forget a row."""

    def rewind(self, row: int, length: int) -> int:
        """Prepare a row for a request that shares a prefix with its last one."""

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Prepare a row for a request that shares a prefix with that of another row."""

    def bind(self, engine: BindingEngine) -> bool:
        """Serve this engine from now on."""


class CascadeDrafter(Predictor):
    """A draft model that reads the trees of `proposer` in advance (Cascade Speculative Drafting, arXiv 2312.11462;
    staged speculation, arXiv 2308.04623).

    One pass reads the proposed tree together with the last token. Logits of drafts in that tree are known; another
    draft costs a pass, as with `DraftModel`. Drafts and their distributions are those of the draft model alone, so
    acceptors stay exact and a seed gives the same answer: only the number of passes changes. Cascades can be nested.
    """

    label = "draft model, itself drafted for by n-gram copies or smaller models"

    def __init__(self, runner: Runner, proposer: DraftProposer, chunk: int = 512) -> None:
        self.runner, self.max_context = runner, runner.context
        self.proposer, self.hidden_layers = proposer, proposer.hidden_layers
        self.passes = 0
        """Passes of the draft model so far, without those of `read_backlog`."""
        self._chunk = chunk
        self._rows: tuple[int, ...] = ()
        self._tree: TokenTree | None = None
        """The nodes that the model has read below each request's committed tokens (`valid`)."""
        self._logits: list[Float[torch.Tensor, "k v"]] = []
        self._logit_index: Int[np.ndarray, "b n"] = np.zeros((0, 0), np.int64)

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Logits after the frontier, from this or an earlier pass.

        Requests whose frontier is at their maximum depth are not read.
        """
        if tree.nodes == 1:
            self._begin(context)
        logit_index = np.full(tree.token.shape, -1, np.int64)
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
            logit_index[i, node] = self._logit_index[i, self._place(i, path)]
        return torch.cat(self._logits), logit_index

    def _begin(self, context: Context) -> None:
        """Read all unread tokens and the tree of the proposer."""
        self._rows = context.rows
        read_backlog(self.runner, context, self._chunk)
        tree = self.proposer.propose(replace(context, max_depth=np.maximum(context.max_depth - 1, 0)))
        full = tree.with_prefix(unread_tokens(self.runner, context))
        read = full.valid & (context.max_depth > 0)[:, None]
        self._tree = replace(full, valid=read, probe=np.zeros_like(read))
        self._logits, self._logit_index = [], np.full(full.token.shape, -1, np.int64)
        self._read(read, read & (np.arange(full.nodes) >= full.prefix_length[:, None] - 1))

    def _extend(self, missing: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Read nodes that were not read in advance; all but the last token of each path has been read."""
        assert self._tree is not None
        first, most = self._tree.nodes, max(len(m) for m in missing)
        parents = [[self._place(i, path[:-1]) for path in paths] for i, paths in enumerate(missing)]
        tree = self._tree.with_probes([[path[-1] for path in paths] for paths in missing], parents)
        new = tree.probe & (np.arange(first + most) >= first)
        self._tree = replace(tree, valid=tree.valid | new, probe=np.zeros_like(new))
        self._logit_index = np.pad(self._logit_index, ((0, 0), (0, most)), constant_values=-1)
        self._read(new, new)

    def _read(self, read: np.ndarray, scored: np.ndarray) -> None:
        """One pass over nodes of the tree, whose logits are appended."""
        assert self._tree is not None
        output = self.runner.forward(self._rows, self._tree, active=read, scored=scored)
        self.passes += 1
        before = sum(len(x) for x in self._logits)
        self._logit_index = np.where(output.logit_index >= 0, output.logit_index + before, self._logit_index)
        self._logits.append(output.logits)

    def _place(self, i: int, path: Sequence[int]) -> int:
        """The node at the end of this path below the root of batch row `i`."""
        assert self._tree is not None
        nodes = self._tree.find_path(i, path)
        return nodes[-1] if nodes else int(self._tree.prefix_length[i]) - 1

    def _has(self, i: int, path: Sequence[int]) -> bool:
        assert self._tree is not None
        return len(self._tree.find_path(i, path)) == len(path)

    def observe(self, step: StepResult) -> None:
        """Keep the read nodes on the path of the new tokens, and update the proposer."""
        if self._tree is not None:
            for i, row in enumerate(step.context.rows):
                if row in self._rows and self._tree.valid[(mine := self._rows.index(row)), 0]:
                    prefix_length = range(int(self._tree.prefix_length[mine]))
                    self.runner.commit(row, [*prefix_length, *self._tree.find_path(mine, step.new_tokens[i][:-1])])
        self._tree, self._rows = None, ()
        self.proposer.observe(step)

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self.runner.truncate(row, 0)
        self.proposer.release(row)

    def rewind(self, row: int, length: int) -> int:
        """Keep the shared tokens, as far as the proposer does."""
        length = self.proposer.rewind(row, length)
        self.runner.truncate(row, length)
        return length

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy the shared tokens, as far as the proposer does."""
        length = self.proposer.copy_row(source, target, length)
        copy_row(self.runner, source, target, self.runner.restorable(source, length))
        return length

    def bind(self, engine: BindingEngine) -> bool:
        """Claim the proposer, too."""
        return any([super().bind(engine), self.proposer.bind(engine)])
