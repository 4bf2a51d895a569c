"""Networks whose head has other tokens than the text, behind the interface of one with the text's tokens."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Self

import torch
from jaxtyping import Float, Int

from foretell.model.block.decoder import BlockOutput, BlockRange, SkipSet
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import DynamicTrees
from foretell.model.run.network import DynamicTreeNetwork, Network, NetworkWrapper

_ANY_TOKEN = 0
"""Stands for padding, which no text contains: read or drafted, it costs a draft at most."""


class _OtherVocabulary(NetworkWrapper, ABC):
    """Implements `Network` over one with other tokens."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._network = network

    @abstractmethod
    def _over(self, network: Network) -> Self:
        """The same over another network."""

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks."""
        return self._network.run(x, layout, cache, blocks)

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write the keys and values of blocks alone."""
        self._network.write_keys(x, layout, cache, blocks)

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether the inner network can."""
        return isinstance(self._network, DynamicTreeNetwork) and self._network.grows_dynamic_trees

    def first_layers(self, layers: int) -> Self:
        """The first `layers` blocks with the same norm and head, sharing all weights."""
        return self._over(self._network.first_layers(layers))

    def without_sublayers(self, skip: SkipSet) -> Self:
        """The network without some sub-layers, sharing all weights."""
        return self._over(self._network.without_sublayers(skip))


class ResizedVocabulary(_OtherVocabulary):
    """`vocab` tokens over a draft model with another number: models of one tokenizer pad their embeddings to different
    sizes (Qwen2.5: 151,936 rows up to 3B, 152,064 above). Tokens that it lacks get logit -infinity.
    """

    def __init__(self, network: Network, vocab: int) -> None:
        super().__init__(network)
        self._own_vocab, self.config = network.config.vocab, replace(network.config, vocab=vocab)

    def _over(self, network: Network) -> Self:
        return type(self)(network, self.config.vocab)

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        return self._network.embed(torch.where(token < self._own_vocab, token, _ANY_TOKEN))

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits over the target's vocabulary."""
        logits, missing = self._network.logits(x), self.config.vocab - self._own_vocab
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))  # cut where `missing` is below 0

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


class ReducedVocabulary(_OtherVocabulary):
    """The whole vocabulary over a network whose head has a row per entry of `token_of`; all other tokens get logit
    -infinity. Embedding, blocks and `config.vocab` are those of the whole vocabulary.
    """

    def __init__(self, network: Network, token_of: Int[torch.Tensor, " w"]) -> None:
        super().__init__(network)
        self._token_of = token_of.to(network.device)

    def _over(self, network: Network) -> Self:
        return type(self)(network, self._token_of)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits over the whole vocabulary."""
        logits = self._network.logits(x)
        out = logits.new_full((len(logits), self.config.vocab), float("-inf"))
        return out.index_copy_(1, self._token_of, logits)

    def grow_dynamic_trees(self, roots: Float[torch.Tensor, "b d"], trees: DynamicTrees, cache: Cache) -> None:
        """Grow trees with tokens of the whole vocabulary."""
        assert isinstance(self._network, DynamicTreeNetwork)
        self._network.grow_dynamic_trees(roots, trees, cache, self._token_of)
