"""A network with a reduced output vocabulary, behind the interface of one with the whole vocabulary."""

import torch
from jaxtyping import Float, Int

from foretell.model.block.decoder import BlockOutput, BlockRange, SkipSet
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import DynamicTrees
from foretell.model.run.network import DynamicTreeNetwork, Network, NetworkWrapper


class ReducedVocabulary(NetworkWrapper):
    """Implements `Network` over one whose head has a row per entry of `token_of`; all other tokens get logit -infinity.

    Embedding, blocks and `config.vocab` are those of the whole vocabulary.
    """

    def __init__(self, network: Network, token_of: Int[torch.Tensor, " w"]) -> None:
        super().__init__(network)
        self._network, self._token_of = network, token_of.to(network.device)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks."""
        return self._network.run(x, layout, cache, blocks)

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write the keys and values of blocks alone."""
        self._network.write_keys(x, layout, cache, blocks)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits over the whole vocabulary."""
        logits = self._network.logits(x)
        out = logits.new_full((len(logits), self.config.vocab), float("-inf"))
        return out.index_copy_(1, self._token_of, logits)

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether the inner network can."""
        return isinstance(self._network, DynamicTreeNetwork) and self._network.grows_dynamic_trees

    def grow_dynamic_trees(self, roots: Float[torch.Tensor, "b d"], trees: DynamicTrees, cache: Cache) -> None:
        """Grow trees with tokens of the whole vocabulary."""
        assert isinstance(self._network, DynamicTreeNetwork)
        self._network.grow_dynamic_trees(roots, trees, cache, self._token_of)

    def first_layers(self, layers: int) -> "ReducedVocabulary":
        """The first `layers` blocks with the same norm and head, sharing all weights."""
        return ReducedVocabulary(self._network.first_layers(layers), self._token_of)

    def without_sublayers(self, skip: SkipSet) -> "ReducedVocabulary":
        """The network without some sub-layers, sharing all weights."""
        return ReducedVocabulary(self._network.without_sublayers(skip), self._token_of)
