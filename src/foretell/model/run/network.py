"""Interfaces of the networks that a runner can run, and the base of networks that wrap another one."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int

from foretell.core.context import ModelOutput
from foretell.core.tree import NodeMask, TokenTree
from foretell.model.block.backend import Backend
from foretell.model.block.decoder import BlockOutput, BlockRange, SkipSet
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.config.model import ModelConfig
from foretell.model.kernels import DynamicTrees
from foretell.model.kernels.structures import Sampling


class OuterNetwork(Protocol):
    """The parts of a network outside its blocks: embedding, final norm and head."""

    config: ModelConfig

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def backend(self) -> Backend:
        """What computes the passes."""

    def new_cache(self) -> Cache:
        """An empty cache for this network."""

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""

    def final_norm(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """The final norm, from the last block's output to the input of the head."""

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits, float32 or wider."""


@runtime_checkable
class Network(OuterNetwork, Protocol):
    """A network that a `DecoderRunner` can run: the torch decoder, or the decoder on the CPU kernels."""

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks; new keys and values are written to `cache`."""

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write the keys and values that each block of a range would write if its input were `x` (state copying: CALM,
        arXiv 2207.07061). For networks of which `foretell.model.run.partial_pass.check_spans` holds.
        """

    def first_layers(self, layers: int) -> "Network":
        """The first `layers` blocks with the same norm and head, sharing all weights."""

    def without_sublayers(self, skip: SkipSet) -> "Network":
        """The network without some sub-layers, sharing all weights."""


@runtime_checkable
class TreeNetwork(Protocol):
    """A network that runs a pass over token trees, from tokens to logits, in one call."""

    @property
    def forwards_trees(self) -> bool:
        """Whether it can; some configurations are not supported."""

    def forward_tree(
        self,
        tree: TokenTree,
        rows: Sequence[int],
        length: Sequence[int],
        cache: Cache,
        active: NodeMask,
        scored: NodeMask,
        hidden_layers: tuple[int, ...],
        sampling: Sequence[Sampling] = (),
    ) -> ModelOutput:
        """Run the active nodes of a tree without probe embeddings; `length`: cached tokens per request. See
        `Runner.forward`, and for `sampling` `SamplesTokens.sample_next`.
        """


@runtime_checkable
class DynamicTreeNetwork(Protocol):
    """A network that can grow EAGLE-2's dynamic trees in one call."""

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether it can; some configurations are not supported."""

    def grow_dynamic_trees(
        self,
        roots: Float[torch.Tensor, "b d"],
        trees: DynamicTrees,
        cache: Cache,
        token_of: Int[torch.Tensor, " v"] | None = None,
    ) -> None:
        """Grow trees below roots whose last block's outputs are given; `token_of`: the token of every row of the head
        (None: the row's index).
        """


class NetworkWrapper:
    """Delegates embedding, final norm and head to an inner network."""

    def __init__(self, inner: OuterNetwork) -> None:
        self._inner = inner
        self.config: ModelConfig = inner.config

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._inner.device

    @property
    def backend(self) -> Backend:
        """What computes the passes."""
        return self._inner.backend

    def new_cache(self) -> Cache:
        """An empty cache for this network."""
        return self._inner.new_cache()

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        return self._inner.embed(token)

    def final_norm(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """The final norm, from the last block's output to the input of the head."""
        return self._inner.final_norm(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits, float32 or wider."""
        return self._inner.logits(x)
