"""Weight offloading: a network whose blocks are read from the checkpoint when they run, under a memory limit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import nn

from foretell.model.cache import Cache
from foretell.model.config import ModelConfig
from foretell.model.decoder import BlockForward, BlockOutput, BlockRange, SkipSet, run_blocks
from foretell.model.layout import Layout
from foretell.model.network import NetworkWrapper, OuterNetwork

B = TypeVar("B")


class BlockStore(Generic[B]):
    """Blocks within a budget of bytes: the first ones stay in memory, the others are fetched one at a time and dropped.

    Every pass runs the blocks in the same order, so a least-recently-used cache would never hit: the resident blocks
    are fixed. `fetch` reads block `i`, `release_pages` returns the pages of the file to the system. `fixed_bytes` are
    those of embedding, norm and head.

    Raises:
        ValueError: the budget does not hold the fixed bytes and one block.
    """

    def __init__(
        self, layers: int, fetch: Callable[[int], B], release_pages: Callable[[], None], budget: int, fixed_bytes: int
    ) -> None:
        self._fetch, self._release_pages = fetch, release_pages
        first = fetch(0)
        self.block_bytes = weight_bytes(first)
        self.resident_bytes = fixed_bytes + self.block_bytes
        if self.resident_bytes > budget:
            raise ValueError(
                f"the memory limit of {budget:,} bytes is too small: embedding, head and one block alone take "
                f"{self.resident_bytes:,}"
            )
        # Where not all blocks fit, one place is needed for the block that is running.
        places = min((budget - fixed_bytes) // self.block_bytes, layers)
        self._resident = {0: first} if places > 1 or layers == 1 else {}
        self.resident_blocks = places if places == layers else places - 1
        self.resident_bytes = fixed_bytes + len(self._resident) * self.block_bytes
        self.peak_bytes = self.resident_bytes
        self.fetch_count = 1
        """Number of blocks read from the file so far."""

    def get(self, i: int) -> B:
        """Block `i`; the caller drops its reference after running it."""
        block = self._resident.get(i)
        if block is None:
            block = self._fetch(i)
            self._release_pages()
            self.fetch_count += 1
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes + self.block_bytes)
            if i < self.resident_blocks:
                self._resident[i] = block
                self.resident_bytes += self.block_bytes
        return block


def weight_bytes(part: Any) -> int:
    """Bytes of a module's parameters and buffers, shared ones counted once; of another object its `nbytes`."""
    if not isinstance(part, nn.Module):
        return int(part.nbytes)
    tensors = {t.data_ptr(): t.nbytes for t in [*part.parameters(), *part.buffers()]}
    return sum(tensors.values())


class BlocklessNetwork(OuterNetwork, Protocol[B]):
    """A network without its blocks, and the forward pass of a block given as an argument."""

    def block_forward(self, layout: Layout, cache: Cache) -> BlockForward[B]:
        """The forward pass of a block over this layout and cache."""

    def without_blocks(self, config: ModelConfig, skip: SkipSet) -> "BlocklessNetwork[B]":
        """The same embedding, norm and head for another configuration of the blocks."""


class OffloadedDecoder(NetworkWrapper, Generic[B]):
    """Implements `Network` over a `BlockStore` (the on-demand target of LLMCad, arXiv 2309.04255).

    A pass takes as long as reading most of the weights, so speed depends on tokens per pass. Results are bit for bit
    those of the network in memory.
    """

    def __init__(self, outer: BlocklessNetwork[B], store: BlockStore[B]) -> None:
        super().__init__(outer)
        self._outer, self.store = outer, store

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks; blocks that are not resident are in memory one at a time."""
        return run_blocks(x, blocks, self.store.get, self._outer.block_forward(layout, cache))

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Run the blocks and keep the keys and values alone: reading a block takes longer than running it.

        The input of every block is `x`, so the output of each is dropped.
        """
        forward = self._outer.block_forward(layout, cache)
        for i in range(blocks.first, blocks.last):
            forward(self.store.get(i), i, x)

    def first_layers(self, layers: int) -> "OffloadedDecoder[B]":
        """The first `layers` blocks with the same norm and head, from the same store."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return self._like(replace(self.config, layers=layers), SkipSet())

    def without_sublayers(self, skip: SkipSet) -> "OffloadedDecoder[B]":
        """The network without some sub-layers, from the same store."""
        return self._like(self.config, skip)

    def _like(self, config: ModelConfig, skip: SkipSet) -> "OffloadedDecoder[B]":
        return OffloadedDecoder(self._outer.without_blocks(config, skip), self.store)
