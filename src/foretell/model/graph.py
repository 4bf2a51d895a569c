"""Captured passes: a decoder whose small passes have static shapes and, on CUDA, are replayed as one graph."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int

from foretell.model.attention import PaddedLayout, first_places, rectangle
from foretell.model.backend import Backend
from foretell.model.cache import KVCache, Layout
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder, Skip, Span, Streams

_MOST_TOKENS = 64
"""Larger passes are not bound by launches, so they run as they are."""


class _Shape(NamedTuple):
    """What a captured pass depends on: rows, queries per row, slots of the masks, which cache it points into, and what
    is looked at.
    """

    rows: int
    queries: int
    slots: int
    cache: tuple[int, ...]
    hidden_layers: tuple[int, ...]


@dataclass(frozen=True)
class _Pass:
    """Static tensors of one shape, and the graph that works on them (None: run the code again, as on the CPU)."""

    x: Float[torch.Tensor, "t d"]
    plan: PaddedLayout
    out: tuple[Float[torch.Tensor, "t d"], ...]
    graph: torch.cuda.CUDAGraph | None


class GraphedDecoder:
    """Implements `Network` by a torch decoder with captured passes: the launch cost of some hundred kernels falls to
    that of one graph.

    Rows, queries and slots are padded to powers of two (slots to multiples of 256), so a handful of graphs serves all
    steps; each is captured the first time its shape occurs. On the CPU the same static tensors are used without a
    graph, which is how the tests compare it with the decoder.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.config: ModelConfig = decoder.config
        self._passes: dict[_Shape, _Pass] = {}

    @property
    def decoder(self) -> Decoder:
        """The network whose passes are captured."""
        return self._decoder

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._decoder.device

    @property
    def backend(self) -> Backend:
        """That of the decoder."""
        return self._decoder.backend

    def new_cache(self) -> KVCache:
        """An empty cache for this network."""
        return self._decoder.new_cache()

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        return self._decoder.embed(token)

    def final(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """What the head sees."""
        return self._decoder.final(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token scores."""
        return self._decoder.logits(x)

    def cut(self, layers: int) -> "GraphedDecoder":
        """The first blocks under the same head, sharing weights."""
        return GraphedDecoder(self._decoder.cut(layers))

    def skipping(self, skip: Skip) -> "GraphedDecoder":
        """All blocks without some of their parts, sharing weights."""
        return GraphedDecoder(self._decoder.skipping(skip))

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, span: Span) -> Streams:
        """The blocks of a span; whole passes over few tokens are replayed."""
        if layout.tokens > _MOST_TOKENS or (span.first, span.last) != (0, self.config.layers):
            return self._decoder.run(x, layout, cache, span)
        grid = rectangle(layout)
        grid = rectangle(layout, _power(grid.shape[0]), _power(grid.shape[1]))
        wide = _padded(layout, grid)
        slots = min(-(-int(max(layout.prefix.max(), layout.slot.max() + 1)) // 256) * 256, cache.k.shape[3])
        plan = PaddedLayout.of(wide, x.device, torch.arange(grid.numel()).view(grid.shape), slots)
        shape = _Shape(grid.shape[0], grid.shape[1], slots, (cache.k.data_ptr(), *cache.k.shape), span.hidden_layers)
        flat = x[grid.flatten().to(x.device)]
        static = self._passes.get(shape)
        if static is None:
            static = self._passes[shape] = self._capture(flat, plan, cache, span)
        static.x.copy_(flat)
        static.plan.copy_(plan)
        if static.graph is None:
            for kept, stream in zip(static.out, self._streams(static.x, static.plan, cache, span), strict=True):
                kept.copy_(stream)
        else:
            static.graph.replay()
        places = first_places(grid, layout.tokens).to(x.device)
        return Streams(tuple(stream[places] for stream in static.out))

    def _streams(
        self, x: Float[torch.Tensor, "t d"], plan: PaddedLayout, cache: KVCache, span: Span
    ) -> tuple[Float[torch.Tensor, "t d"], ...]:
        return self._decoder.planned(x, plan, cache, span, self._decoder.block).states

    def _capture(self, x: Float[torch.Tensor, "t d"], plan: PaddedLayout, cache: KVCache, span: Span) -> _Pass:
        """Record the pass on its own static tensors; warmed up on a side stream first, as CUDA graphs ask for."""
        x = x.clone()
        if x.device.type != "cuda":
            return _Pass(x, plan, tuple(torch.empty_like(x) for _ in (*span.hidden_layers, None)), None)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._streams(x, plan, cache, span)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._streams(x, plan, cache, span)
        return _Pass(x, plan, out, graph)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _padded(layout: Layout, grid: Int[torch.Tensor, "b n"]) -> Layout:
    """The layout of all places of a rectangle, padding included."""
    at = grid.flatten()
    return Layout(layout.row[at], layout.slot[at], layout.position[at], layout.prefix[at], layout.extra[at])
