"""A runner that records passes, and prefill without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.bench.machine import synchronize
from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.run.runner import Layers, Marks, Rows, Runner
from foretell.verify.logits import read_chunk

_PREFILL_CHUNK = 512
"""Tokens read by one pass."""


@dataclass(frozen=True)
class TracedPass:
    """What a pass did for one row: the tree, the row's index in it, and the nodes that were kept."""

    row: int
    tree: TokenTree
    index: int
    path: tuple[int, ...]


class TracingRunner(Runner):
    """Delegates to another runner; keeps the last output, and what every pass did for each of its rows."""

    output: ModelOutput

    def __init__(self, inner: Runner) -> None:
        self.inner, self.vocab, self.context = inner, inner.vocab, inner.context
        self.passes: list[TracedPass] = []
        self._tree: TokenTree | None = None
        self._rows: list[int] = []

    @property
    def innermost(self) -> Runner:
        """The runner that does the work."""
        return self.inner.innermost

    def length(self, row: int) -> int:
        """How many tokens of a row have been read and kept."""
        return self.inner.length(row)

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Read nodes of a tree; see `Runner.forward`. Returns when a GPU has finished."""
        self._tree, self._rows = tree, list(rows)
        self.output = self.inner.forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)
        # CUDA kernels run asynchronously: without this their time would count as accepting, not as verifying.
        synchronize(self.output.logits.device)
        return self.output

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree."""
        if self._tree is not None:
            self.passes.append(TracedPass(row, self._tree, self._rows.index(row), tuple(path)))
        self.inner.commit(row, path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        self.inner.truncate(row, length)

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves."""
        return self.inner.restorable(row, length)

    def count_acceptance(self, row: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Passes of a row (None: of all) that tested, and that accepted, a draft at depth 1, 2, …

        A pass tests depth d if all drafts above it were accepted and the tree has a node there.
        """
        tested: list[int] = []
        accepted: list[int] = []
        for traced in self.passes:
            if row is not None and traced.row != row:
                continue
            depth = len(traced.path) - int(traced.tree.prefix_length[traced.index])
            has_child = traced.path[-1] in traced.tree.children(traced.index)
            for counts, reached in ((tested, depth + has_child), (accepted, depth)):
                counts += [0] * (reached - len(counts))
                for d in range(reached):
                    counts[d] += 1
        return tuple(tested), tuple(accepted)


def prefill(runner: Runner, tokens: Sequence[int]) -> Float[torch.Tensor, " v"]:
    """Replace the tokens of row 0 by these; the logits after the last one."""
    runner.truncate(0, 0)
    for start in range(0, len(tokens), _PREFILL_CHUNK):
        logits = read_chunk(runner, tokens[start : start + _PREFILL_CHUNK], 1)
    return logits[0]
