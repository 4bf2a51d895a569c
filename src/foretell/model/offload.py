"""A network whose blocks are brought into memory only while they run, for targets larger than the memory they may
take.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import nn

from foretell.model.backend import Backend
from foretell.model.cache import KVCache, Layout
from foretell.model.config import ModelConfig
from foretell.model.decoder import Skip, Span, Streams, Through, visit

B = TypeVar("B")


class BlockStore(Generic[B]):
    """Blocks under a budget of bytes: the first ones stay, the others are fetched one at a time and dropped again.

    Every pass visits the blocks in the same order, so keeping the most recent ones would keep none: which stay is
    fixed. `fetch` reads block `i`, `release` gives the pages of the file back to the system. `fixed` bytes are taken
    already (embedding, head).

    Raises:
        ValueError: the budget does not hold the fixed part and one block.
    """

    def __init__(
        self, layers: int, fetch: Callable[[int], B], release: Callable[[], None], budget: int, fixed: int
    ) -> None:
        self._fetch, self._release = fetch, release
        first = fetch(0)
        self.block_bytes = size_of(first)
        self.resident_bytes = fixed + self.block_bytes
        if self.resident_bytes > budget:
            raise ValueError(
                f"the memory limit of {budget:,} bytes is too small: embedding, head and one block alone take "
                f"{self.resident_bytes:,}"
            )
        # One place stays free for the block that passes through.
        places = min((budget - fixed) // self.block_bytes, layers)
        self._kept = {0: first} if places > 1 or layers == 1 else {}
        self.keeps = places if places == layers else places - 1
        self.resident_bytes = fixed + len(self._kept) * self.block_bytes
        self.peak_bytes = self.resident_bytes
        self.fetched = 1
        """Blocks read from the file so far."""

    def get(self, i: int) -> B:
        """Block `i`; hold on to it only while it runs."""
        block = self._kept.get(i)
        if block is None:
            block = self._fetch(i)
            self._release()
            self.fetched += 1
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes + self.block_bytes)
            if i < self.keeps:
                self._kept[i] = block
                self.resident_bytes += self.block_bytes
        return block


def size_of(part: Any) -> int:
    """Bytes of a module's parameters and buffers, shared ones once, or of what knows its own `nbytes`."""
    if not isinstance(part, nn.Module):
        return int(part.nbytes)
    tensors = {t.data_ptr(): t.nbytes for t in [*part.parameters(), *part.buffers()]}
    return sum(tensors.values())


class Shell(Protocol[B]):
    """A network without its blocks: embedding, norm, head, and how a pass goes through a block that is handed to it."""

    config: ModelConfig

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def backend(self) -> Backend:
        """What computes its passes."""

    def new_cache(self) -> KVCache:
        """An empty cache for all blocks."""

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""

    def over(self, layout: Layout, cache: KVCache) -> Through[B]:
        """What takes the residual stream of a pass through a block."""

    def final(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """What the head sees."""

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token scores."""

    def shell(self, config: ModelConfig, skip: Skip) -> "Shell[B]":
        """The same for other blocks of the store."""


class StreamedDecoder(Generic[B]):
    """Implements `Network` over a `BlockStore` (the on-demand target of LLMCad, arXiv 2309.04255).

    A pass costs the reading of most weights, so what counts is tokens per pass. Its numbers are those of the whole
    network, bit for bit.
    """

    def __init__(self, shell: Shell[B], store: BlockStore[B]) -> None:
        self._shell, self.store = shell, store
        self.config: ModelConfig = shell.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._shell.device

    @property
    def backend(self) -> Backend:
        """What computes its passes."""
        return self._shell.backend

    def new_cache(self) -> KVCache:
        """An empty cache for this network."""
        return self._shell.new_cache()

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        return self._shell.embed(token)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, span: Span) -> Streams:
        """The blocks of a span, one in memory after another."""
        return visit(x, span, self.store.get, self._shell.over(layout, cache))

    def final(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """What the head sees."""
        return self._shell.final(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token scores."""
        return self._shell.logits(x)

    def cut(self, layers: int) -> "StreamedDecoder[B]":
        """The first blocks under the same head, from the same store."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return self._like(replace(self.config, layers=layers), Skip())

    def skipping(self, skip: Skip) -> "StreamedDecoder[B]":
        """All blocks without some of their parts, from the same store."""
        return self._like(self.config, skip)

    def _like(self, config: ModelConfig, skip: Skip) -> "StreamedDecoder[B]":
        return StreamedDecoder(self._shell.shell(config, skip), self.store)
