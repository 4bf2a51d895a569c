"""A network that scores only some tokens, seen as one that knows them all."""

import torch
from jaxtyping import Float, Int

from foretell.model.backend import Backend
from foretell.model.cache import KVCache, Layout
from foretell.model.config import ModelConfig
from foretell.model.decoder import Skip, Span, Streams
from foretell.model.kernels import Trees
from foretell.model.runner import DynamicTreeNetwork, Network


class ReducedVocabulary:
    """Implements `Network` over one whose head has a row per entry of `token_of`: every other token scores minus
    infinity.

    Embedding, blocks and `config.vocab` are those of the whole vocabulary.
    """

    def __init__(self, network: Network, token_of: Int[torch.Tensor, " w"]) -> None:
        self._network, self._token_of = network, token_of.to(network.device)
        self.config: ModelConfig = network.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._network.device

    @property
    def backend(self) -> Backend:
        """What computes its passes."""
        return self._network.backend

    def new_cache(self) -> KVCache:
        """An empty cache for this network."""
        return self._network.new_cache()

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        return self._network.embed(token)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, span: Span) -> Streams:
        """The blocks of a span."""
        return self._network.run(x, layout, cache, span)

    def final(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """What the head sees."""
        return self._network.final(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token scores over the whole vocabulary."""
        scores = self._network.logits(x)
        out = scores.new_full((len(scores), self.config.vocab), float("-inf"))
        return out.index_copy_(1, self._token_of, scores)

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether the network has trees by confidence."""
        return isinstance(self._network, DynamicTreeNetwork) and self._network.grows_dynamic_trees

    def grow_dynamic_trees(self, roots: Float[torch.Tensor, "b d"], trees: Trees, cache: KVCache) -> None:
        """The network's trees, in tokens of the whole vocabulary."""
        assert isinstance(self._network, DynamicTreeNetwork)
        self._network.grow_dynamic_trees(roots, trees, cache, self._token_of)

    def cut(self, layers: int) -> "ReducedVocabulary":
        """The first blocks under the same head, sharing weights."""
        return ReducedVocabulary(self._network.cut(layers), self._token_of)

    def skipping(self, skip: Skip) -> "ReducedVocabulary":
        """All blocks without some of their parts, sharing weights."""
        return ReducedVocabulary(self._network.skipping(skip), self._token_of)
