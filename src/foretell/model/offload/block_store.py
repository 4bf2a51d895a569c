"""Weight offloading: a network whose blocks are read from the checkpoint when they run, under a memory limit."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import nn

from foretell.model.block.decoder import BlockForward, BlockOutput, BlockRange, SkipSet, bound_logits, run_blocks
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.config.model import ModelConfig
from foretell.model.run.network import NetworkWrapper, OuterNetwork

B = TypeVar("B")
_PLACES = 3
"""Most blocks in memory beside the resident ones: one runs, and the next ones are read while it does, or a draft."""


class BlockStore(Generic[B]):
    """Blocks within a budget of bytes: the first ones stay in memory, the others are fetched and dropped.

    Every pass runs the blocks in the same order, so a least-recently-used cache would never hit: the resident blocks
    are fixed. While a block runs, a thread fetches the next one that is not resident, after the last one the first,
    where the budget holds two blocks beside the fixed bytes. `fetch` reads block `i`, `release_pages` returns the pages
    of the file to the system. `fixed_bytes` are those of embedding, norm and head. `sizes`: bytes of every block; None:
    all are as large as the first.

    Raises:
        ValueError: the budget does not hold the fixed bytes and one block.
    """

    def __init__(
        self,
        count: int,
        fetch: Callable[[int], B],
        release_pages: Callable[[], None],
        budget: int,
        fixed_bytes: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._fetch, self._release_pages, self.count = fetch, release_pages, count
        self._resident: dict[int, B] = {}
        self._ahead: deque[tuple[int, Future[B]]] = deque()
        """Blocks that are being fetched, or were and have not run."""
        self._pool = ThreadPoolExecutor(1, "offload")
        self.fetch_count = self.read_bytes = 0
        """Number of blocks read from the file so far, and their bytes."""
        self.read_seconds = 0.0
        """Time that their reading took."""
        self.bandwidth: float | None = None
        """Most bytes to read per second: a slower device than this one; None: as fast as it goes."""
        self.fixed_bytes = fixed_bytes
        first = None if sizes is not None else self._read(0)
        sizes = [weight_bytes(first)] * count if sizes is None else sizes
        self.sizes: Sequence[int] = sizes
        """Bytes of every block."""
        self.block_bytes = max(sizes)
        """Bytes of the largest block."""
        room = budget - fixed_bytes
        if self.block_bytes > room:
            refuse_small_limit(budget, "what stays in memory and one block", fixed_bytes + self.block_bytes)
        self.resident_blocks, places = resident_within(room, sizes)
        """Number of blocks that stay in memory."""
        self._depth = max(0, places - 1)
        self.resident_bytes = fixed_bytes + sum(sizes[: self.resident_blocks])
        """Bytes that stay in memory."""
        self.peak_bytes = self.resident_bytes + places * self.block_bytes
        """Most bytes of weights in memory at once."""
        if first is not None and self.resident_blocks:
            self._resident[0] = first

    def get(self, i: int) -> B:
        """Block `i`; the caller drops its reference after running it.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged.
        """
        block = self._resident.get(i)
        if block is None:
            if i < self.resident_blocks:
                block = self._resident[i] = self._pool.submit(self._read, i).result()
            else:
                block = self._take(i)
        self._fetch_ahead(i)
        return block

    def _take(self, i: int) -> B:
        """Block `i`, which is not resident: what is being fetched before it is dropped."""
        while self._ahead:
            which, future = self._ahead.popleft()
            block = future.result()
            if which == i:
                return block
            del block, future
        return self._pool.submit(self._read, i).result()

    def _fetch_ahead(self, i: int) -> None:
        """Fetch the blocks that are not resident after block `i`, and after those that are being fetched."""
        last = self._ahead[-1][0] if self._ahead else i
        while len(self._ahead) < self._depth:
            following = last + 1 if last + 1 < self.count else 0
            last = following if following >= self.resident_blocks else self.resident_blocks
            self._ahead.append((last, self._pool.submit(self._read, last)))

    def wait(self) -> None:
        """Wait until the blocks that are being fetched are there."""
        wait([future for _, future in self._ahead])

    def _read(self, i: int) -> B:
        begun = time.perf_counter()
        block = self._fetch(i)
        self._release_pages()
        size = weight_bytes(block)
        if self.bandwidth is not None:
            time.sleep(max(0.0, begun + size / self.bandwidth - time.perf_counter()))
        self.fetch_count, self.read_bytes = self.fetch_count + 1, self.read_bytes + size
        self.read_seconds += time.perf_counter() - begun
        return block


def resident_within(room: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Of blocks of these sizes, how many stay in `room` bytes, and the places for those that are read."""
    # Where not all blocks fit, places are needed for the block that is running and the next ones.
    places = 0 if sum(sizes) <= room else min(_PLACES, room // max(sizes))
    return sum(size <= room - places * max(sizes) for size in accumulate(sizes)), places


def refuse_small_limit(limit: int, what: str, least: int) -> NoReturn:
    """Refuse a limit of memory; `what` takes `least` bytes.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"the memory limit of {limit:,} bytes is too small: {what} alone take {least:,}")


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
    those of the network in memory. `head_pieces`: the head is in the store, in so many pieces after the blocks.
    """

    def __init__(self, outer: BlocklessNetwork[B], store: BlockStore[Any], head_pieces: int = 0) -> None:
        super().__init__(outer)
        self._outer, self.store, self._head_pieces = outer, store, head_pieces

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits, float32 or wider."""
        if not self._head_pieces:
            return self._outer.logits(x)
        first = self.store.count - self._head_pieces
        out = [self.store.get(i)(x) for i in range(first, self.store.count)]
        return bound_logits(self.config, torch.cat(out, -1))

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
        return self._like(self.config.of_layers(range(layers)), SkipSet())

    def without_sublayers(self, skip: SkipSet) -> "OffloadedDecoder[B]":
        """The network without some sub-layers, from the same store."""
        return self._like(self.config, skip)

    def _like(self, config: ModelConfig, skip: SkipSet) -> "OffloadedDecoder[B]":
        return OffloadedDecoder(self._outer.without_blocks(config, skip), self.store, self._head_pieces)
