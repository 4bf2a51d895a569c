"""CUDA graphs: a decoder whose small forward passes have static shapes and are captured once and replayed."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int

from foretell.model.block.decoder import BlockOutput, BlockRange, Decoder, SkipSet
from foretell.model.cache.base import Cache, LayeredCache
from foretell.model.cache.block_table import BLOCK_SLOTS
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout, PaddedLayout, find_padded_index, pad_to_rectangle
from foretell.model.run.network import NetworkWrapper

_MAX_TOKENS = 64
"""Larger passes are not bound by kernel launches, so they are not captured."""
_SLOT_STEP = 256
"""Mask widths are padded to multiples of this, so that few graphs serve all lengths."""


class _Shape(NamedTuple):
    """Everything that a captured pass depends on; `cache`: the addresses and shapes of its stores and their tables."""

    rows: int
    queries: int
    slots: int
    cache: tuple[int, ...]
    hidden_layers: tuple[int, ...]


@dataclass(frozen=True)
class _Pass:
    """Static tensors of one shape, and the graph that reads and writes them (None: run eagerly, as on the CPU)."""

    x: Float[torch.Tensor, "t d"]
    padded: PaddedLayout
    out: tuple[Float[torch.Tensor, "t d"], ...]
    graph: torch.cuda.CUDAGraph | None


class GraphedDecoder(NetworkWrapper):
    """Implements `Network` by a torch decoder whose small passes are CUDA graphs: one launch instead of some hundred.

    Rows and queries are padded to powers of two and slots to multiples of 256, so that few graphs serve all steps; each
    is captured the first time its shape occurs. On the CPU the same static tensors are used without a graph, so that
    tests can compare the results with the decoder's.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._decoder = decoder
        self._passes: dict[_Shape, _Pass] = {}

    @property
    def decoder(self) -> Decoder:
        """The decoder whose passes are captured."""
        return self._decoder

    def first_layers(self, layers: int) -> "GraphedDecoder":
        """The first `layers` blocks with the same norm and head, sharing all weights."""
        return GraphedDecoder(self._decoder.first_layers(layers))

    def without_sublayers(self, skip: SkipSet) -> "GraphedDecoder":
        """The network without some sub-layers, sharing all weights."""
        return GraphedDecoder(self._decoder.without_sublayers(skip))

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks; passes over all blocks and few tokens are replayed."""
        partial = (blocks.first, blocks.last) != (0, self.config.layers)
        if layout.token_count > _MAX_TOKENS or partial or layout.queries is not None:
            return self._decoder.run(x, layout, cache, blocks)
        stores = cache.stores if isinstance(cache, LayeredCache) else (cache,)
        caches = [store for store in stores if isinstance(store, KVCache)]
        assert len(caches) == len(stores)
        if any(store.packed is not None for store in caches):  # what a pass packs depends on its texts
            return self._decoder.run(x, layout, cache, blocks)
        b, n = pad_to_rectangle(layout).shape
        index = pad_to_rectangle(layout, _next_power(b), _next_power(n))
        flat_layout = _select(layout, index.flatten())
        used = int(max(layout.visible_prefix.max(), layout.slot.max() + 1))
        slots = min(-(-used // _SLOT_STEP) * _SLOT_STEP, caches[0].table.shape[1] * BLOCK_SLOTS)
        padded = PaddedLayout.from_layout(flat_layout, x.device, torch.arange(index.numel()).view(index.shape), slots)
        tensors = [part for cache in caches for part in (cache.k, cache.table)]
        place = tuple(number for each in tensors for number in (each.data_ptr(), *each.shape))
        shape = _Shape(index.shape[0], index.shape[1], slots, place, blocks.hidden_layers)
        flat = x[index.flatten().to(x.device)]
        static = self._passes.get(shape)
        if static is None:
            static = self._passes[shape] = self._capture(flat, padded, cache, blocks)
        static.x.copy_(flat)
        static.padded.copy_(padded)
        if static.graph is None:
            for out, state in zip(static.out, self._run(static.x, static.padded, cache, blocks), strict=True):
                out.copy_(state)
        else:
            static.graph.replay()
        padded_index = find_padded_index(index, layout.token_count).to(x.device)
        return BlockOutput(tuple(state[padded_index] for state in static.out))

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write keys and values alone; not captured."""
        self._decoder.write_keys(x, layout, cache, blocks)

    def _run(
        self, x: Float[torch.Tensor, "t d"], padded: PaddedLayout, cache: Cache, blocks: BlockRange
    ) -> tuple[Float[torch.Tensor, "t d"], ...]:
        return self._decoder.run_padded(x, padded, cache, blocks).hidden_states

    def _capture(self, x: Float[torch.Tensor, "t d"], padded: PaddedLayout, cache: Cache, blocks: BlockRange) -> _Pass:
        """Capture a pass on static tensors of its own, after a warm-up on a side stream, which CUDA graphs require."""
        x = x.clone()
        if x.device.type != "cuda":
            return _Pass(x, padded, tuple(torch.empty_like(x) for _ in (*blocks.hidden_layers, None)), None)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run(x, padded, cache, blocks)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._run(x, padded, cache, blocks)
        return _Pass(x, padded, out, graph)


def _next_power(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def _select(layout: Layout, index: Int[torch.Tensor, " n"]) -> Layout:
    """The tokens of a layout with these indices."""
    return Layout(
        layout.row[index],
        layout.slot[index],
        layout.position[index],
        layout.visible_prefix[index],
        layout.extra_slots[index],
        None if layout.token is None else layout.token[index],
        in_pages=None if layout.in_pages is None else layout.in_pages[index],
    )
