"""Decoder blocks on the native CPU kernels.

What is computed for a token does not depend on the tokens that share the call, nor on the slots, rows, chunks or
threads: verifying a tree gives bit for bit the numbers that decoding one token at a time gives.
"""

import ctypes
from collections.abc import Collection, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from foretell.model.cache import KVCache, Layout
from foretell.model.config import ModelConfig
from foretell.model.kernels import build, structures
from foretell.model.kernels.linear import PackedLinears, expect
from foretell.model.kernels.pack import interleave
from foretell.model.kernels.structures import ACTIVATIONS, PRECISIONS, Precision

Tables = tuple[Tensor, Tensor]


class BlockWeights(Protocol):
    """Raw weights of one decoder block, [out, in], in any float type."""

    @property
    def attention_norm(self) -> Tensor: ...  # noqa: D102
    @property
    def qkv(self) -> Tensor: ...  # noqa: D102
    @property
    def qkv_bias(self) -> Tensor | None: ...  # noqa: D102
    @property
    def q_norm(self) -> Tensor | None: ...  # noqa: D102
    @property
    def k_norm(self) -> Tensor | None: ...  # noqa: D102
    @property
    def output(self) -> Tensor: ...  # noqa: D102
    @property
    def output_bias(self) -> Tensor | None: ...  # noqa: D102
    @property
    def mlp_norm(self) -> Tensor: ...  # noqa: D102
    @property
    def gate_up(self) -> Tensor: ...  # noqa: D102
    @property
    def down(self) -> Tensor: ...  # noqa: D102
    @property
    def post_attention_norm(self) -> Tensor | None: ...  # noqa: D102
    @property
    def post_mlp_norm(self) -> Tensor | None: ...  # noqa: D102


@dataclass(frozen=True)
class PackedBlock:
    """A decoder block in the form of the kernels, and the tensors that its structure points into."""

    struct: structures.Layer
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


class NativeStack:
    """The blocks of a decoder, packed once; a call runs a range of them over new tokens and fills their cache.

    Norm weights are taken as the checkpoint stores them: `config.norm_offset` is added here. Rotary tables are
    float32 (cos, sin), [context, head_dim / 2] each, for full-attention layers and, where they differ, windowed ones.

    Raises:
        RuntimeError: the kernels are not available here.
        ValueError: the architecture is not one they run.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Sequence[BlockWeights],
        precision: Precision,
        rope: Tables,
        local_rope: Tables | None = None,
    ) -> None:
        if not self.supports(config):
            raise ValueError(
                f"the native kernels cannot run this {config.architecture} configuration; use the torch backend"
            )
        self.precision: Precision = precision
        self.config, self._kernels = config, build.library()
        self._tensors: list[Tensor] = []
        self._ropes = {False: self._keep_tables(rope), True: self._keep_tables(local_rope or rope)}
        self.model = structures.Model(
            *(config.hidden, config.heads, config.kv_heads, config.head_dim, config.ffn),
            min(t[0].shape[0] for t in (rope, local_rope or rope)),
            *(PRECISIONS.index(precision), ACTIVATIONS.index(config.activation)),
            *(config.norm_eps, config.scale, config.attention_softcap),
        )
        self._blocks = [self.pack(i, block) for i, block in enumerate(blocks)]
        self.layers = (structures.Layer * len(blocks))(*(block.struct for block in self._blocks))
        self._skipped: tuple[Collection[int], Collection[int]] = (), ()

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels run this architecture: dense, gated, sequential blocks with rotary positions."""
        plain = not (
            config.experts or config.latent or config.learned_positions or config.parallel_blocks or config.mlp_bias
        )
        rotary = config.rope is not None and config.rope.fraction == 1.0
        shaped = config.head_dim % 16 == 0 and config.heads // config.kv_heads <= 16
        return plain and rotary and shaped and config.gated and config.activation in ACTIVATIONS

    def __call__(
        self, x: Tensor, layout: Layout, cache: KVCache, first: int, last: int, entry: Tensor | None = None
    ) -> Tensor:
        """Run blocks first .. last - 1 on the residual stream, float32 [t, hidden]; returns it, leaving `x` as it is.

        `entry`: what the attention of block `first` reads, [t, inputs of its qkv], instead of the stream after its
        norm.

        Raises:
            ValueError: a tensor has the wrong type or shape, or a token points outside the cache or the context.
        """
        return self.streams(x, layout, cache, first, last, entry=entry)[0]

    def streams(
        self,
        x: Tensor,
        layout: Layout,
        cache: KVCache,
        first: int,
        last: int,
        hidden_layers: Sequence[int] = (),
        entry: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """As a call; the streams before the blocks that `hidden_layers` names, ascending, come first.

        Raises:
            ValueError: as a call, or a tap that is no block to be run.
        """
        tokens, memory = self.tokens(x.shape[0], layout), self.memory(cache)
        expect(x, torch.float32, "x", x.shape[0], self.config.hidden)
        if not 0 <= first <= last <= len(self.layers):
            raise ValueError(f"blocks {first} to {last} were asked for, but there are {len(self.layers)}")
        if not all(a < b for a, b in pairwise([first - 1, *hidden_layers, last])):
            raise ValueError(f"hidden_layers must ascend from {first} to less than {last}, found {list(hidden_layers)}")
        out = torch.empty(len(hidden_layers) + 1, *x.shape)
        out[-1] = x
        if entry is not None:
            expect(entry, torch.float32, "entry", x.shape[0], self.layers[first].qkv.input)
        bad = self._kernels.foretell_stack(
            *(self.model, self.layers, first, last, out[-1].data_ptr(), None if entry is None else entry.data_ptr()),
            *(
                tokens,
                memory,
                (c_int32 * len(hidden_layers))(*hidden_layers),
                len(hidden_layers),
                out.data_ptr(),
                torch.get_num_threads(),
            ),
        )
        self.check(bad, layout, memory)
        return out.unbind()

    def check(self, bad: int, layout: Layout, memory: structures.Memory) -> None:
        """See what a kernel found wrong with the layout: its token `bad`, or nothing (-1).

        Raises:
            ValueError: what is wrong about that token.
        """
        if bad < 0:
            return
        where = f"row {layout.row[bad]}, slot {layout.slot[bad]}, position {layout.position[bad]}, prefix {layout.prefix[bad]}"
        room = f"{memory.rows} rows of {memory.slots} slots and {self.model.context} positions"
        raise ValueError(
            f"token {bad} of the layout sees nothing or lies outside the cache of {room}: {where}, {layout.extra[bad]}"
        )

    def skipping(self, attention: Collection[int], mlp: Collection[int]) -> "NativeStack":
        """The same packed weights with those halves of blocks left out: the residual stream passes them by."""
        layers = type(self.layers).from_buffer_copy(self.layers)
        for i, layer in enumerate(layers):
            layer.attention, layer.mlp = layer.attention and i not in attention, layer.mlp and i not in mlp
        other = self._sharing(layers)
        other._skipped = attention, mlp
        return other

    def first(self, layers: int) -> "NativeStack":
        """The first `layers` blocks on the same packed weights; a cache of as many layers or more goes with them."""
        if not 1 <= layers <= len(self.layers):
            raise ValueError(f"the first {layers} blocks were asked for, but there are {len(self.layers)}")
        return self._sharing((structures.Layer * layers)(*self.layers[:layers]))

    def _sharing(self, layers: "ctypes.Array[structures.Layer]") -> "NativeStack":
        other = object.__new__(NativeStack)
        other.__dict__.update(self.__dict__)
        other.layers = layers
        return other

    def pack(self, i: int, block: BlockWeights) -> "PackedBlock":
        """A block as the `i`-th of this stack. Its rotary tables live as long as the stack."""
        norms = (
            block.attention_norm,
            block.mlp_norm,
            block.q_norm,
            block.k_norm,
            block.post_attention_norm,
            block.post_mlp_norm,
        )
        linears = (
            (block.qkv, block.qkv_bias),
            (block.output, block.output_bias),
            (interleave(block.gate_up), None),
            (block.down, None),
        )
        packed = PackedLinears(linears, self.precision, self._kernels)
        offset, window = self.config.norm_offset, self.config.window_of(i)
        scales = [None if n is None else (n.detach().float() + offset).contiguous() for n in norms]
        struct = structures.Layer(
            *packed.structs,
            *(None if scale is None else scale.data_ptr() for scale in scales),
            *self._ropes[window > 0],
            *(window, 1, 1),
        )
        return PackedBlock(struct, (*packed.tensors, *(scale for scale in scales if scale is not None)))

    def through(
        self, block: "PackedBlock", i: int, x: Tensor, tokens: structures.Tokens, memory: structures.Memory
    ) -> Tensor:
        """The residual stream after a block that is the `i`-th; `tokens` and `memory` as the methods of these names
        give them.
        """
        layers = (structures.Layer * (i + 1))()
        layers[i] = block.struct
        layers[i].attention, layers[i].mlp = (i not in skipped for skipped in self._skipped)
        out = x.clone()
        bad = self._kernels.foretell_stack(
            *(self.model, layers, i, i + 1, out.data_ptr(), None, tokens, memory, None, 0, None),
            torch.get_num_threads(),
        )
        if bad >= 0:
            raise ValueError(f"token {bad} of the layout sees nothing or lies outside the cache")
        return out

    def _keep(self, tensor: Tensor) -> int:
        """Address of a tensor that lives as long as the stack."""
        self._tensors.append(tensor.contiguous())
        return self._tensors[-1].data_ptr()

    def _keep_tables(self, tables: Tables) -> tuple[int, int]:
        for table in tables:
            expect(table, torch.float32, "a rotary table", table.shape[0], self.config.head_dim // 2)
        return self._keep(tables[0]), self._keep(tables[1])

    def tokens(self, t: int, layout: Layout) -> structures.Tokens:
        """Where `t` new tokens stand, for the kernels."""
        extras = layout.extra.shape[-1]
        parts = (layout.row, layout.slot, layout.position, layout.prefix)
        for part in parts:
            expect(part, torch.int32, "the layout", t)
        expect(layout.extra, torch.int32, "the layout's extra slots", t, extras)
        return structures.Tokens(t, extras, *(part.data_ptr() for part in parts), layout.extra.data_ptr())

    def memory(self, cache: KVCache) -> structures.Memory:
        """A cache for the kernels."""
        layers, rows, _, slots, _ = cache.k.shape
        dtype = torch.float32 if self.precision == "float32" else torch.bfloat16
        shape = (max(layers, len(self.layers)), rows, self.config.kv_heads, slots, self.config.head_dim)
        for side in (cache.k, cache.v):
            expect(side, dtype, "the cache", *shape)
        return structures.Memory(cache.k.data_ptr(), cache.v.data_ptr(), rows, slots)
