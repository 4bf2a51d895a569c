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
from jaxtyping import Float
from torch import Tensor

from foretell.model.cache import Cache, LayeredCache
from foretell.model.config import ModelConfig
from foretell.model.expert_matrices import ExpertMatrices
from foretell.model.kernels import build, structures
from foretell.model.kernels.experts import PackedExperts
from foretell.model.kernels.kv_cache import NativeKVCache, cache_dtype, cache_kind
from foretell.model.kernels.linear import PackedLinears, check_tensor
from foretell.model.kernels.pack import Panels, interleave_bias, plan_inner, plan_rows
from foretell.model.kernels.packed_file import PackedPart
from foretell.model.kernels.states import NativeStateStore, pack_mixer, projected_width
from foretell.model.kernels.states import supports as supports_states
from foretell.model.kernels.structures import ACTIVATIONS, LANES, MAX_GROUP, MAX_HEAD_DIM, Precision
from foretell.model.layout import Layout
from foretell.model.linear import Linear
from foretell.model.rope import RopeTables
from foretell.model.state_layers import StateMixer
from foretell.model.stored_matrix import Matrix

_LAYER_LINEARS = 4
"""Linear layers of a block: qkv, output, gate and up, down; the last two are empty in a layer with experts."""


@dataclass(frozen=True)
class LatentWeights:
    """What latent attention has between its projections and its output; see `model.latent.LatentProjection`."""

    query: Matrix | None
    """From the queries' latent vector to the queries; None: they have none."""
    query_norm: Tensor | None
    key_norm: Tensor
    key: Float[Tensor, "h n r"]
    value: Float[Tensor, "h v r"]
    eps: float


@dataclass(frozen=True)
class BlockWeights:
    """Weights of one decoder block; matrices are [out, in]. None: the architecture has none."""

    attention_norm: Tensor
    qkv: Sequence[Matrix]
    """One matrix, or query, key and value apart."""
    output: Matrix | None
    """None: the block is a feed-forward network alone."""
    mlp_norm: Tensor
    gate: Matrix | None
    up: Matrix | None
    down: Matrix | None
    """None: the layer has experts, or no feed-forward network."""
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    output_bias: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    sinks: Tensor | None = None
    """A score per query head that joins the softmax over its keys."""
    experts: ExpertMatrices | None = None
    attention_gate: Matrix | None = None
    attention_gate_bias: Tensor | None = None
    mixer: StateMixer | None = None
    """What takes the place of attention; `qkv` and `output` are its projections."""
    latent: LatentWeights | None = None
    """`qkv` is then the queries, or their latent vector, and what keys and values are made of."""


def plan_block(block: BlockWeights, precision: Precision) -> Sequence[list[Panels]]:
    """How to pack the linear layers of a block: of query, key and value, of the attention's output, and of a dense
    feed-forward network gate and up, and its output; then the gate of attention.
    """
    layers = [] if block.output is None else [_plan_inputs(block, precision), plan_rows([block.output], precision)]
    if block.up is not None and block.down is not None:
        layers += [plan_inner(block.gate, block.up, precision), plan_rows([block.down], precision)]
    return layers if block.attention_gate is None else [*layers, plan_rows([block.attention_gate], precision)]


def _plan_inputs(block: BlockWeights, precision: Precision) -> list[Panels]:
    inputs, gates = plan_rows(block.qkv, precision), _mixer_gates(block)
    if gates is None:
        return inputs
    return [*inputs, *plan_rows([gates.weight], "float32" if precision == "float32" else "bfloat16")]


def _mixer_gates(block: BlockWeights) -> Linear | None:
    """The gates that a layer's mixer reads beside its projected input."""
    gates = getattr(block.mixer, "gates", None)
    return gates if isinstance(gates, Linear) else None


def _input_bias(block: BlockWeights) -> Tensor | None:
    """The bias of all products of a block's normed input."""
    gates = _mixer_gates(block)
    if gates is None or (block.qkv_bias is None and gates.bias is None):
        return block.qkv_bias
    outputs = sum(part.shape[0] for part in block.qkv)
    sides = zip((block.qkv_bias, gates.bias), (outputs, gates.weight.shape[0]), strict=True)
    return torch.cat([torch.zeros(n) if bias is None else bias.detach().float() for bias, n in sides])


class PackedBlock(PackedPart):
    """A packed decoder block: its structure first, and all memory that this points into."""

    @property
    def struct(self) -> structures.Layer:
        """The argument of the kernels."""
        found = self.structs[0]
        assert isinstance(found, structures.Layer)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


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
        if config.unrotated_layers:
            self._no_rope = self._keep_rope((torch.ones_like(rope[0]), torch.zeros_like(rope[1])))
        kv_heads, self._cache_heads, self._head_dim = _head_sizes(config)
        self.model = structures.Model(
            *(config.hidden, config.heads, kv_heads, self._head_dim, self._rotary_dim, config.ffn),
            min(t[0].shape[0] for t in (rope, local_rope or rope)),
            *(self._cache_heads, cache_kind(precision), ACTIVATIONS.index(config.activation)),
            *(config.norm_eps, config.scale, config.attention_softcap, config.residual_scale),
        )
        self._set_blocks([self.pack_block(i, block) for i, block in enumerate(blocks)])
        self._skipped: tuple[Collection[int], Collection[int]] = (), ()

    def _set_blocks(self, blocks: Sequence[PackedBlock]) -> None:
        self.blocks = blocks
        self.layers = (structures.Layer * len(blocks))(*(block.struct for block in blocks))

    def with_blocks(self, blocks: Sequence[PackedBlock]) -> "NativeStack":
        """A stack of packed blocks with the rotary tables of this one."""
        other = object.__new__(NativeStack)
        other.__dict__.update(self.__dict__)
        other._set_blocks(blocks)
        return other

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels support this architecture: gated, sequential blocks with rotary positions."""
        plain = not (config.learned_positions or config.parallel_blocks)
        plain = plain and (config.state is None or supports_states(config.state))
        if config.experts is not None:
            plain = plain and not config.post_norms and PackedExperts.supports(config.experts)
        ropes = {rope.rotary_dim(config.head_dim) for rope in (config.rope, config.local_rope) if rope is not None}
        kv_heads, _, head_dim = _head_sizes(config)
        shaped = head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM
        shaped = shaped and config.heads // kv_heads <= MAX_GROUP
        return plain and len(ropes) == 1 and shaped and config.activation in ACTIVATIONS

    def __call__(
        self, x: Tensor, layout: Layout, cache: Cache, first: int, last: int, attention_input: Tensor | None = None
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
        cache: Cache,
        first: int,
        last: int,
        hidden_layers: Sequence[int] = (),
        attention_input: Tensor | None = None,
        expert_counts: list[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """As a call, but returns the residual stream before every block of `hidden_layers`, ascending, and then the
        result. `expert_counts` is extended by the number of experts that every mixture-of-experts layer read.

        Raises:
            ValueError: as a call, or `hidden_layers` names a block that does not run.
        """
        layout_struct, cache_struct = self.layout_struct(x.shape[0], layout), self.cache_struct(cache, layout)
        check_tensor(x, torch.float32, "x", x.shape[0], self.config.hidden)
        if not 0 <= first <= last <= len(self.layers):
            raise ValueError(f"blocks {first} to {last} were asked for, but there are {len(self.layers)}")
        if not all(a < b for a, b in pairwise([first - 1, *hidden_layers, last])):
            raise ValueError(f"hidden_layers must ascend from {first} to less than {last}, found {list(hidden_layers)}")
        out = torch.empty(len(hidden_layers) + 1, *x.shape)
        out[-1] = x
        if attention_input is not None:
            check_tensor(attention_input, torch.float32, "attention_input", x.shape[0], self.layers[first].qkv.input)
        counts = None if expert_counts is None or self.config.experts is None else (c_int32 * (last - first))()
        invalid = self.kernels.foretell_stack(
            *(self.model, self.layers, first, last, out[-1].data_ptr()),
            *(None if attention_input is None else attention_input.data_ptr(), layout_struct, cache_struct),
            *((c_int32 * len(hidden_layers))(*hidden_layers), len(hidden_layers), out.data_ptr(), counts),
            torch.get_num_threads(),
        )
        self.check_result(invalid, layout, cache_struct)
        if counts is not None and expert_counts is not None:
            expert_counts += filter(None, counts)
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
        layers = plan_block(block, self.precision)
        biases = [] if block.output is None else [_input_bias(block), block.output_bias]
        if block.up is not None:
            biases += [interleave_bias(block.gate_bias, block.up_bias), block.down_bias]
        if block.attention_gate is not None:
            biases.append(block.attention_gate_bias)
        packed = PackedLinears.pack(list(zip(layers, biases, strict=True)), self.kernels)
        structs = list(packed.structs)
        gate = structures.Weight() if block.attention_gate is None else structs.pop()
        offset, window = self.config.norm_offset, self.config.window_of(i)
        scales = [None if n is None else (n.detach().float() + offset).contiguous() for n in norms]
        scales.append(None if block.sinks is None else block.sinks.detach().float().contiguous())
        experts = None
        if block.experts is not None:
            assert self.config.experts is not None
            experts = PackedExperts(self.config.experts, block.experts, self.precision, self.kernels)
        none = [structures.Weight(), structures.Weight()]
        structs = [*(none if block.output is None else []), *structs, *none]
        recurrent = self.config.state_layers
        mixer, vectors = None, list[Tensor]()
        if block.mixer is not None:
            mixer, vectors = pack_mixer(block.mixer, recurrent.index(i))
        latent = None if block.latent is None else self._pack_latent(block.latent)
        struct = structures.Layer(
            *(*structs[:_LAYER_LINEARS], gate),
            None if mixer is None else ctypes.addressof(mixer),
            None if latent is None else ctypes.addressof(latent.structs[0]),
            self._store_index(i),
            *(None if scale is None else scale.data_ptr() for scale in scales),
            None if experts is None else ctypes.addressof(experts.structs[0]),
            *(None, None, window, *self._sublayers(i)),
        )
        memory = [*packed.tensors, *(scale for scale in scales if scale is not None)]
        further: list[structures.Memory] = [struct, *packed.further]
        if experts is not None:
            memory += experts.tensors
            further += experts.structs
        if mixer is not None:
            memory += vectors
            further.append(mixer)
        if latent is not None:
            memory += latent.tensors
            further += latent.structs
        return self.attach(i, PackedBlock(further, memory))

    def _store_index(self, i: int) -> int:
        """Index of a layer in the cache of keys and values."""
        return i if self.config.state is None else sum(j in self.config.attention_layers for j in range(i))

    def _sublayers(self, i: int) -> tuple[bool, bool]:
        """Whether a layer has attention, or what takes its place, and a feed-forward network."""
        return i not in self.config.attention_free_layers, i not in self.config.mlp_free_layers

    def _pack_latent(self, weights: LatentWeights) -> PackedPart:
        """Latent attention as an argument of the kernels; the matrices of the heads are floats."""
        sizes, precision = self.config.latent, self.precision
        assert sizes is not None
        floats: Precision = "float32" if precision == "float32" else "bfloat16"
        by_head = [plan_rows([head], floats) for head in (*weights.key.transpose(1, 2), *weights.value)]
        queries = [] if weights.query is None else [plan_rows([weights.query], precision)]
        packed = PackedLinears.pack([(plan, None) for plan in (*by_head, *queries)], self.kernels)
        heads = self.config.heads
        key, value = ((structures.Weight * heads)(*packed.structs[at : at + heads]) for at in (0, heads))
        norms = [n.detach().float().contiguous() for n in (weights.key_norm, weights.query_norm) if n is not None]
        struct = structures.Latent(
            packed.structs[-1] if queries else structures.Weight(),
            *(norms[1].data_ptr() if queries else None, norms[0].data_ptr()),
            *(ctypes.addressof(key), ctypes.addressof(value), sizes.q_rank, sizes.kv_rank),
            *(sizes.nope_dim, sizes.rope_dim, sizes.value_dim, weights.eps),
        )
        return PackedPart((struct, key, value, *packed.further), (*packed.tensors, *norms))

    def attach(self, i: int, block: PackedBlock) -> PackedBlock:
        """Let a packed block, as block `i`, point to the rotary tables of this stack."""
        unrotated = i in self.config.unrotated_layers
        block.struct.cos, block.struct.sin = self._no_rope if unrotated else self._ropes[self.config.window_of(i) > 0]
        return block

    def run_block(
        self, block: "PackedBlock", i: int, x: Tensor, layout: structures.Layout, cache: structures.Cache
    ) -> tuple[Tensor, int]:
        """The residual stream after a packed block that is block `i` of the stack, and the number of experts that the
        block read (0: it is dense).

        Raises:
            ValueError: a token has no visible slot or lies outside the cache.
        """
        layers = (structures.Layer * (i + 1))()
        layers[i] = block.struct
        attention, mlp = (i not in skipped for skipped in self._skipped)
        layers[i].attention, layers[i].mlp = layers[i].attention and attention, layers[i].mlp and mlp
        out, count = x.clone(), c_int32(0)
        invalid = self.kernels.foretell_stack(
            *(self.model, layers, i, i + 1, out.data_ptr(), None, layout, cache, None, 0, None, ctypes.byref(count)),
            torch.get_num_threads(),
        )
        if invalid >= 0:
            raise ValueError(f"token {invalid} of the layout has no visible slot or lies outside the cache")
        return out, count.value

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

    def cache_struct(self, cache: Cache, layout: Layout | None = None) -> structures.Cache:
        """A cache as an argument of the kernels; `layout`: of the pass, for models with recurrent states."""
        states = None
        if isinstance(cache, LayeredCache):
            cache, store = cache.stores
            assert self.config.state is not None and isinstance(store, NativeStateStore) and layout is not None
            states = store.native_pass(layout, projected_width(self.config.state))
        if not isinstance(cache, NativeKVCache):
            raise ValueError("the native kernels need the cache that they lay out, a NativeKVCache")
        layers, rows, _, slots, _ = cache.k.shape
        dtype = cache_dtype(self.precision) if cache.k_scale is None else torch.int8
        least = self._store_index(len(self.layers))
        shape = (max(layers, least), rows, self._cache_heads, slots, self._head_dim)
        for side in (cache.k, cache.v):
            check_tensor(side, dtype, "the cache", *shape)
        if slots % structures.LANES:
            raise ValueError(f"the cache has {slots} slots, no multiple of {structures.LANES}")
        if states is None:
            return cache.struct
        struct = structures.Cache.from_buffer_copy(cache.struct)
        struct.states = ctypes.addressof(states.struct)
        struct.kept = states
        return struct


def _head_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Key-value heads, those of them in the cache, and their width. Latent attention has one, which serves groups of
    query heads as if it were several.
    """
    if config.latent is None:
        return config.kv_heads, config.kv_heads, config.head_dim
    groups = next(n for n in range(1, config.heads + 1) if config.heads % n == 0 and config.heads // n <= MAX_GROUP)
    return groups, 1, config.latent.kv_rank + config.latent.rope_dim
