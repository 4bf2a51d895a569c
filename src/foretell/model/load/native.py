"""Builds the decoder on the CPU kernels from a checkpoint, one block at a time, without a torch decoder in between."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float

from foretell.model.config import ModelConfig
from foretell.model.decoder import decoder_rope_tables
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.embedding import NativeEmbedding
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.stack import BlockWeights, NativeStack, PackedBlock
from foretell.model.kernels.structures import Precision
from foretell.model.load.weights import Weights
from foretell.model.stored_matrix import StoredMatrix


def weight_dtype(precision: Precision) -> torch.dtype:
    """Dtype that weights are rounded to before they are packed or quantised."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def build_native(config: ModelConfig, weights: Weights, precision: Precision) -> NativeDecoder:
    """The decoder of a checkpoint on the kernels. Memory beyond the packed weights: a few rows, and what the file's
    pages take until they are released after every block.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    return _build(config, weights, precision, read_blocks(config, weights, precision))


def build_native_without_blocks(config: ModelConfig, weights: Weights, precision: Precision) -> NativeDecoder:
    """Embedding, final norm and head alone."""
    return _build(config, weights, precision, iter(()))


def _build(
    config: ModelConfig, weights: Weights, precision: Precision, blocks: Iterator[BlockWeights]
) -> NativeDecoder:
    # Fails early on a configuration with too many layers.
    weights.require(f"model.layers.{config.layers - 1}.input_layernorm.weight", config.hidden)
    stack = NativeStack(config, blocks, precision, *decoder_rope_tables(config))
    embedding = weights.matrix("model.embed_tokens.weight", config.vocab, config.hidden)
    own_head = None if config.tied else weights.head_matrix(config.vocab, config.hidden)
    table = embedding if own_head is None else own_head
    head = NativeLinear(table, None, precision)
    weights.release_pages()
    # A view of a mapped file takes no memory of its own; else a tied embedding is read from the head.
    from_head = own_head is None and not weights.mapped and head.holds_floats
    dtype = weight_dtype(precision)
    if not from_head and not weights.mapped:
        embedding = embedding.rounded(dtype)
    norm = weights.require("model.norm.weight", config.hidden).float() + config.norm_offset
    return NativeDecoder.of_parts(
        config, NativeEmbedding(head if from_head else embedding, dtype, config.embedding_scale), stack, norm, head
    )


def read_blocks(config: ModelConfig, weights: Weights, precision: Precision) -> Iterator[BlockWeights]:
    """The weights of all blocks, one after the other."""
    for i in range(config.layers):
        yield read_block(config, i, weights, precision)
        weights.release_pages()


def read_block(config: ModelConfig, i: int, weights: Weights, precision: Precision) -> BlockWeights:
    """The weights of block `i`, its matrices as the checkpoint stores them."""
    c, prefix = config, f"model.layers.{i}."
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def matrix(name: str, outputs: int, inputs: int) -> StoredMatrix:
        return weights.matrix(f"{prefix}{name}.weight", outputs, inputs)

    def bias(outputs: dict[str, int], wanted: bool) -> Float[torch.Tensor, " o"] | None:
        if not wanted:
            return None
        return torch.cat([weights.require(f"{prefix}{name}.bias", n) for name, n in outputs.items()]).to(
            weight_dtype(precision)
        )

    def norm(name: str, width: int, wanted: bool = True) -> Float[torch.Tensor, " d"] | None:
        return weights.require(f"{prefix}{name}.weight", width).float() if wanted else None

    def vector(name: str) -> Float[torch.Tensor, " d"]:
        found = norm(name, c.hidden)
        assert found is not None
        return found

    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    return BlockWeights(
        attention_norm=vector("input_layernorm"),
        qkv=[matrix(name, outputs, c.hidden) for name, outputs in qkv.items()],
        qkv_bias=bias(qkv, c.qkv_bias),
        q_norm=norm("self_attn.q_norm", c.head_dim, c.qk_norm),
        k_norm=norm("self_attn.k_norm", c.head_dim, c.qk_norm),
        output=matrix("self_attn.o_proj", c.hidden, q),
        output_bias=bias({"self_attn.o_proj": c.hidden}, c.output_bias),
        mlp_norm=vector("pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"),
        gate=matrix("mlp.gate_proj", c.ffn, c.hidden),
        up=matrix("mlp.up_proj", c.ffn, c.hidden),
        down=matrix("mlp.down_proj", c.hidden, c.ffn),
        post_attention_norm=norm("post_attention_layernorm", c.hidden, c.post_norms),
        post_mlp_norm=norm("post_feedforward_layernorm", c.hidden, c.post_norms),
    )


def block_packer(
    decoder: NativeDecoder, config: ModelConfig, weights: Weights, precision: Precision
) -> Callable[[int], PackedBlock]:
    """A function that reads and packs block `i`."""
    return lambda i: decoder.stack.pack_block(i, read_block(config, i, weights, precision))
