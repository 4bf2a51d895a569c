"""The decoder on the CPU kernels."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_int32
from dataclasses import replace
from functools import cache as memoize

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import ModelOutput, count_experts
from foretell.core.tree import NodeMask, TokenTree
from foretell.model.block.backend import Backend
from foretell.model.block.decoder import BlockForward, BlockOutput, BlockRange, Decoder, SkipSet, bound_logits
from foretell.model.block.layer import DecoderBlock, RMSNorm
from foretell.model.block.modules import to_weights
from foretell.model.block.sparsity import NeuronRule, PredictedNeurons, check_sparse
from foretell.model.block.spec import BlockWeights, LinearWeights
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.cache.pages import page_policy
from foretell.model.cache.state_store import build_cache
from foretell.model.config.model import ModelConfig
from foretell.model.kernels import build, numbers, structures
from foretell.model.kernels.block_weights import PackedBlock
from foretell.model.kernels.dynamic_tree import DynamicTrees
from foretell.model.kernels.embedding import NativeEmbedding
from foretell.model.kernels.kv_cache import NativeKVCache
from foretell.model.kernels.layer_inputs import NativeLayerInputs
from foretell.model.kernels.linear import NativeLinear, check_tensor
from foretell.model.kernels.placed_neurons import FileReads
from foretell.model.kernels.row_ops import rms_norm
from foretell.model.kernels.sparse import NeuronCounts, SparseBlocks
from foretell.model.kernels.stack import NativeStack, routes_of_layers
from foretell.model.kernels.states import NativeStateStore
from foretell.model.kernels.structures import Precision
from foretell.model.matrices.stored import StoredMatrix


class NativeDecoder:
    """A torch decoder packed for the CPU kernels. Implements `Network`; without blocks `BlocklessNetwork`.

    Raises:
        RuntimeError: the kernels are not available here.
        ValueError: the kernels do not support the architecture.
    """

    device = torch.device("cpu")
    sparsity = ""
    """How tokens choose their neurons; see `Backend.sparsity`."""
    neuron_counts: NeuronCounts | None = None
    """What layers that read a part of their neurons have read; None: the network is dense."""
    head_counts: NeuronCounts | None = None
    """The same of query heads."""
    file_reads: FileReads | None = None
    """What was read from the file of neurons; None: all weights are in memory."""

    def __init__(self, decoder: Decoder, precision: Precision) -> None:
        head, table = decoder.head, decoder.embedding.detach()
        blocks, ropes = map(to_weights, decoder.blocks), (decoder.rope_tables, decoder.local_rope_tables)
        stack = NativeStack(decoder.config, blocks, precision, *ropes)
        packed = NativeLinear(head.weight, head.bias, precision)
        tied = head.weight.data_ptr() == table.data_ptr()
        source = packed if tied and packed.holds_floats else StoredMatrix.of(table)
        dtype = torch.bfloat16 if table.dtype == torch.bfloat16 else torch.float32
        own, inputs = decoder.layer_inputs, None
        if own is not None:
            assert isinstance(own.norm, RMSNorm)
            inputs = NativeLayerInputs(
                NativeEmbedding(StoredMatrix.of(own.table), dtype, 1.0),
                NativeLinear(own.projection.weight, None, precision),
                own.norm.weight.detach(),
                own.norm.eps,
            )
        self._assemble(
            decoder.config,
            NativeEmbedding(source, dtype, decoder.config.embedding_scale),
            stack,
            decoder.norm.weight.detach(),
            packed,
            inputs,
        )

    @classmethod
    def of_parts(
        cls,
        config: ModelConfig,
        embedding: NativeEmbedding,
        stack: NativeStack,
        norm: Float[torch.Tensor, " d"],
        head: NativeLinear,
        layer_inputs: NativeLayerInputs | None = None,
    ) -> "NativeDecoder":
        """A decoder of packed parts; `norm` is the final norm's weight, its offset included."""
        made = object.__new__(cls)
        made._assemble(config, embedding, stack, norm, head, layer_inputs)
        return made

    def _assemble(
        self,
        config: ModelConfig,
        embedding: NativeEmbedding,
        stack: NativeStack,
        norm: Float[torch.Tensor, " d"],
        head: NativeLinear,
        layer_inputs: NativeLayerInputs | None,
    ) -> None:
        self.config, self.precision, self.layer_inputs = config, head.precision, layer_inputs
        self.embedding, self.stack, self.norm, self.head = embedding, stack, norm, head
        self.bounds_logits = bool(config.logit_softcap) or config.logit_scale != 1
        """Whether logits are not the outputs of the head; some that differ are then rounded to the same number, so that
        the argmax of the outputs is not theirs.
        """

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels run this architecture."""
        return NativeStack.supports(config)

    def new_cache(self) -> Cache:
        """An empty cache for this network."""
        c = self.config
        return build_cache(
            c,
            lambda layers, s: NativeKVCache(
                layers, s.kv_heads, s.head_dim, self.precision, c.cache_dtype, c.page_budget
            ),
            lambda layers, shape: NativeStateStore(layers, shape, torch.float32, self.device),
        )

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block, float32."""
        return self.embedding(token)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks."""
        routes = list[torch.Tensor]()
        inputs = self._layer_inputs(layout)
        states = self.stack.run(x, layout, cache, *blocks, routes=routes, layer_inputs=inputs)
        return BlockOutput(states, tuple(routes))

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write the keys and values of blocks whose input is `x`, all of them; see `Network.write_keys`."""
        self.stack.keys_only.run(x, layout, cache, *blocks[:2])

    def _layer_inputs(self, layout: Layout) -> Float[torch.Tensor, "t lw"] | None:
        """The per-layer inputs of the tokens of a pass."""
        if self.layer_inputs is None:
            return None
        if layout.token is None:
            raise ValueError("per-layer inputs need the tokens of the pass, which are missing")
        return self.layer_inputs(layout.token, self.embedding(layout.token))

    def final_norm(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """The final norm, from the last block's output to the input of the head."""
        return rms_norm(x, self.norm, self.config.norm_eps)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits."""
        return bound_logits(self.config, self.head(x))

    @property
    def forwards_trees(self) -> bool:
        """Whether a pass over trees is one call; models with recurrent states or per-layer inputs need its layout in
        Python, and layers of different sizes a call each.
        """
        return not self.config.state_layers and self.layer_inputs is None and self.stack.uniform

    def forward_tree(
        self,
        tree: TokenTree,
        rows: Sequence[int],
        length: Sequence[int],
        cache: Cache,
        active: NodeMask,
        scored: NodeMask,
        hidden_layers: tuple[int, ...],
        sampling: Sequence[structures.Sampling] = (),
    ) -> ModelOutput:
        """Run the active nodes of a tree from tokens to logits in one call; see `TreeNetwork.forward_tree`.

        Raises:
            ValueError: a node is outside the cache or the context.
        """
        stack, width, layers = self.stack, self.head.outputs, self.config.layers
        (b, n), size = tree.token.shape, tree.token.size
        samples = bool(sampling) and not self.bounds_logits
        work, at = numbers.zeros((8 if samples else 6) * size + 3 * b)
        nodes, requests = work[: 5 * size].reshape(5, b, n), work[5 * size : 5 * size + 3 * b].reshape(3, b)
        nodes[0], nodes[1], nodes[2] = tree.parent, active, scored
        requests[0], requests[1], requests[2] = tree.prefix_length, rows, length
        row_at, argmax_at = at + 40 * size, at + 40 * size + 24 * b
        token_at, ways = argmax_at + 8 * size, (structures.Sampling * b)(*sampling) if samples else None
        if samples:
            work[6 * size + 3 * b : 7 * size + 3 * b] = tree.token.ravel()
        pass_struct = structures.TreePass(
            requests=b,
            nodes=n,
            parent=at,
            active=at + 8 * size,
            scored=at + 16 * size,
            prefix_length=row_at,
            row=row_at + 8 * b,
            length=row_at + 16 * b,
            hidden_index=at + 24 * size,
            logit_index=at + 32 * size,
            argmax=argmax_at,
            sampling=None if ways is None else addressof(ways),
            token=token_at,
            sampled=token_at + 8 * size,
        )
        recorded, recorded_count, place = _recorded_layers(hidden_layers, layers)
        tokens = int(np.count_nonzero(active))
        count = tokens if scored is active else int(np.count_nonzero(scored & active))
        norm_all = layers + 1 in hidden_layers
        # Arrays: between two passes each function of torch takes up to 30 µs.
        memory = np.empty((recorded_count + 2, tokens, self.config.hidden), np.float32)
        self.embedding.write(tree.token[active], memory[recorded_count])
        states, logits = torch.from_numpy(memory), torch.from_numpy(np.empty((count, width), np.float32))
        by_layer = states.unbind() if place else ()
        route_buffer, states_at = stack.new_routes(len(stack.layers), tokens), states.data_ptr()
        # Made before the pass: after it, the code for this has left the processor's caches.
        output = ModelOutput(
            logits,
            nodes[4],
            tuple(by_layer[i] for i in place),
            nodes[3],
            argmax=None if self.bounds_logits else work[5 * size + 3 * b :][:count],
            sampled=work[7 * size + 3 * b :].reshape(b, n) if samples else None,
        )
        invalid = stack.kernels.foretell_tree_pass(
            stack.model,
            stack.layers,
            len(stack.layers),
            self.head.struct,
            width,
            self.norm.data_ptr(),
            pass_struct,
            stack.cache_struct(cache),
            recorded,
            recorded_count,
            states_at,
            states_at + 4 * tokens * self.config.hidden * (recorded_count + 1),
            not norm_all,
            logits.data_ptr(),
            None if route_buffer is None else route_buffer.data_ptr(),
            torch.get_num_threads(),
        )
        stack.check_readable(invalid)
        if invalid >= 0:
            raise ValueError(
                f"token {invalid} of the pass lies outside the blocks of its row or the {stack.model.context} positions"
            )
        if route_buffer is None and not self.bounds_logits:
            return output
        routes = () if route_buffer is None else tuple(layer.numpy() for layer in routes_of_layers(route_buffer))
        return replace(output, logits=bound_logits(self.config, logits), experts=count_experts(routes), routes=routes)

    @property
    def backend(self) -> Backend:
        """The kernels, as this machine compiled them."""
        instructions = build.library().foretell_instructions().decode()
        return Backend(
            "native",
            "cpu",
            self.precision,
            instructions,
            batch_invariant=not self.config.page_budget,  # tokens of a chunk read all pages
            cache_dtype=self.config.cache_dtype,
            cache_policy=page_policy(self.config),
            sparsity=self.sparsity,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of embedding, norm and head."""
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.nbytes
        return int(self.embedding.nbytes + self.norm.nbytes + self.head.nbytes) + inputs

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights that a pass reads: the blocks and the head."""
        return self.head.nbytes + sum(block.nbytes for block in self.stack.blocks)

    def with_blocks(self, blocks: Sequence[PackedBlock]) -> "NativeDecoder":
        """The decoder of these packed blocks with this embedding, norm and head."""
        return self._sharing(self.config, self.stack.with_blocks(blocks))

    def block_forward(self, layout: Layout, cache: Cache) -> BlockForward[PackedBlock]:
        """The forward pass of a block over this layout and cache."""
        stack, tokens, memory = (
            self.stack,
            self.stack.layout_struct(layout.token_count, layout, self._layer_inputs(layout)),
            self.stack.cache_structs(cache, layout),
        )
        return lambda block, i, x: stack.run_block(block, i, x, tokens, memory)

    def without_blocks(self, config: ModelConfig, skip: SkipSet) -> "NativeDecoder":
        """The same embedding, norm and head for another configuration of the blocks."""
        return self._sharing(config, self.stack.without_sublayers(skip.attention, skip.mlp, config))

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether the kernel applies; it does not support a soft cap on logits, nor a factor, nor recurrent states, nor
        what `forwards_trees` does not support.
        """
        plain = not self.config.logit_softcap and self.config.logit_scale == 1 and self.config.state is None
        return plain and self.forwards_trees

    def grow_dynamic_trees(
        self,
        roots: Float[torch.Tensor, "b d"],
        trees: DynamicTrees,
        cache: Cache,
        token_of: Int[torch.Tensor, " v"] | None = None,
    ) -> None:
        """Grow trees below roots whose last layer's outputs are given; their keys are cached after the requests' own.

        `token_of`: the token of every row of the head; None: the row's index.

        Raises:
            ValueError: the cache has no room for the trees.
        """
        stack = self.stack
        check_tensor(roots, torch.float32, "roots", trees.struct.requests, self.config.hidden)
        memory = stack.cache_struct(cache)
        invalid = build.library().foretell_decoder_trees(
            stack.model,
            stack.layers,
            len(stack.layers),
            self.embedding.struct,
            self.head.struct,
            self.norm.data_ptr(),
            None if token_of is None else token_of.data_ptr(),
            roots.data_ptr(),
            trees.struct,
            memory,
            torch.get_num_threads(),
        )
        stack.check_readable(invalid)
        trees.check_result(invalid, stack.model.context)

    def first_layers(self, layers: int) -> "NativeDecoder":
        """The first `layers` blocks with the same norm and head, sharing all weights."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return self._sharing(self.config.of_layers(range(layers)), self.stack.first_layers(layers))

    def followed_by(self, layers: int, blocks: Sequence[DecoderBlock], place: int) -> "NativeDecoder":
        """The first `layers` blocks, and after them others of the same sizes, packed in this decoder's precision; see
        `NativeStack.followed_by`.

        Raises:
            ValueError: the blocks of this decoder have several sizes.
        """
        if not self.stack.uniform:
            raise ValueError("blocks of an exit need a model whose layers have the same sizes")
        packed = [self.stack.pack_block(layers, to_weights(block)) for block in blocks]
        config = replace(self.config.of_layers(range(layers)), layers=layers + len(blocks))
        return self._sharing(config, self.stack.followed_by(layers, packed, place))

    def with_head(self, norm: Float[torch.Tensor, " d"], head: NativeLinear) -> "NativeDecoder":
        """The same blocks with another final norm and head."""
        other = self._sharing(self.config, self.stack)
        other.norm, other.head = norm, head
        return other

    def without_sublayers(self, skip: SkipSet) -> "NativeDecoder":
        """The network without some sub-layers, sharing all weights."""
        return self._sharing(self.config, self.stack.without_sublayers(skip.attention, skip.mlp))

    def with_updates(self, updates: Sequence[Mapping[str, LinearWeights]]) -> "NativeDecoder":
        """The network with an adapter, which shares all weights: updates of low rank by block and by the path of their
        linear layer in `BlockWeights`. The parts of an update are its second factor, by the rows of the layer.
        """
        return self._sharing(self.config, self.stack.with_updates(updates))

    def with_rules(
        self, rules: Sequence[NeuronRule], read_block: Callable[[int], BlockWeights] | None = None, label: str = ""
    ) -> "NativeDecoder":
        """The decoder whose layers read the neurons that their rules choose; `neuron_counts` counts them. It shares all
        other weights; `read_block(i)` reads those of block `i` again, which are then packed another time, by row
        (None: the rules are all `FirstNeurons`, which need no others). `label`: see `Backend.sparsity`.

        Raises:
            ValueError: see `foretell.model.block.sparsity.check_sparse`; or the kernels cannot read so many neurons.
        """
        check_sparse(self.config, rules)
        units = [rule.unit for rule in rules if isinstance(rule, PredictedNeurons)]
        made = SparseBlocks(self.stack, read_block, max(units, default=1))
        other = self.with_blocks([made.make(i, rule) for i, rule in enumerate(rules)])
        other.neuron_counts, other.head_counts, other.sparsity = made.counts, made.head_counts, label
        return other

    def _sharing(self, config: ModelConfig, stack: NativeStack) -> "NativeDecoder":
        other = object.__new__(NativeDecoder)
        other.__dict__.update(self.__dict__)
        other.config, other.stack = config, stack
        return other


@memoize
def _recorded_layers(hidden_layers: tuple[int, ...], layers: int) -> tuple[object, int, tuple[int, ...]]:
    """For the layers whose hidden states are wanted: those to record before a block, as an argument of the kernels, and
    their number; and the place of every wanted state among these, the last block's output, and its norm.
    """
    before = [i for i in sorted(set(hidden_layers)) if i < layers]
    order = [*before, layers, layers + 1]
    return (c_int32 * len(before))(*before), len(before), tuple(order.index(i) for i in hidden_layers)
