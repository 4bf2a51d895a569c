"""A target that reads a half of every number of its cache: a draft of itself in the same cache."""

from collections.abc import Sequence

from foretell.core.context import Context, ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.kernels.kv_cache import NativeKVCache
from foretell.model.run.compact_runner import DraftsBesideTarget
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Layers, Marks, Rows, Runner


class UpperHalvesRunner(DraftsBesideTarget, DecoderRunner):
    """A runner over the cache of another runner of the same network, of whose int8 numbers it reads the upper 4 bits
    (QuantSpec, arXiv 2502.10424).

    What it writes lies in the slots after the other runner's tokens, which that one's next pass writes anew: nothing of
    it is kept.

    Raises:
        ValueError: the cache of the network's numbers does not lie in halves.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        if not isinstance(self.cache, NativeKVCache) or self.cache.k_low is None:
            raise ValueError(
                "the policy upper_halves reads the upper halves of an int8 cache on the CPU kernels, and this target's "
                f"cache is {network.config.cache_dtype}; use --kv-cache-dtype int8-halves, or another policy"
            )

    def attach(self, target: Runner) -> None:
        """Read the cache of this runner; see `DraftsBesideTarget.attach`.

        Raises:
            ValueError: its cache is not that of the CPU kernels, too.
        """
        super().attach(target)
        cache = self.target.cache
        if not isinstance(cache, NativeKVCache):
            raise ValueError("this method drafts in the target's own cache, and the target is not of the CPU kernels")
        self.cache = cache.upper_halves

    def follow(self, context: Context) -> None:
        """Nothing: what the target has read is there."""

    def length(self, row: int) -> int:
        """Number of tokens that the target has committed."""
        return self.target.length(row)

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run nodes of a tree after the target's tokens; see `Runner.forward`."""
        self._length = [self.length(row) for row in range(max(rows) + 1)]
        return super().forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep nothing: the target's pass writes the same slots."""

    def truncate(self, row: int, length: int) -> None:
        """Nothing: the target's tokens are its own."""

    def restorable(self, row: int, length: int) -> int:
        """As many as the target has."""
        return min(length, self.length(row))

    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Nothing: the target copies its row."""
        return True
