"""A network with a reduced output vocabulary, behind the interface of one with the whole vocabulary."""

import torch
from jaxtyping import Float, Int

from foretell.model.backend import Backend
from foretell.model.config import ModelConfig
from foretell.model.decoder import BlockOutput, BlockRange, SkipSet
from foretell.model.kernels import DynamicTrees
from foretell.model.kv_cache import KVCache
from foretell.model.layout import Layout
from foretell.model.runner import DynamicTreeNetwork, Network


class ReducedVocabulary:
    """Implements `Network` over one whose head has a row per entry of `token_of`; all other tokens get logit -infinity.

    Embedding, blocks and `config.vocab` are those of the whole vocabulary.
    """

    def __init__(self, network: Network, token_of: Int[torch.Tensor, " w"]) -> None:
        self._network, self._token_of = network, token_of.to(network.device)
        self.config: ModelConfig = network.config

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._network.device

    @property
    def backend(self) -> Backend:
        """What computes the passes."""
        return self._network.backend

    def new_cache(self) -> KVCache:
        """An empty cache for this network."""
        return self._network.new_cache()

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        return self._network.embed(token)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks."""
        return self._network.run(x, layout, cache, blocks)

    def final_norm(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """The final norm, from the last block's output to the input of the head."""
        return self._network.final_norm(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits over the whole vocabulary."""
        logits = self._network.logits(x)
        out = logits.new_full((len(logits), self.config.vocab), float("-inf"))
        return out.index_copy_(1, self._token_of, logits)

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether the inner network can."""
        return isinstance(self._network, DynamicTreeNetwork) and self._network.grows_dynamic_trees

    def grow_dynamic_trees(self, roots: Float[torch.Tensor, "b d"], trees: DynamicTrees, cache: KVCache) -> None:
        """Grow trees with tokens of the whole vocabulary."""
        assert isinstance(self._network, DynamicTreeNetwork)
        self._network.grow_dynamic_trees(roots, trees, cache, self._token_of)

    def first_layers(self, layers: int) -> "ReducedVocabulary":
        """The first `layers` blocks with the same norm and head, sharing all weights."""
        return ReducedVocabulary(self._network.first_layers(layers), self._token_of)

    def without_sublayers(self, skip: SkipSet) -> "ReducedVocabulary":
        """The network without some sub-layers, sharing all weights."""
        return ReducedVocabulary(self._network.without_sublayers(skip), self._token_of)
