"""A whole network on the native kernels: what the torch decoder computes, at the speed of memory."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import nn

from foretell.model.backend import Backend
from foretell.model.cache import KVCache, Layout
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder, DecoderBlock, FeedForward, RMSNorm, Skip, Span, Streams, Through
from foretell.model.kernels import build
from foretell.model.kernels.beam import Trees
from foretell.model.kernels.linear import NativeLinear, embedding_of, expect
from foretell.model.kernels.rows import rms_norm
from foretell.model.kernels.stack import NativeStack, PackedBlock
from foretell.model.kernels.structures import Precision


@dataclass(frozen=True)
class PlainBlock:
    """A block's weights without its modules, as the kernels' packer takes them."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    output_bias: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None

    @staticmethod
    def of(block: nn.Module) -> "PlainBlock":
        """Of a block of the torch decoder."""
        assert isinstance(block, DecoderBlock) and isinstance(block.mlp, FeedForward)
        return PlainBlock(
            attention_norm=block.attention_norm.weight,
            qkv=block.qkv.weight,
            qkv_bias=block.qkv.bias,
            q_norm=_weight(block.q_norm),
            k_norm=_weight(block.k_norm),
            output=block.output.weight,
            output_bias=block.output.bias,
            mlp_norm=block.mlp_norm.weight,
            gate_up=block.mlp.gate_up.weight,
            down=block.mlp.down.weight,
            post_attention_norm=_weight(block.post_attention_norm),
            post_mlp_norm=_weight(block.post_mlp_norm),
        )


def _weight(norm: RMSNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


class NativeDecoder:
    """Packs a torch decoder's weights once; implements `Network` on the CPU, and without blocks the `Shell` of a
    `StreamedDecoder`.

    Raises:
        RuntimeError: the kernels are not available here.
        ValueError: the architecture is not one they run.
    """

    device = torch.device("cpu")

    def __init__(self, decoder: Decoder, precision: Precision) -> None:
        self.config, self.precision = decoder.config, precision
        self._embedding = decoder.embedding.detach()
        self._norm = decoder.norm.weight.detach()
        # The decoder's norms hold their offset already.
        plain = replace(decoder.config, norm_offset=0.0)
        self._stack = NativeStack(
            plain, [PlainBlock.of(b) for b in decoder.blocks], precision, decoder.rope, decoder.local_rope
        )
        self._head = NativeLinear(decoder.head.weight, decoder.head.bias, precision)
        tied = decoder.head.weight.data_ptr() == self._embedding.data_ptr()
        self._from_head = tied and not decoder.blocks and precision != "int8"
        """Without blocks, memory is scarce: embeddings are read from the packed head where that holds them."""
        if self._from_head:
            self._embedding = self._embedding.new_empty(0, decoder.config.hidden)
        self._table, self._embedded = embedding_of(self._embedding, decoder.config.embedding_scale)

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
        x = self._head.rows(token) if self._from_head else self._embedding.index_select(0, token).float()
        return x if self.config.embedding_scale == 1 else x * self.config.embedding_scale

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, span: Span) -> Streams:
        """The blocks of a span."""
        return Streams(self._stack.streams(x, layout, cache, *span))

    def final(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """What the head sees."""
        return rms_norm(x, self._norm, self.config.norm_eps)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token scores."""
        out = self._head(x)
        cap = self.config.logit_softcap
        return torch.tanh(out / cap) * cap if cap else out

    @property
    def backend(self) -> Backend:
        """The kernels, as this machine compiled them."""
        instructions = build.library().foretell_instructions().decode()
        return Backend("native", "cpu", self.precision, instructions, batch_invariant=True)

    @property
    def nbytes(self) -> int:
        """Bytes of embedding, norm and head."""
        return self._embedding.nbytes + self._norm.nbytes + self._head.nbytes

    def pack(self, i: int, block: nn.Module) -> PackedBlock:
        """A block of the torch decoder, as the `i`-th."""
        return self._stack.pack(i, PlainBlock.of(block))

    def over(self, layout: Layout, cache: KVCache) -> Through[PackedBlock]:
        """What takes the residual stream of a pass through a block."""
        stack, tokens, memory = self._stack, self._stack.tokens(layout.tokens, layout), self._stack.memory(cache)
        return lambda block, i, x: (stack.through(block, i, x, tokens, memory), 0)

    def shell(self, config: ModelConfig, skip: Skip) -> "NativeDecoder":
        """The same embedding, norm and head, for blocks that are kept elsewhere."""
        return self._sharing(config, self._stack.skipping(skip.attention, skip.mlp))

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether `beam` gives the chances that `logits` do: it knows no bound on them."""
        return not self.config.logit_softcap

    def grow_dynamic_trees(
        self,
        roots: Float[torch.Tensor, "b d"],
        trees: Trees,
        cache: KVCache,
        token_of: Int[torch.Tensor, " v"] | None = None,
    ) -> None:
        """Grow trees below roots whose last layer's outputs are given; their keys go behind those of the texts.

        `token_of`: the token of every row of the head; None: its number.

        Raises:
            ValueError: the cache has no room for the trees.
        """
        stack = self._stack
        expect(roots, torch.float32, "roots", trees.struct.texts, self.config.hidden)
        bad = build.library().foretell_decoder_beam(
            *(stack.model, stack.layers, len(stack.layers), self._embedded, self._head.struct, self._norm.data_ptr()),
            *(None if token_of is None else token_of.data_ptr(), roots.data_ptr(), trees.struct),
            *(stack.memory(cache), *trees.out, torch.get_num_threads()),
        )
        trees.check(bad, cache.k.shape[3], stack.model.context)

    def cut(self, layers: int) -> "NativeDecoder":
        """The first `layers` blocks under the same norm and head, sharing all weights."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return self._sharing(replace(self.config, layers=layers), self._stack.first(layers))

    def skipping(self, skip: Skip) -> "NativeDecoder":
        """The same weights without some sub-layers."""
        return self._sharing(self.config, self._stack.skipping(skip.attention, skip.mlp))

    def _sharing(self, config: ModelConfig, stack: NativeStack) -> "NativeDecoder":
        other = object.__new__(NativeDecoder)
        other.__dict__.update(self.__dict__)
        other.config, other._stack = config, stack
        return other
