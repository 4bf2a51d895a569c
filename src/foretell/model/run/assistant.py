"""Gemma 4's assistant: a small decoder that has no keys and values of its own and attends to those of its target."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int

from foretell.model.cache.base import Cache, LayeredCache
from foretell.model.cache.layout import Layout
from foretell.model.config.model import ModelConfig

Tensor = torch.Tensor
Blocks = Callable[[Tensor, Layout, Cache], Tensor]


class CentroidHead:
    """A head that scores the tokens of the `chosen` groups whose centroids score best; others get -inf.

    `table`: the rows of the head by group, [groups, tokens, d]; `tokens`: their tokens.
    """

    def __init__(
        self,
        centroids: Callable[[Tensor], Tensor],
        table: Float[Tensor, "g n d"],
        tokens: Int[Tensor, "g n"],
        chosen: int,
    ) -> None:
        self._centroids, self._table, self._tokens, self._chosen = centroids, table, tokens, chosen

    def __call__(self, x: Float[Tensor, "t d"]) -> Float[Tensor, "t v"]:
        """Logits over the whole vocabulary, float32 or wider."""
        groups = self._centroids(x).topk(self._chosen, -1).indices
        scores = self._table[groups].to(x.dtype) @ x[:, None, :, None]
        out = x.new_full((len(x), self._tokens.numel()), float("-inf"))
        return out.scatter_(1, self._tokens[groups].flatten(1), scores.flatten(1))


class Assistant:
    """Predicts the token after the next one from a state and the embedding of the next token: both concatenated,
    through one matrix (`combine`), and decoder layers that attend to the keys and values of the target's layers
    `sources`. From their normed output the head gives logits, and `project` the state of the token after.

    The first state is the target's after its final norm. All tokens of a draft stand at the position of the first one
    (transformers' `SinglePositionMultiTokenCandidateGenerator`; llama.cpp).
    """

    token_of: torch.Tensor | None = None
    """None: it predicts all tokens of the target."""

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        combine: Callable[[Tensor], Tensor],
        blocks: Blocks,
        norm: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        sources: Sequence[int],
        target: ModelConfig,
    ) -> None:
        self._embed, self._combine, self._blocks, self._norm = embed, combine, blocks, norm
        self._project, self._head, self._sources = project, head, tuple(sources)
        self.hidden_layers, self.target_vocab, self.context = (target.layers + 1,), target.vocab, target.context

    def attended(self, cache: Cache) -> Cache:
        """What its layers attend to of the target's cache."""
        places = [cache.store(source) for source in self._sources]
        stores = list(dict.fromkeys(store for store, _ in places))
        return LayeredCache(stores, [(stores.index(store), index) for store, index in places])

    def draft_step(
        self, state: Float[Tensor, "t d"], token: Int[Tensor, " t"], layout: Layout, cache: Cache
    ) -> tuple[Float[Tensor, "t d"], Float[Tensor, "t v"]]:
        """The states after tokens, and logits, over `attended`; `layout`: the target's tokens that each one sees."""
        embedded = self._embed(token)
        x = self._combine(torch.cat((embedded, state.to(embedded.device, embedded.dtype)), -1)).to(embedded.dtype)
        out = self._norm(self._blocks(x, layout, cache))
        return self._project(out), self._head(out).to(out.dtype)

    def to_target_vocab(self, logits: Float[Tensor, "t v"]) -> Float[Tensor, "t v"]:
        """The logits themselves."""
        return logits
