"""Decoder blocks on the CPU kernels.

Batch-invariant: a token's result does not depend on the other tokens of the call, nor on slots, rows, chunks or
threads. Verifying a tree gives bit for bit the results of decoding one token at a time.
"""

import ctypes
from collections.abc import Collection, Sequence
from ctypes import c_int32
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

from foretell.model.config import ModelConfig
from foretell.model.kernels import build, structures
from foretell.model.kernels.linear import PackedLinears, check_tensor
from foretell.model.kernels.pack import Matrix, pack_gate_up, pack_rows
from foretell.model.kernels.structures import ACTIVATIONS, PANEL_KINDS, Precision
from foretell.model.kv_cache import KVCache
from foretell.model.layout import Layout
from foretell.model.rope import RopeTables


@dataclass(frozen=True)
class BlockWeights:
    """Weights of one decoder block; matrices are [out, in]. None: the architecture has none."""

    attention_norm: Tensor
    qkv: Sequence[Matrix]
    """One matrix, or query, key and value apart."""
    output: Matrix
    mlp_norm: Tensor
    gate: Matrix
    up: Matrix
    down: Matrix
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    output_bias: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None


@dataclass(frozen=True)
class PackedBlock:
    """A packed decoder block: its structure, and the linear layers and norms that this points into."""

    struct: structures.Layer
    linears: PackedLinears
    norms: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in (*self.linears.tensors, *self.norms))


class NativeStack:
    """The blocks of a decoder, packed once; a call runs a range of them over new tokens and writes to the cache.

    Norm weights are as in the checkpoint: `config.norm_offset` is added here. Rotary tables are float32 (cos, sin),
    [context, rotary dimensions / 2] each, for full-attention layers and, where they differ, for sliding-window layers.

    Raises:
        RuntimeError: the kernels are not available here.
        ValueError: the kernels do not support the architecture.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Sequence[BlockWeights],
        precision: Precision,
        rope: RopeTables,
        local_rope: RopeTables | None = None,
    ) -> None:
        if not self.supports(config):
            raise ValueError(
                f"the native kernels cannot run this {config.architecture} configuration; use the torch backend"
            )
        self.precision: Precision = precision
        self.config, self.kernels = config, build.library()
        self._tensors: list[Tensor] = []
        self._rotary_dim = 2 * rope[0].shape[1]
        self._ropes = {False: self._keep_rope(rope), True: self._keep_rope(local_rope or rope)}
        self.model = structures.Model(
            *(config.hidden, config.heads, config.kv_heads, config.head_dim, self._rotary_dim, config.ffn),
            min(t[0].shape[0] for t in (rope, local_rope or rope)),
            *(PANEL_KINDS.index("F32" if precision == "float32" else "BF16"), ACTIVATIONS.index(config.activation)),
            *(config.norm_eps, config.scale, config.attention_softcap),
        )
        self._blocks = [self.pack_block(i, block) for i, block in enumerate(blocks)]
        self.layers = (structures.Layer * len(blocks))(*(block.struct for block in self._blocks))
        self._skipped: tuple[Collection[int], Collection[int]] = (), ()

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels support this architecture: dense, gated, sequential blocks with rotary positions."""
        plain = not (
            config.experts or config.latent or config.learned_positions or config.parallel_blocks or config.mlp_bias
        )
        ropes = {rope.rotary_dim(config.head_dim) for rope in (config.rope, config.local_rope) if rope is not None}
        shaped = config.head_dim % 16 == 0 and config.heads // config.kv_heads <= 16
        return plain and len(ropes) == 1 and shaped and config.gated and config.activation in ACTIVATIONS

    def __call__(
        self, x: Tensor, layout: Layout, cache: KVCache, first: int, last: int, attention_input: Tensor | None = None
    ) -> Tensor:
        """Run blocks first .. last - 1 on the residual stream, float32 [t, hidden]; returns the result in a new tensor.

        `attention_input`: input of the attention of block `first`, [t, inputs of its qkv]; None: the normed stream.

        Raises:
            ValueError: a tensor has the wrong dtype or shape, or a token points outside the cache or the context.
        """
        return self.run(x, layout, cache, first, last, attention_input=attention_input)[0]

    def run(
        self,
        x: Tensor,
        layout: Layout,
        cache: KVCache,
        first: int,
        last: int,
        hidden_layers: Sequence[int] = (),
        attention_input: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """As a call, but returns the residual stream before every block of `hidden_layers`, ascending, and then the
        result.

        Raises:
            ValueError: as a call, or `hidden_layers` names a block that does not run.
        """
        layout_struct, cache_struct = self.layout_struct(x.shape[0], layout), self.cache_struct(cache)
        check_tensor(x, torch.float32, "x", x.shape[0], self.config.hidden)
        if not 0 <= first <= last <= len(self.layers):
            raise ValueError(f"blocks {first} to {last} were asked for, but there are {len(self.layers)}")
        if not all(a < b for a, b in pairwise([first - 1, *hidden_layers, last])):
            raise ValueError(f"hidden_layers must ascend from {first} to less than {last}, found {list(hidden_layers)}")
        out = torch.empty(len(hidden_layers) + 1, *x.shape)
        out[-1] = x
        if attention_input is not None:
            check_tensor(attention_input, torch.float32, "attention_input", x.shape[0], self.layers[first].qkv.input)
        invalid = self.kernels.foretell_stack(
            *(self.model, self.layers, first, last, out[-1].data_ptr()),
            *(None if attention_input is None else attention_input.data_ptr(), layout_struct, cache_struct),
            *((c_int32 * len(hidden_layers))(*hidden_layers), len(hidden_layers), out.data_ptr()),
            torch.get_num_threads(),
        )
        self.check_result(invalid, layout, cache_struct)
        return out.unbind()

    def check_result(self, invalid: int, layout: Layout, cache: structures.Cache) -> None:
        """Check a kernel's return value: -1, or the index of an invalid token.

        Raises:
            ValueError: that token has no visible slot or lies outside the cache.
        """
        if invalid < 0:
            return
        where = ", ".join(f"{f.name} {getattr(layout, f.name)[invalid]}" for f in fields(layout))
        size = f"{cache.rows} rows of {cache.slots} slots and {self.model.context} positions"
        raise ValueError(
            f"token {invalid} of the layout has no visible slot or lies outside the cache of {size}: {where}"
        )

    def without_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> "NativeStack":
        """The blocks without some sub-layers, sharing the packed weights."""
        layers = type(self.layers).from_buffer_copy(self.layers)
        for i, layer in enumerate(layers):
            layer.attention, layer.mlp = layer.attention and i not in attention, layer.mlp and i not in mlp
        other = self._sharing(layers)
        other._skipped = attention, mlp
        return other

    def first_layers(self, layers: int) -> "NativeStack":
        """The first `layers` blocks, sharing the packed weights; the cache needs at least as many layers."""
        if not 1 <= layers <= len(self.layers):
            raise ValueError(f"the first {layers} blocks were asked for, but there are {len(self.layers)}")
        return self._sharing((structures.Layer * layers)(*self.layers[:layers]))

    def _sharing(self, layers: "ctypes.Array[structures.Layer]") -> "NativeStack":
        other = object.__new__(NativeStack)
        other.__dict__.update(self.__dict__)
        other.layers = layers
        return other

    def pack_block(self, i: int, block: BlockWeights) -> "PackedBlock":
        """Pack a block as block `i` of this stack. Its rotary tables live as long as the stack."""
        norms = (
            block.attention_norm,
            block.mlp_norm,
            block.q_norm,
            block.k_norm,
            block.post_attention_norm,
            block.post_mlp_norm,
        )
        how = self.precision, self.kernels
        packed = PackedLinears(
            [
                (pack_rows(block.qkv, *how), block.qkv_bias),
                (pack_rows([block.output], *how), block.output_bias),
                ([pack_gate_up(block.gate, block.up, *how)], None),
                (pack_rows([block.down], *how), None),
            ]
        )
        offset, window = self.config.norm_offset, self.config.window_of(i)
        scales = [None if n is None else (n.detach().float() + offset).contiguous() for n in norms]
        struct = structures.Layer(
            *packed.structs,
            *(None if scale is None else scale.data_ptr() for scale in scales),
            *self._ropes[window > 0],
            *(window, 1, 1),
        )
        return PackedBlock(struct, packed, tuple(scale for scale in scales if scale is not None))

    def run_block(
        self, block: "PackedBlock", i: int, x: Tensor, layout: structures.Layout, cache: structures.Cache
    ) -> Tensor:
        """The residual stream after a packed block that is block `i` of the stack.

        Raises:
            ValueError: a token has no visible slot or lies outside the cache.
        """
        layers = (structures.Layer * (i + 1))()
        layers[i] = block.struct
        layers[i].attention, layers[i].mlp = (i not in skipped for skipped in self._skipped)
        out = x.clone()
        invalid = self.kernels.foretell_stack(
            *(self.model, layers, i, i + 1, out.data_ptr(), None, layout, cache, None, 0, None),
            torch.get_num_threads(),
        )
        if invalid >= 0:
            raise ValueError(f"token {invalid} of the layout has no visible slot or lies outside the cache")
        return out

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor as long as the stack lives; returns its address."""
        self._tensors.append(tensor.contiguous())
        return self._tensors[-1].data_ptr()

    def _keep_rope(self, tables: RopeTables) -> tuple[int, int]:
        for table in tables:
            check_tensor(table, torch.float32, "a rotary table", table.shape[0], self._rotary_dim // 2)
        return self._keep(tables[0]), self._keep(tables[1])

    def layout_struct(self, t: int, layout: Layout) -> structures.Layout:
        """A layout of `t` tokens as an argument of the kernels."""
        width = layout.extra_slots.shape[-1]
        columns = (layout.row, layout.slot, layout.position, layout.visible_prefix)
        for column in columns:
            check_tensor(column, torch.int32, "the layout", t)
        check_tensor(layout.extra_slots, torch.int32, "the layout's extra slots", t, width)
        return structures.Layout(t, width, *(column.data_ptr() for column in columns), layout.extra_slots.data_ptr())

    def cache_struct(self, cache: KVCache) -> structures.Cache:
        """A cache as an argument of the kernels."""
        layers, rows, _, slots, _ = cache.k.shape
        dtype = torch.float32 if self.precision == "float32" else torch.bfloat16
        shape = (max(layers, len(self.layers)), rows, self.config.kv_heads, slots, self.config.head_dim)
        for side in (cache.k, cache.v):
            check_tensor(side, dtype, "the cache", *shape)
        return structures.Cache(cache.k.data_ptr(), cache.v.data_ptr(), rows, slots)
