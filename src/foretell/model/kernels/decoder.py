"""The decoder on the CPU kernels."""

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import replace
from functools import cache as memoize

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import nn

from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.backend import Backend
from foretell.model.config import ModelConfig
from foretell.model.decoder import (
    BlockForward,
    BlockOutput,
    BlockRange,
    Decoder,
    DecoderBlock,
    FeedForward,
    RMSNorm,
    SkipSet,
)
from foretell.model.kernels import build, structures
from foretell.model.kernels.dynamic_tree import DynamicTrees
from foretell.model.kernels.linear import NativeLinear, check_tensor, pack_embedding
from foretell.model.kernels.row_ops import rms_norm
from foretell.model.kernels.stack import BlockWeights, NativeStack, PackedBlock
from foretell.model.kernels.structures import Precision
from foretell.model.kv_cache import KVCache
from foretell.model.layout import Layout


def block_weights(block: nn.Module) -> BlockWeights:
    """The weights of a block of the torch decoder."""
    assert isinstance(block, DecoderBlock) and isinstance(block.mlp, FeedForward)
    gate, up = block.mlp.gate_up.weight.chunk(2)
    return BlockWeights(
        attention_norm=block.attention_norm.weight,
        qkv=[block.qkv.weight],
        qkv_bias=block.qkv.bias,
        q_norm=_weight(block.q_norm),
        k_norm=_weight(block.k_norm),
        output=block.output.weight,
        output_bias=block.output.bias,
        mlp_norm=block.mlp_norm.weight,
        gate=gate,
        up=up,
        down=block.mlp.down.weight,
        post_attention_norm=_weight(block.post_attention_norm),
        post_mlp_norm=_weight(block.post_mlp_norm),
    )


def _weight(norm: RMSNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


class NativeDecoder:
    """A torch decoder packed for the CPU kernels. Implements `Network`; without blocks `BlocklessNetwork`.

    Raises:
        RuntimeError: the kernels are not available here.
        ValueError: the kernels do not support the architecture.
    """

    device = torch.device("cpu")

    def __init__(self, decoder: Decoder, precision: Precision) -> None:
        self.config, self.precision = decoder.config, precision
        self._embedding = decoder.embedding.detach()
        self._norm = decoder.norm.weight.detach()
        # The decoder's norm weights include the offset already.
        config = replace(decoder.config, norm_offset=0.0)
        self._stack = NativeStack(
            config,
            [block_weights(b) for b in decoder.blocks],
            precision,
            decoder.rope_tables,
            decoder.local_rope_tables,
        )
        self._head = NativeLinear(decoder.head.weight, decoder.head.bias, precision)
        tied = decoder.head.weight.data_ptr() == self._embedding.data_ptr()
        self._embeds_from_head = tied and not decoder.blocks and precision != "int8"
        """Without blocks memory is limited: a tied embedding is read from the packed head, not kept twice."""
        if self._embeds_from_head:
            self._embedding = self._embedding.new_empty(0, decoder.config.hidden)
        self._table, self._embedding_struct = pack_embedding(self._embedding, decoder.config.embedding_scale)

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels run this architecture."""
        return NativeStack.supports(config)

    def new_cache(self) -> KVCache:
        """An empty cache for this network."""
        c = self.config
        return KVCache(
            c.layers,
            c.kv_heads,
            c.head_dim,
            torch.float32 if self.precision == "float32" else torch.bfloat16,
            self.device,
        )

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block, float32."""
        x = self._head.gather_rows(token) if self._embeds_from_head else self._embedding.index_select(0, token).float()
        return x if self.config.embedding_scale == 1 else x * self.config.embedding_scale

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks."""
        return BlockOutput(self._stack.run(x, layout, cache, *blocks))

    def final_norm(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """The final norm, from the last block's output to the input of the head."""
        return rms_norm(x, self._norm, self.config.norm_eps)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token logits."""
        out = self._head(x)
        cap = self.config.logit_softcap
        return torch.tanh(out / cap) * cap if cap else out

    def forward_tree(
        self,
        tree: TokenTree,
        rows: Sequence[int],
        length: Sequence[int],
        cache: KVCache,
        active: Bool[np.ndarray, "b n"],
        scored: Bool[np.ndarray, "b n"],
        hidden_layers: tuple[int, ...],
    ) -> ModelOutput:
        """Run the active nodes of a tree from tokens to logits in one call; see `Runner.forward`.

        Raises:
            ValueError: a token is outside the vocabulary, or a node outside the cache or the context.
        """
        stack, width, layers = self._stack, self._head.outputs, self.config.layers
        (b, n), size = tree.token.shape, tree.token.size
        work = np.empty(7 * size + 3 * b, np.int64)
        nodes = work[: 6 * size].reshape(6, b, n)
        nodes[0], nodes[1], nodes[2], nodes[3] = tree.token, tree.parent, active, scored
        requests = work[6 * size : 6 * size + 3 * b].reshape(3, b)
        requests[0], requests[1], requests[2] = tree.prefix_length, rows, length
        at, per_request = work.ctypes.data, work.ctypes.data + 48 * size
        inputs = (*(at + 8 * size * i for i in range(4)), *(per_request + 8 * b * i for i in range(3)))
        outputs = at + 32 * size, at + 40 * size, per_request + 24 * b
        pass_struct = structures.TreePass(b, n, *inputs, *outputs)
        recorded, recorded_count, place = _recorded_layers(hidden_layers, layers)
        tokens = int(np.count_nonzero(active))
        count = tokens if scored is active else int(np.count_nonzero(scored & active))
        norm_all = layers + 1 in hidden_layers
        states = torch.empty(recorded_count + 1 + norm_all, tokens, self.config.hidden)
        normed = states[-1] if norm_all else torch.empty(count, self.config.hidden)
        logits = torch.empty(count, width)
        invalid = stack.kernels.foretell_tree_pass(
            *(stack.model, stack.layers, len(stack.layers), self._embedding_struct, self._head.struct, width),
            *(self._norm.data_ptr(), pass_struct, stack.cache_struct(cache), recorded, recorded_count),
            *(states.data_ptr(), normed.data_ptr(), not norm_all, logits.data_ptr(), torch.get_num_threads()),
        )
        if invalid != -1:
            raise ValueError(
                f"a token of the pass is not among {self._embedding_struct.vocab} tokens, or lies outside the cache of "
                f"{cache.k.shape[1]} rows of {cache.k.shape[3]} slots and {stack.model.context} positions: token "
                f"{tree.token[active].tolist()}"
            )
        hidden, cap = tuple(states[i] for i in place), self.config.logit_softcap
        if cap:
            # Numbers that the cap rounds to the same one have another argmax.
            return ModelOutput(torch.tanh(logits / cap) * cap, nodes[5], hidden, nodes[4])
        return ModelOutput(logits, nodes[5], hidden, nodes[4], argmax=work[6 * size + 3 * b :][:count])

    @property
    def backend(self) -> Backend:
        """The kernels, as this machine compiled them."""
        instructions = build.library().foretell_instructions().decode()
        return Backend("native", "cpu", self.precision, instructions, batch_invariant=True)

    @property
    def nbytes(self) -> int:
        """Bytes of embedding, norm and head."""
        return self._embedding.nbytes + self._norm.nbytes + self._head.nbytes

    def pack_block(self, i: int, block: nn.Module) -> PackedBlock:
        """Pack a block of the torch decoder as block `i`."""
        return self._stack.pack_block(i, block_weights(block))

    def block_forward(self, layout: Layout, cache: KVCache) -> BlockForward[PackedBlock]:
        """The forward pass of a block over this layout and cache."""
        stack, tokens, memory = (
            self._stack,
            self._stack.layout_struct(layout.token_count, layout),
            self._stack.cache_struct(cache),
        )
        return lambda block, i, x: (stack.run_block(block, i, x, tokens, memory), 0)

    def without_blocks(self, config: ModelConfig, skip: SkipSet) -> "NativeDecoder":
        """The same embedding, norm and head for another configuration of the blocks."""
        return self._sharing(config, self._stack.without_sublayers(skip.attention, skip.mlp))

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether the kernel applies; it does not support a soft cap on logits."""
        return not self.config.logit_softcap

    def grow_dynamic_trees(
        self,
        roots: Float[torch.Tensor, "b d"],
        trees: DynamicTrees,
        cache: KVCache,
        token_of: Int[torch.Tensor, " v"] | None = None,
    ) -> None:
        """Grow trees below roots whose last layer's outputs are given; their keys are cached after the requests' own.

        `token_of`: the token of every row of the head; None: the row's index.

        Raises:
            ValueError: the cache has no room for the trees.
        """
        stack = self._stack
        check_tensor(roots, torch.float32, "roots", trees.struct.requests, self.config.hidden)
        invalid = build.library().foretell_decoder_trees(
            *(
                stack.model,
                stack.layers,
                len(stack.layers),
                self._embedding_struct,
                self._head.struct,
                self._norm.data_ptr(),
            ),
            *(None if token_of is None else token_of.data_ptr(), roots.data_ptr(), trees.struct),
            *(stack.cache_struct(cache), torch.get_num_threads()),
        )
        trees.check_result(invalid, cache.k.shape[3], stack.model.context)

    def first_layers(self, layers: int) -> "NativeDecoder":
        """The first `layers` blocks with the same norm and head, sharing all weights."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return self._sharing(replace(self.config, layers=layers), self._stack.first_layers(layers))

    def without_sublayers(self, skip: SkipSet) -> "NativeDecoder":
        """The network without some sub-layers, sharing all weights."""
        return self._sharing(self.config, self._stack.without_sublayers(skip.attention, skip.mlp))

    def _sharing(self, config: ModelConfig, stack: NativeStack) -> "NativeDecoder":
        other = object.__new__(NativeDecoder)
        other.__dict__.update(self.__dict__)
        other.config, other._stack = config, stack
        return other


@memoize
def _recorded_layers(hidden_layers: tuple[int, ...], layers: int) -> tuple[object, int, tuple[int, ...]]:
    """For the layers whose hidden states are wanted: those to record before a block, as an argument of the kernels, and
    their number; and the place of every wanted state among these, the last block's output, and its norm.
    """
    before = [i for i in sorted(set(hidden_layers)) if i < layers]
    order = [*before, layers, layers + 1]
    return (c_int32 * len(before))(*before), len(before), tuple(order.index(i) for i in hidden_layers)
