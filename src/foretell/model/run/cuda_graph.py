"""CUDA graphs: a decoder whose small forward passes have static shapes and are captured once and replayed."""

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float

from foretell.model.block.cached_attention import PlacedLayout
from foretell.model.block.decoder import BlockOutput, BlockRange, Decoder, SkipSet
from foretell.model.cache.base import Cache
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.run.network import NetworkWrapper
from foretell.utils.transfer import to_device

_MAX_TOKENS = 64
"""Larger passes are not bound by kernel launches, so they are not captured."""


class _Shape(NamedTuple):
    """Everything that a captured pass depends on; `cache`: the addresses and shapes of its stores and their tables."""

    attention: str
    sizes: tuple[int, ...]
    cache: tuple[int, ...]
    hidden_layers: tuple[int, ...]


@dataclass(frozen=True)
class _Pass:
    """Static tensors of one shape, and the graph that reads and writes them (None: run eagerly, as on the CPU)."""

    x: Float[torch.Tensor, "t d"]
    placed: PlacedLayout
    out: tuple[Float[torch.Tensor, "t d"], ...]
    graph: torch.cuda.CUDAGraph | None
    cache: tuple[weakref.ref[torch.Tensor], ...]
    """The tensors of the cache that it was captured for; of no use once one of them is gone."""

    @property
    def useful(self) -> bool:
        """Whether its cache is there."""
        return all(tensor() is not None for tensor in self.cache)


class GraphedDecoder(NetworkWrapper):
    """Implements `Network` by a torch decoder whose small passes are CUDA graphs: one launch instead of some hundred.

    The sizes of a pass are rounded up (`CachedAttention.place_static`), so that few graphs serve all steps; each is
    captured the first time its shape occurs. On the CPU the same static tensors are used without a graph, so that
    tests can compare the results with the decoder's.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._decoder = decoder
        self._passes: dict[_Shape, _Pass] = {}
        self._pool: Any = None
        """The memory that all graphs share: what one of them leaves is read before the next one runs."""

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
        caches = [store for store in cache.all_stores() if isinstance(store, KVCache)]
        assert len(caches) == len(cache.all_stores())
        if any(store.packed is not None for store in caches):  # what a pass packs depends on its texts
            return self._decoder.run(x, layout, cache, blocks)
        kind = self._decoder.attention_kind
        placed, tokens, padded, sizes = kind.place_static(layout, x.device, self.config, cache)
        tensors = [part for cache in caches for part in (cache.k, cache.table)]
        addresses = tuple(number for each in tensors for number in (each.data_ptr(), *each.shape))
        shape = _Shape(kind.name, sizes, addresses, blocks.hidden_layers)
        flat = x[to_device(tokens, x.device)]
        static = self._passes.get(shape)
        if static is None:
            self._passes = {known: one for known, one in self._passes.items() if one.useful}
            self._pool = self._pool if self._passes else None  # it is gone with the last graph
            held = tuple(map(weakref.ref, tensors))
            static = self._passes[shape] = self._capture(flat, placed, cache, blocks, held)
        static.x.copy_(flat)
        static.placed.copy_(placed)
        if static.graph is None:
            for out, state in zip(static.out, self._run(static.x, static.placed, cache, blocks), strict=True):
                out.copy_(state)
        else:
            static.graph.replay()
        index = to_device(padded, x.device)
        return BlockOutput(tuple(state[index] for state in static.out))

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write keys and values alone; not captured."""
        self._decoder.write_keys(x, layout, cache, blocks)

    def _run(
        self, x: Float[torch.Tensor, "t d"], placed: PlacedLayout, cache: Cache, blocks: BlockRange
    ) -> tuple[Float[torch.Tensor, "t d"], ...]:
        return self._decoder.run_placed(x, placed, cache, blocks).hidden_states

    def _capture(
        self,
        x: Float[torch.Tensor, "t d"],
        placed: PlacedLayout,
        cache: Cache,
        blocks: BlockRange,
        held: tuple[weakref.ref[torch.Tensor], ...],
    ) -> _Pass:
        """Capture a pass on static tensors of its own, after a warm-up on a side stream, which CUDA graphs require."""
        x = x.clone()
        if x.device.type != "cuda":
            return _Pass(x, placed, tuple(torch.empty_like(x) for _ in (*blocks.hidden_layers, None)), None, held)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run(x, placed, cache, blocks)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = self._run(x, placed, cache, blocks)
        self._pool = graph.pool()
        return _Pass(x, placed, out, graph, held)
