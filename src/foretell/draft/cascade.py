"""Speculative decoding of the draft model: another method drafts for the small model, which drafts for the target."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, StepState
from foretell.core.tree import TokenTree
from foretell.draft.base import BindingEngine, Drafter, Frontier, NodeLogits, Predictor
from foretell.draft.draft_model import read_backlog, unread_tokens
from foretell.model.run.runner import Runner, copy_row


@runtime_checkable
class DraftProposer(Protocol):
    """A method that drafts for the small model; its acceptor is not used, as the small model's drafts are matched with
    its tree.
    """

    @property
    def draft(self) -> Drafter:
        """What drafts, which keeps state of rows."""

    def propose(self, context: Context) -> TokenTree:
        """Draft trees below the last tokens."""

    def observe(self, step: StepResult) -> None:
        """Update its state after a step."""


@dataclass
class _ReadTree:
    """What the model has read in a step."""

    rows: tuple[int, ...]
    tree: TokenTree
    """The nodes below each request's committed tokens that it has read (`valid`)."""
    logit_index: Int[np.ndarray, "b n"]
    logits: list[Float[torch.Tensor, "k v"]] = field(default_factory=list)

    def place(self, i: int, path: Sequence[int]) -> int:
        """The node at the end of this path below the root of batch row `i`."""
        nodes = self.tree.find_path(i, path)
        return nodes[-1] if nodes else int(self.tree.prefix_length[i]) - 1

    def has(self, i: int, path: Sequence[int]) -> bool:
        """Whether there is a node at the end of the path."""
        return len(self.tree.find_path(i, path)) == len(path)


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
        self.proposer, self.hidden_layers = proposer, proposer.draft.hidden_layers
        self.passes = 0
        """Passes of the draft model so far, without those of `read_backlog`."""
        self._chunk = chunk
        self._drafts = StepState[_ReadTree | None]()

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier, from this or an earlier pass.

        Requests whose frontier is at their maximum depth are not read.
        """
        known = self._drafts.of(context, None)
        if known is None or tree.nodes == 1:
            known = self._begin(context)
        logit_index = np.full(tree.token.shape, -1, np.int64)
        wanted = [
            (i, node, tree.token[i, tree.ancestors(i, node)[1:]].tolist())
            for i in range(tree.rows)
            for node in frontier[i].tolist()
            if tree.valid[i, node] and tree.depth[i, node] < context.max_depth[i]
        ]
        missing = [
            sorted({tuple(path) for j, _, path in wanted if j == i and not known.has(i, path)})
            for i in range(tree.rows)
        ]
        if any(missing):
            self._extend(known, missing)
        for i, node, path in wanted:
            logit_index[i, node] = known.logit_index[i, known.place(i, path)]
        return torch.cat(known.logits), logit_index

    def _begin(self, context: Context) -> _ReadTree:
        """Read all unread tokens and the tree of the proposer."""
        read_backlog(self.runner, context, self._chunk)
        tree = self.proposer.propose(replace(context, max_depth=np.maximum(context.max_depth - 1, 0)))
        full = tree.with_prefix(unread_tokens(self.runner, context))
        read = full.valid & (context.max_depth > 0)[:, None]
        tree = replace(full, valid=read, probe=np.zeros_like(read))
        known = _ReadTree(context.rows, tree, np.full(full.token.shape, -1, np.int64))
        self._drafts.put(context, known)
        self._read(known, read, read & (np.arange(full.nodes) >= full.prefix_length[:, None] - 1))
        return known

    def _extend(self, known: _ReadTree, missing: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Read nodes that were not read in advance; all but the last token of each path has been read."""
        first, most = known.tree.nodes, max(len(m) for m in missing)
        parents = [[known.place(i, path[:-1]) for path in paths] for i, paths in enumerate(missing)]
        tree = known.tree.with_probes([[path[-1] for path in paths] for paths in missing], parents)
        new = tree.probe & (np.arange(first + most) >= first)
        known.tree = replace(tree, valid=tree.valid | new, probe=np.zeros_like(new))
        known.logit_index = np.pad(known.logit_index, ((0, 0), (0, most)), constant_values=-1)
        self._read(known, new, new)

    def _read(self, known: _ReadTree, read: np.ndarray, scored: np.ndarray) -> None:
        """One pass over nodes of the tree, whose logits are appended."""
        output = self.runner.forward(known.rows, known.tree, active=read, scored=scored)
        self.passes += 1
        before = sum(len(x) for x in known.logits)
        known.logit_index = np.where(output.logit_index >= 0, output.logit_index + before, known.logit_index)
        known.logits.append(output.logits)

    def observe(self, step: StepResult) -> None:
        """Keep the read nodes on the path of the new tokens, and update the proposer."""
        known = self._drafts.of(step.context, None)
        if known is not None:
            for i, row in enumerate(step.context.rows):
                if row in known.rows and known.tree.valid[(mine := known.rows.index(row)), 0]:
                    prefix_length = range(int(known.tree.prefix_length[mine]))
                    self.runner.commit(row, [*prefix_length, *known.tree.find_path(mine, step.new_tokens[i][:-1])])
        self.proposer.observe(step)

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self.runner.truncate(row, 0)
        self.proposer.draft.release(row)

    def rewind(self, row: int, length: int) -> int:
        """Keep the shared tokens, as far as the proposer does."""
        length = self.proposer.draft.rewind(row, length)
        self.runner.truncate(row, length)
        return length

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy the shared tokens, as far as the proposer does."""
        length = self.proposer.draft.copy_row(source, target, length)
        copy_row(self.runner, source, target, self.runner.restorable(source, length))
        return length

    def bind(self, engine: BindingEngine) -> bool:
        """Claim the proposer, too."""
        return any([super().bind(engine), self.proposer.draft.bind(engine)])
