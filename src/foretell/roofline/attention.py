"""The operations of an attention block: multi-head, grouped-query and latent attention, fused or not."""

from dataclasses import dataclass
from typing import Literal

from foretell.model.config.model import MLAConfig, ModelConfig
from foretell.roofline.linear_cost import ZERO, LinearCost
from foretell.roofline.op_graph import Op, elementwise, linear

SOFTMAX_OPS, ROPE_OPS, RMS_NORM_OPS, SIGMOID_OPS = 5.0, 3.0, 4.0, 3.0
"""OPs per element."""

Fusion = Literal["none", "flash", "full"]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of attention proper: head dimensions, and elements read from the KV cache.

    key_reads, value_reads, fused_reads: elements read for keys, for values, and by a fused kernel that reads both.
    sources: the operations that compute queries, keys and values.
    """

    heads: int
    key_dim: float
    value_dim: float
    key_reads: LinearCost
    value_reads: LinearCost
    fused_reads: LinearCost
    expanded_reads: LinearCost = ZERO
    """Keys and values that are activations, not in the KV cache (expanded latent attention)."""
    sources: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    stored: float = 0.0
    """Learned scores that join the softmax, one per head or none."""


def attention_core(shape: AttentionShape, fusion: Fusion) -> tuple[Op, ...]:
    """QK product, softmax and SV product: three operations, or one fused operation that keeps the scores on chip.

    The fused operation reads queries, keys and values once and writes the output once (FlashAttention, arXiv
    2205.14135). Prefill kernels re-read keys per query tile, but from the on-chip cache, so this is a lower bound.
    """
    h, label = shape.heads, f"{shape.heads} heads × {shape.key_dim:g}"
    qk, sv = LinearCost(pairs=2.0 * h * shape.key_dim), LinearCost(pairs=2.0 * h * shape.value_dim)
    scores, softmax = LinearCost(pairs=float(h)), LinearCost(pairs=SOFTMAX_OPS * h)
    queries, out = LinearCost(rows=h * shape.key_dim), LinearCost(rows=h * shape.value_dim)
    if fusion != "none":
        return (
            Op(
                "attention", "attention", label, shape.sources, "heads",
                work=qk + sv + softmax, read=queries + shape.expanded_reads, write=out, kv_read=shape.fused_reads,
                stored=shape.stored, output=out,
            ),
        )  # fmt: skip
    half = shape.expanded_reads.scaled(0.5)
    return (
        Op("qk_matmul", "attention", label, shape.sources[:-1], "heads", work=qk, read=queries + half, write=scores,
           kv_read=shape.key_reads, output=scores),
        Op("softmax", "elementwise", "scores", ("qk_matmul",), "heads", work=softmax, read=scores, write=scores,
           stored=shape.stored, output=scores),
        Op("sv_matmul", "attention", label, ("softmax", shape.sources[-1]), "heads", work=sv, read=scores + half,
           write=out, kv_read=shape.value_reads, output=out),
    )  # fmt: skip


def grouped_query_attention(config: ModelConfig, fusion: Fusion) -> tuple[Op, ...]:
    """Projections, head norms, rotary embedding and attention of multi-head, grouped-query or multi-query attention.

    Reads `attn_norm`.
    """
    h, d, heads, kv = config.hidden, config.head_dim, config.heads, config.kv_heads
    bias = config.qkv_bias
    ops = [
        linear("q_proj", h, heads * d * (1 + config.attention_gate), "attn_norm", "column", bias),
        linear("k_proj", h, kv * d, "attn_norm", "column", bias, to_cache=True),
        linear("v_proj", h, kv * d, "attn_norm", "column", bias, to_cache=True),
    ]
    sources = ("q_proj", "k_proj", "v_proj")
    if config.qk_norm:
        ops.append(elementwise("q_norm", heads * d, ("q_proj",), RMS_NORM_OPS, 1.0, "heads", d))
        ops.append(elementwise("k_norm", kv * d, ("k_proj",), RMS_NORM_OPS, 1.0, "heads", d))
        sources = ("q_norm", "k_norm", "v_proj")
    if config.rope is not None and fusion != "full":
        rotated = (heads + kv) * d * config.rope.fraction
        ops.append(elementwise("rope", rotated, sources[:2], ROPE_OPS, 1.0, "heads"))
        sources = ("rope", "rope", "v_proj")
    core = AttentionShape(
        heads,
        d,
        d,
        LinearCost(kv_positions=float(kv * d)),
        LinearCost(kv_positions=float(kv * d)),
        LinearCost(kv_positions=2.0 * kv * d),
        sources=sources,
        stored=float(heads * bool(config.sink_layers)),
    )
    ops.extend(attention_core(core, fusion))
    if config.attention_gate:
        ops.append(elementwise("attn_gate", heads * d, (ops[-1].name, "q_proj"), SIGMOID_OPS + 1, 2.0, "heads"))
    return tuple(ops)


def latent_attention(config: ModelConfig, shape: MLAConfig, fusion: Fusion, absorbed: bool) -> tuple[Op, ...]:
    """The operations of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); reads `attn_norm`.

    absorbed: the up-projections are absorbed into queries and outputs, so that attention runs over the latent cache
    (decode). Otherwise keys and values are expanded from it (prefill).
    """
    h, heads, nope, rope, value, rank = (
        config.hidden, config.heads, shape.nope_dim, shape.rope_dim, shape.value_dim, shape.kv_rank,
    )  # fmt: skip
    query_width = heads * (nope + rope)
    ops: list[Op] = []
    if shape.q_rank:
        ops.append(linear("q_a_proj", h, shape.q_rank, "attn_norm", "replicated"))
        ops.append(elementwise("q_a_norm", shape.q_rank, ("q_a_proj",), RMS_NORM_OPS, 1.0, "replicated", shape.q_rank))
        ops.append(linear("q_b_proj", shape.q_rank, query_width, "q_a_norm", "column"))
    else:
        ops.append(linear("q_b_proj", h, query_width, "attn_norm", "column"))
    ops.append(linear("kv_a_proj", h, rank + rope, "attn_norm", "replicated", to_cache=True))
    ops.append(elementwise("kv_a_norm", rank, ("kv_a_proj",), RMS_NORM_OPS, 1.0, "replicated", rank))
    rotated: tuple[str, ...] = ()
    if fusion != "full":
        ops.append(elementwise("rope", (heads + 1) * rope, ("q_b_proj", "kv_a_proj"), ROPE_OPS, 1.0, "heads"))
        rotated = ("rope",)
    up = LinearCost(constant=float(heads * rank * (nope + value)))
    if not absorbed:
        expanded = LinearCost(kv_positions=float(heads * (nope + value)))
        ops.append(
            Op("kv_b_proj", "matmul", f"{rank} × {heads * (nope + value)}", ("kv_a_norm",), "column",
               work=LinearCost(kv_positions=2.0 * rank * heads * (nope + value)), weights=up,
               kv_read=LinearCost(kv_positions=float(rank)), write=expanded, stored=up.constant, output=expanded)
        )  # fmt: skip
        rotary_keys = LinearCost(kv_positions=float(rope))
        core = AttentionShape(
            heads,
            nope + rope,
            value,
            rotary_keys,
            ZERO,
            rotary_keys,
            expanded,
            ("q_b_proj", *rotated, "kv_b_proj", "kv_b_proj"),
        )
        return (*ops, *attention_core(core, fusion))
    fold, unfold = heads * nope * rank, heads * rank * value
    absorbed_queries = LinearCost(rows=float(heads * (rank + rope)))
    expanded_out = LinearCost(rows=float(heads * value))
    ops.append(
        Op("q_absorb", "matmul", f"{heads} × {nope} × {rank}", ("q_b_proj",), "heads", work=LinearCost(rows=2.0 * fold),
           weights=LinearCost(constant=float(fold)), read=LinearCost(rows=float(query_width)),
           write=absorbed_queries, stored=fold, output=absorbed_queries)
    )  # fmt: skip
    keys, values = LinearCost(kv_positions=float(rank + rope)), LinearCost(kv_positions=float(rank))
    core = AttentionShape(
        heads, rank + rope, rank, keys, values, keys, sources=("q_absorb", *rotated, "kv_a_norm", "kv_a_norm")
    )
    ops.extend(attention_core(core, fusion))
    ops.append(
        Op("v_absorb", "matmul", f"{heads} × {rank} × {value}", (ops[-1].name,), "heads",
           work=LinearCost(rows=2.0 * unfold), weights=LinearCost(constant=float(unfold)),
           read=LinearCost(rows=float(heads * rank)), write=expanded_out, stored=unfold, output=expanded_out)
    )  # fmt: skip
    return tuple(ops)
