"""A draft model behind the interface of one with the target's number of tokens: models of one tokenizer pad their
embeddings to different sizes (Qwen2.5: 151,936 rows up to 3B, 152,064 above).
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int

from foretell.model.block.decoder import BlockOutput, BlockRange, SkipSet
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import DynamicTrees
from foretell.model.run.network import DynamicTreeNetwork, Network, NetworkWrapper

_ANY_TOKEN = 0
"""Stands for padding, which no text contains: read or drafted, it costs a draft at most."""


class ResizedVocabulary(NetworkWrapper):
    """Implements `Network` with `vocab` tokens over one with another number. Tokens that it lacks get logit
    -infinity.
    """

    def __init__(self, network: Network, vocab: int) -> None:
        super().__init__(network)
        self._network, self._own_vocab = network, network.config.vocab
        self.config = replace(network.config, vocab=vocab)

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        return self._network.embed(torch.where(token < self._own_vocab, token, _ANY_TOKEN))

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks."""
        return self._network.run(x, layout, cache, blocks)

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write the keys and values of blocks alone."""
        self._network.write_keys(x, layout, cache, blocks)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits over the target's vocabulary."""
        logits, missing = self._network.logits(x), self.config.vocab - self._own_vocab
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))  # cut where `missing` is below 0

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether the inner network can."""
        return isinstance(self._network, DynamicTreeNetwork) and self._network.grows_dynamic_trees

    def grow_dynamic_trees(
        self,
        roots: Float[torch.Tensor, "b d"],
        trees: DynamicTrees,
        cache: Cache,
        token_of: Int[torch.Tensor, " v"] | None = None,
    ) -> None:
        """Grow trees with tokens of the target's vocabulary."""
        assert isinstance(self._network, DynamicTreeNetwork)
        if token_of is None and self._own_vocab > self.config.vocab:
            token_of = torch.arange(self._own_vocab)
        if token_of is not None:
            token_of = torch.where(token_of < self.config.vocab, token_of, _ANY_TOKEN)
        self._network.grow_dynamic_trees(roots, trees, cache, token_of)

    def first_layers(self, layers: int) -> "ResizedVocabulary":
        """The first `layers` blocks with the same norm and head, sharing all weights."""
        return ResizedVocabulary(self._network.first_layers(layers), self.config.vocab)

    def without_sublayers(self, skip: SkipSet) -> "ResizedVocabulary":
        """The network without some sub-layers, sharing all weights."""
        return ResizedVocabulary(self._network.without_sublayers(skip), self.config.vocab)
