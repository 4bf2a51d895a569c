"""Decoder blocks on the CPU kernels.

Batch-invariant: a token's result does not depend on the other tokens of the call, nor on slots, rows, chunks or
threads. Verifying a tree gives bit for bit the results of decoding one token at a time.
"""

import ctypes
from collections.abc import Collection, Iterable, Mapping, Sequence
from ctypes import c_int32
from dataclasses import fields
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from foretell.model.block.attention import query_factors
from foretell.model.block.rope import RopeTables
from foretell.model.block.spec import BlockWeights, LinearWeights
from foretell.model.cache.base import Cache, LayeredCache
from foretell.model.cache.block_table import BLOCK_SLOTS
from foretell.model.cache.layout import Layout
from foretell.model.cache.state_store import plan_stores
from foretell.model.config.attention import AttentionSizes
from foretell.model.config.model import ModelConfig
from foretell.model.kernels import build, structures
from foretell.model.kernels.block_weights import PackedBlock, pack_block, pack_update
from foretell.model.kernels.expert_cache import ExpertCache
from foretell.model.kernels.experts import supports as supports_experts
from foretell.model.kernels.kv_cache import NativeKVCache, cache_dtype, cache_kind
from foretell.model.kernels.linear import PartMemory, check_tensor
from foretell.model.kernels.packed_file import PackedPart
from foretell.model.kernels.states import NativePass, NativeStateStore, projected_width
from foretell.model.kernels.states import supports as supports_states
from foretell.model.kernels.structures import (
    ACTIVATIONS,
    LANES,
    MAX_GROUP,
    MAX_HEAD_DIM,
    NORMED_HEADS,
    UNREADABLE,
    Precision,
)


class NativeStack:
    """The blocks of a decoder, packed once; a call runs a range of them over new tokens and writes to the cache.

    Rotary tables are float32 (cos, sin), [context, rotary dimensions / 2] each, for full-attention layers and, where
    they differ, for sliding-window layers.

    Raises:
        RuntimeError: the kernels are not available here.
        ValueError: the kernels do not support the architecture.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Iterable[BlockWeights],
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
        self._ropes = {False: self._keep_rope(rope), True: self._keep_rope(local_rope or rope)}
        if config.unrotated_layers:
            self._no_rope = self._keep_rope((torch.ones_like(rope[0]), torch.zeros_like(rope[1])))
        context = min(t[0].shape[0] for t in (rope, local_rope or rope))
        if config.query_scaling is not None:
            self._query_scale = self._keep(query_factors(config.query_scaling, torch.arange(context)))
        self._store_sizes, self._places = plan_stores(config)
        rotary = {False: 2 * rope[0].shape[1], True: 2 * (local_rope or rope)[0].shape[1]}
        shapes = [
            (config.cache_sizes_of(i), rotary[config.window_of(i) > 0], config.ffn_of(i)) for i in range(config.layers)
        ]
        self._models = {
            (sizes, rotary_dim, ffn): structures.make(
                structures.Model,
                hidden=config.hidden,
                heads=config.heads,
                kv_heads=_groups(sizes),
                head_dim=sizes.head_dim,
                rotary_dim=rotary_dim,
                ffn=ffn,
                context=context,
                cache_heads=sizes.kv_heads,
                cache_kind=cache_kind(precision),
                activation=ACTIVATIONS.index(config.activation),
                eps=config.norm_eps,
                scale=config.scale,
                softcap=config.attention_softcap,
                residual_scale=config.residual_scale,
                qk_norm_over=NORMED_HEADS.index(config.qk_norm_over),
                parallel=config.parallel_blocks,
                centered=config.centered,
            )
            for sizes, rotary_dim, ffn in shapes
        }
        self._shapes = shapes
        self.model = self._models[shapes[0]]
        """Sizes of the first block, and of all where `uniform`."""
        self.uniform = len(self._models) == 1 and not config.kv_layers
        """Whether all blocks have the same sizes and their own keys and values, so that one call can run them."""
        self._set_blocks([self.pack_block(i, block) for i, block in enumerate(blocks)])
        self._skipped: tuple[Collection[int], Collection[int]] = (), ()
        self._checked = dict[int, structures.Cache]()
        """The caches that passed the last checks, by store."""
        self._further: tuple[PackedPart, ...] = ()
        """What there is beside the blocks of the model, kept alive here; see `followed_by` and `with_updates`."""

    expert_cache: ExpertCache | None = None
    """Where the experts are; None: in the blocks."""

    def _segments(self, first: int, last: int) -> list[tuple[int, int]]:
        """Ranges of blocks of the same sizes."""
        if self.uniform:
            return [(first, last)]
        cuts = [i for i in range(first + 1, last) if self._shapes[i] != self._shapes[i - 1]]
        return list(pairwise([first, *cuts, last]))

    def _set_blocks(self, blocks: Sequence[PackedBlock]) -> None:
        self.blocks = blocks
        self.layers = (structures.Layer * len(blocks))(*(block.struct for block in blocks))

    def with_blocks(self, blocks: Sequence[PackedBlock]) -> "NativeStack":
        """A stack of packed blocks with the rotary tables of this one."""
        other = self._sharing(self.layers)
        other._set_blocks(blocks)
        return other

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels support this architecture: sequential blocks with rotary positions."""
        plain = not config.learned_positions
        plain = plain and (config.state is None or supports_states(config.state))
        if config.experts is not None:
            plain = plain and (config.experts.beside_dense or not config.post_norms) and config.pre_norms
            plain = plain and not config.parallel_blocks
            plain = plain and supports_experts(config.experts)
        plain = plain and config.gated == (config.activation != "relu2")
        plain = plain and config.activation in ACTIVATIONS and config.rope is not None
        return plain and all(
            sizes.head_dim % LANES == 0
            and sizes.head_dim <= MAX_HEAD_DIM
            and sizes.heads // _groups(sizes) <= MAX_GROUP
            for sizes in plan_stores(config)[0]
        )

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
        routes: list[Tensor] | None = None,
        layer_inputs: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """As a call, but returns the residual stream before every block of `hidden_layers`, ascending, and then the
        result. `routes` is extended by the experts of every token, int32 [t, k], of every mixture-of-experts layer.
        `layer_inputs`: per-layer inputs, [t, numbers of all layers]; None: the model has none.

        Raises:
            ValueError: as a call, or `hidden_layers` names a block that does not run.
        """
        layout_struct = self.layout_struct(x.shape[0], layout, layer_inputs)
        caches = self.cache_structs(cache, layout)
        check_tensor(x, torch.float32, "x", x.shape[0], self.config.hidden)
        if not 0 <= first <= last <= len(self.layers):
            raise ValueError(f"blocks {first} to {last} were asked for, but there are {len(self.layers)}")
        if not all(a < b for a, b in pairwise([first - 1, *hidden_layers, last])):
            raise ValueError(f"hidden_layers must ascend from {first} to less than {last}, found {list(hidden_layers)}")
        out = torch.empty(len(hidden_layers) + 1, *x.shape)
        out[-1] = x
        if attention_input is not None:
            check_tensor(attention_input, torch.float32, "attention_input", x.shape[0], self.layers[first].qkv.inputs)
        route_buffer = None if routes is None else self.new_routes(last - first, x.shape[0])
        for begin, end in self._segments(first, last):
            recorded = [i for i in hidden_layers if begin <= i < end]
            states = out[sum(i < begin for i in hidden_layers) :]
            given = attention_input if begin == first else None
            route = None if route_buffer is None else route_buffer[begin - first :]
            invalid = self._run(self.layers, begin, end, out[-1], layout_struct, caches, route, given, recorded, states)
            self.check_result(invalid, layout, self._model_and_cache(begin, caches)[1])
        if route_buffer is not None and routes is not None:
            routes += routes_of_layers(route_buffer)
        return out.unbind()

    def _run(
        self,
        layers: "ctypes.Array[structures.Layer]",
        first: int,
        last: int,
        x: Tensor,
        layout: structures.Layout,
        caches: Sequence[structures.Cache],
        routes: Tensor | None,
        attention_input: Tensor | None = None,
        recorded: Sequence[int] = (),
        states: Tensor | None = None,
    ) -> int:
        """Run blocks of the same sizes on the residual stream, in place; the kernel's return value."""
        model, cache = self._model_and_cache(first, caches)
        pointers = (None if each is None else each.data_ptr() for each in (attention_input, states, routes))
        given, recorded_to, routes_to = pointers
        result: int = self.kernels.foretell_stack(
            model, layers, first, last, x.data_ptr(), given, layout, cache, (c_int32 * len(recorded))(*recorded),
            len(recorded), recorded_to, routes_to, torch.get_num_threads(),
        )  # fmt: skip
        return result

    def new_routes(self, layers: int, tokens: int) -> Tensor | None:
        """Where the kernels write the experts of the tokens of so many layers, [layers, tokens, experts], -1; None: the
        model is dense.
        """
        experts = self.config.experts
        return None if experts is None else torch.full((layers, tokens, experts.active), -1, dtype=torch.int32)

    def _model_and_cache(self, i: int, caches: Sequence[structures.Cache]) -> tuple[structures.Model, structures.Cache]:
        """The sizes of block `i`, and its cache of keys and values."""
        if len(caches) == 1:
            return self._models[self._shapes[i]], caches[0]
        return self._models[self._shapes[i]], caches[self._places[i][0]]

    def check_result(self, invalid: int, layout: Layout, cache: structures.Cache) -> None:
        """Check a kernel's return value: -1, or the index of an invalid token.

        Raises:
            ValueError: that token has no visible slot or lies outside the cache.
            OSError: weights could not be read from their file.
        """
        self.check_readable(invalid)
        if invalid < 0:
            return
        columns = {f.name: getattr(layout, f.name) for f in fields(layout) if f.name != "queries"}
        where = ", ".join(f"{name} {column[invalid]}" for name, column in columns.items() if column is not None)
        raise ValueError(
            f"token {invalid} of the layout has no visible slot or lies outside the blocks of its row, the "
            f"{cache.rows} rows of the cache or the {self.model.context} positions: {where}"
        )

    def check_readable(self, result: int) -> None:
        """Raise what kept a pass from reading experts, if a kernel's return value says that something did.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged.
        """
        if result == UNREADABLE and self.expert_cache is not None:
            self.expert_cache.raise_error()

    def with_updates(self, updates: Sequence[Mapping[str, LinearWeights]]) -> "NativeStack":
        """The blocks with updates of low rank, by block and by the path of their linear layer; all else is shared."""
        layers, memory = type(self.layers).from_buffer_copy(self.layers), PartMemory(self.kernels)
        for layer, own in zip(layers, updates, strict=True):
            for path, update in own.items():
                pack_update(layer, path, update, memory)
        other = self._sharing(layers)
        other._further = (*self._further, PackedPart(tuple(memory.structs), memory.tensors))
        return other

    def without_sublayers(
        self, attention: Collection[int], mlp: Collection[int], config: ModelConfig | None = None
    ) -> "NativeStack":
        """The blocks without some sub-layers, sharing the packed weights; `config`: of a decoder of the first ones."""
        layers = type(self.layers).from_buffer_copy(self.layers)
        for i, layer in enumerate(layers):
            layer.attention, layer.mlp = layer.attention and i not in attention, layer.mlp and i not in mlp
        other = self._sharing(layers, config)
        other._skipped = attention, mlp
        return other

    @cached_property
    def keys_only(self) -> "NativeStack":
        """The blocks reduced to storing the keys and values of their input, which stays as it is."""
        layers = type(self.layers).from_buffer_copy(self.layers)
        for layer in layers:
            layer.attention, layer.mlp, layer.scale = structures.KEYS_ONLY * bool(layer.attention), 0, 0
            layer.input_gate = layer.attention_shortcut = layer.mlp_shortcut = structures.Weight()
        return self._sharing(layers)

    @cached_property
    def injecting(self) -> "NativeStack":
        """`keys_only` without the norm before the attention: keys and values are made of the input itself."""
        other = self.keys_only._sharing(type(self.layers).from_buffer_copy(self.keys_only.layers))
        for layer in other.layers:
            layer.attention_norm = None
        return other

    def _forget_derived(self) -> None:
        """Forget the reduced stacks and the checked caches of the one that this is a copy of."""
        self._checked = {}
        for name in ("keys_only", "injecting"):
            self.__dict__.pop(name, None)

    def first_layers(self, layers: int) -> "NativeStack":
        """The first `layers` blocks, sharing the packed weights; the cache needs at least as many layers."""
        if not 1 <= layers <= len(self.layers):
            raise ValueError(f"the first {layers} blocks were asked for, but there are {len(self.layers)}")
        return self._sharing((structures.Layer * layers)(*self.layers[:layers]), self.config.of_layers(range(layers)))

    def followed_by(self, layers: int, blocks: Sequence[PackedBlock], place: int) -> "NativeStack":
        """The first `layers` blocks, and after them others, whose keys and values are layers `place, place + 1, …` of
        the cache. For uniform stacks.
        """
        other = self._sharing((structures.Layer * (layers + len(blocks)))(*self.layers[:layers]))
        for i, block in enumerate(blocks):
            other.layers[layers + i] = block.struct
            other.layers[layers + i].store = place + i
        other._further = (*self._further, *blocks)
        return other

    def _sharing(self, layers: "ctypes.Array[structures.Layer]", config: ModelConfig | None = None) -> "NativeStack":
        """A stack of other structures of the same packed weights; `config`: theirs, None: that of this one."""
        other = object.__new__(NativeStack)
        other.__dict__.update(self.__dict__)
        other._forget_derived()
        other.layers = layers
        if config is not None:
            other.config, (other._store_sizes, other._places) = config, plan_stores(config)
        return other

    def pack_block(self, i: int, block: BlockWeights) -> "PackedBlock":
        """Pack a block as block `i` of this stack. Its rotary tables live as long as the stack."""
        return self.attach(i, pack_block(self.config, i, block, self.precision, self.kernels))

    def attach(self, i: int, block: PackedBlock) -> PackedBlock:
        """Give a packed block, as block `i`, its place in the cache, and the rotary tables of this stack."""
        unrotated = i in self.config.unrotated_layers
        block.struct.store = self._places[i][1] if i in self._places else 0
        block.struct.cos, block.struct.sin = self._no_rope if unrotated else self._ropes[self.config.window_of(i) > 0]
        if self.config.query_scaling_of(i) is not None:
            block.struct.query_scale = self._query_scale
        return block

    def run_block(
        self, block: "PackedBlock", i: int, x: Tensor, layout: structures.Layout, caches: Sequence[structures.Cache]
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after a packed block that is block `i` of the stack, and the experts of every token
        (None: it is dense).

        Raises:
            ValueError: a token has no visible slot or lies outside the cache.
        """
        layers = (structures.Layer * (i + 1))()
        layers[i] = block.struct
        attention, mlp = (i not in skipped for skipped in self._skipped)
        layers[i].attention, layers[i].mlp = layers[i].attention and attention, layers[i].mlp and mlp
        out, routes = x.clone(), self.new_routes(1, len(x))
        invalid = self._run(layers, i, i + 1, out, layout, caches, routes)
        self.check_readable(invalid)
        if invalid >= 0:
            raise ValueError(f"token {invalid} of the layout has no visible slot or lies outside the cache")
        return out, next(iter(() if routes is None else routes_of_layers(routes)), None)

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor as long as the stack lives; returns its address."""
        self._tensors.append(tensor.contiguous())
        return self._tensors[-1].data_ptr()

    def _keep_rope(self, tables: RopeTables) -> tuple[int, int]:
        for table in tables:
            check_tensor(table, torch.float32, "a rotary table", table.shape[0], tables[0].shape[1])
        return self._keep(tables[0]), self._keep(tables[1])

    def layout_struct(self, t: int, layout: Layout, layer_inputs: Tensor | None = None) -> structures.Layout:
        """A layout of `t` tokens, and their per-layer inputs, as an argument of the kernels."""
        width = layout.extra_slots.shape[-1]
        columns = (layout.row, layout.slot, layout.position, layout.visible_prefix)
        for column in columns:
            check_tensor(column, torch.int32, "the layout", t)
        check_tensor(layout.extra_slots, torch.int32, "the layout's extra slots", t, width)
        struct = structures.Layout(
            count=t,
            max_extra_slots=width,
            row=layout.row.data_ptr(),
            slot=layout.slot.data_ptr(),
            position=layout.position.data_ptr(),
            visible_prefix=layout.visible_prefix.data_ptr(),
            extra_slots=layout.extra_slots.data_ptr(),
        )
        if layout.in_pages is not None:
            check_tensor(layout.in_pages, torch.int32, "the layout", t)
            struct.in_pages = layout.in_pages.data_ptr()
        if layout.window_end is not None:
            check_tensor(layout.window_end, torch.int32, "the layout", t)
            struct.window_end = layout.window_end.data_ptr()
        if layout.queries is not None:
            if not self.uniform:
                raise ValueError("queries are recorded of models whose layers have the same sizes only")
            shape = self.config.layers, t, self.config.heads, self.config.head_dim
            check_tensor(layout.queries, torch.float32, "the queries", *shape)
            struct.queries = layout.queries.data_ptr()
        if self.config.layer_inputs is not None:
            if layer_inputs is None:
                raise ValueError("the per-layer inputs of the tokens are missing")
            check_tensor(layer_inputs, torch.float32, "layer_inputs", t, layer_inputs.shape[-1])
            struct.layer_inputs, struct.input_width = layer_inputs.data_ptr(), layer_inputs.shape[-1]
            struct.kept = layer_inputs
        return struct

    def cache_struct(self, cache: Cache) -> structures.Cache:
        """The cache of blocks that share one, as an argument of the kernels."""
        return self.cache_structs(cache)[0]

    def cache_structs(self, cache: Cache, layout: Layout | None = None) -> list[structures.Cache]:
        """The stores of keys and values of a cache as arguments of the kernels; `layout`: of the pass, for models with
        recurrent states.
        """
        states, stores = None, [cache]
        if isinstance(cache, LayeredCache):
            stores = list(cache.stores)
        if self.config.state is not None:
            store = stores.pop()
            assert isinstance(store, NativeStateStore) and layout is not None
            states = store.native_pass(layout, projected_width(self.config.state))
        return [self._store_struct(i, store, states) for i, store in enumerate(stores)]

    def _least_layers(self, store: int) -> int:
        """How many layers the blocks need in a store of keys and values."""
        if self.uniform and self.config.state is None:
            return len(self.layers)
        within = (index for j, (of, index) in self._places.items() if of == store and j < len(self.layers))
        return 1 + max(within, default=-1)

    def _store_struct(self, i: int, cache: Cache, states: NativePass | None) -> structures.Cache:
        if not isinstance(cache, NativeKVCache):
            raise ValueError("the native kernels need the cache that they lay out, a NativeKVCache")
        if states is None and self._checked.get(i) is cache.struct:
            return cache.struct
        layers, _, blocks, _, _ = cache.k.shape
        dtype = cache_dtype(self.precision) if cache.k_scale is None else torch.int8
        sizes = self._store_sizes[i]
        stored = sizes.head_dim // (cache.head_dim // cache.k.shape[-1])
        shape = (max(layers, self._least_layers(i)), sizes.kv_heads, blocks, BLOCK_SLOTS, stored)
        for side in (cache.k, cache.v):
            check_tensor(side, dtype, "the cache", *shape)
        if states is None:
            self._checked[i] = cache.struct
            return cache.struct
        struct = structures.Cache.from_buffer_copy(cache.struct)
        struct.states = ctypes.addressof(states.struct)
        struct.kept = states
        return struct


def routes_of_layers(routes: Tensor) -> list[Tensor]:
    """Of what `NativeStack.new_routes` became, the layers that have experts."""
    return [layer for layer in routes if layer.numel() and int(layer[0, 0]) >= 0]


def _groups(sizes: AttentionSizes) -> int:
    """Groups of query heads that the kernels serve together: one per key-value head, but a single key-value head serves
    groups of at most `MAX_GROUP`.
    """
    if sizes.kv_heads > 1:
        return sizes.kv_heads
    return next(n for n in range(1, sizes.heads + 1) if sizes.heads % n == 0 and sizes.heads // n <= MAX_GROUP)
