"""A runner that records passes, and prefill without an engine."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float

from foretell.bench.machine import synchronize
from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree, root_tree
from foretell.model.runner import Runner

_PREFILL_CHUNK = 512
"""Tokens read by one pass."""


class TracingRunner(Runner):
    """Delegates to another runner; keeps the last output, and the tree and the committed path of every pass."""

    output: ModelOutput

    def __init__(self, inner: Runner) -> None:
        self.inner, self.vocab, self.context = inner, inner.vocab, inner.context
        self.passes: list[tuple[TokenTree, tuple[int, ...]]] = []
        self._tree: TokenTree | None = None

    def length(self, row: int) -> int:
        """How many tokens of a row have been read and kept."""
        return self.inner.length(row)

    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Read nodes of a tree; see `Runner.forward`. Returns when a GPU has finished."""
        self._tree = tree
        self.output = self.inner.forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)
        # CUDA kernels run asynchronously: without this their time would count as accepting, not as verifying.
        synchronize(self.output.logits.device)
        return self.output

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree."""
        if self._tree is not None:
            self.passes.append((self._tree, tuple(path)))
        self.inner.commit(row, path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        self.inner.truncate(row, length)

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves."""
        return self.inner.restorable(row, length)

    def limit_cache(self, nbytes: int) -> None:
        """Limit the memory of the cache."""
        self.inner.limit_cache(nbytes)

    @property
    def free_tokens(self) -> int | None:
        """Tokens that the cache has room for."""
        return self.inner.free_tokens

    @property
    def shares_prefixes(self) -> bool:
        """Whether `copy_row` copies any number of a row's tokens."""
        return self.inner.shares_prefixes

    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Replace the tokens of a row by the first ones of another."""
        return self.inner.copy_row(source, target, length)

    def count_acceptance(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Passes that tested, and that accepted, a draft at depth 1, 2, …

        A pass tests depth d if all drafts above it were accepted and the tree has a node there.
        """
        tested: list[int] = []
        accepted: list[int] = []
        for tree, path in self.passes:
            depth = len(path) - int(tree.prefix_length[0])
            has_child = path[-1] in tree.children(0)
            for counts, reached in ((tested, depth + has_child), (accepted, depth)):
                counts += [0] * (reached - len(counts))
                for d in range(reached):
                    counts[d] += 1
        return tuple(tested), tuple(accepted)


def prefill(runner: Runner, tokens: Sequence[int]) -> Float[torch.Tensor, " v"]:
    """Replace the tokens of row 0 by these; the logits after the last one."""
    runner.truncate(0, 0)
    for start in range(0, len(tokens), _PREFILL_CHUNK):
        chunk = list(tokens[start : start + _PREFILL_CHUNK])
        tree = root_tree([chunk[-1]]).with_prefix([chunk])
        output = runner.forward([0], tree, scored=np.arange(len(chunk))[None] == len(chunk) - 1)
        runner.commit(0, range(len(chunk)))
    return output.logits[0]
