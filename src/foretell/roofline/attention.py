"""The attention half of a layer as operations: grouped queries, sliding windows, latent attention, fused or not."""

from dataclasses import dataclass
from typing import Literal

from foretell.model.config import MLAConfig, ModelConfig
from foretell.roofline.linear_cost import NOTHING, Amount
from foretell.roofline.op_graph import Op, elementwise, linear

SOFTMAX_OPS = 5.0
ROPE_OPS = 3.0

Fusion = Literal["none", "flash", "full"]


@dataclass(frozen=True)
class Core:
    """Widths of the attention core: per head of queries against keys, per head of values, and of what a position keeps
    in the cache.
    """

    heads: int
    key: float
    value: float
    keys_read: Amount
    values_read: Amount
    both_read: Amount
    extra_read: Amount = NOTHING
    """Keys and values that come as activations and not from the cache (latent attention, expanded)."""
    sources: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")


def score(core: Core, fusion: Fusion) -> tuple[Op, ...]:
    """Queries against keys, softmax, weighted sum of values: three operations, or one that keeps the scores on chip.

    The fused operation reads queries, keys and values once and writes the output once (FlashAttention, arXiv
    2205.14135): prefill kernels that re-read keys per query tile are served by the cache, so this is the lower bound a
    roofline asks for.
    """
    h, shape = core.heads, f"{core.heads} heads × {core.key:g}"
    qk, sv = Amount(pairs=2.0 * h * core.key), Amount(pairs=2.0 * h * core.value)
    scores, softmax = Amount(pairs=float(h)), Amount(pairs=SOFTMAX_OPS * h)
    queries, out = Amount(rows=h * core.key), Amount(rows=h * core.value)
    if fusion != "none":
        return (
            Op(
                "attention", "attend", shape, core.sources, "heads",
                work=qk + sv + softmax, read=queries + core.extra_read, write=out, kv_read=core.both_read, output=out,
            ),
        )  # fmt: skip
    share = core.extra_read.times(0.5)
    return (
        Op("qk_matmul", "attend", shape, core.sources[:-1], "heads", work=qk, read=queries + share, write=scores,
           kv_read=core.keys_read, output=scores),
        Op("softmax", "vector", "scores", ("qk_matmul",), "heads", work=softmax, read=scores, write=scores,
        output=scores),
        Op("sv_matmul", "attend", shape, ("softmax", core.sources[-1]), "heads", work=sv, read=scores + share,
        write=out,
           kv_read=core.values_read, output=out),
    )  # fmt: skip


def grouped_query(config: ModelConfig, fusion: Fusion) -> tuple[Op, ...]:
    """Projections, head norms, rotation and core of multi-head, grouped-query or multi-query attention; reads
    `attn_norm`.
    """
    h, d, heads, kv = config.hidden, config.head_dim, config.heads, config.kv_heads
    bias = config.qkv_bias
    ops = [
        linear("q_proj", h, heads * d, "attn_norm", "column", bias),
        linear("k_proj", h, kv * d, "attn_norm", "column", bias, to_cache=True),
        linear("v_proj", h, kv * d, "attn_norm", "column", bias, to_cache=True),
    ]
    sources = ("q_proj", "k_proj", "v_proj")
    if config.qk_norm:
        ops.append(elementwise("q_norm", heads * d, ("q_proj",), 4.0, 1.0, "heads", d))
        ops.append(elementwise("k_norm", kv * d, ("k_proj",), 4.0, 1.0, "heads", d))
        sources = ("q_norm", "k_norm", "v_proj")
    if config.rope is not None and fusion != "full":
        turned = (heads + kv) * d * config.rope.fraction
        ops.append(elementwise("rope", turned, sources[:2], ROPE_OPS, 1.0, "heads"))
        sources = ("rope", "rope", "v_proj")
    core = Core(
        heads, d, d, Amount(span=float(kv * d)), Amount(span=float(kv * d)), Amount(span=2.0 * kv * d), sources=sources
    )
    return (*ops, *score(core, fusion))


def latent(config: ModelConfig, shape: MLAConfig, fusion: Fusion, absorbed: bool) -> tuple[Op, ...]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); reads `attn_norm`.

    absorbed: the up-projections are folded into queries and outputs, so that attention runs over the small latent cache
    (decode); otherwise keys and values are expanded from it (prefill).
    """
    h, heads, nope, rope, value, rank = (
        config.hidden, config.heads, shape.nope_dim, shape.rope_dim, shape.value_dim, shape.kv_rank,
    )  # fmt: skip
    wide = heads * (nope + rope)
    ops: list[Op] = []
    if shape.q_rank:
        ops.append(linear("q_a_proj", h, shape.q_rank, "attn_norm", "whole"))
        ops.append(elementwise("q_a_norm", shape.q_rank, ("q_a_proj",), 4.0, 1.0, "whole", shape.q_rank))
        ops.append(linear("q_b_proj", shape.q_rank, wide, "q_a_norm", "column"))
    else:
        ops.append(linear("q_b_proj", h, wide, "attn_norm", "column"))
    ops.append(linear("kv_a_proj", h, rank + rope, "attn_norm", "whole", to_cache=True))
    ops.append(elementwise("kv_a_norm", rank, ("kv_a_proj",), 4.0, 1.0, "whole", rank))
    if fusion != "full":
        ops.append(elementwise("rope", (heads + 1) * rope, ("q_b_proj", "kv_a_proj"), ROPE_OPS, 1.0, "heads"))
    up = Amount(one=float(heads * rank * (nope + value)))
    if not absorbed:
        expanded = Amount(span=float(heads * (nope + value)))
        ops.append(
            Op("kv_b_proj", "matmul", f"{rank} × {heads * (nope + value)}", ("kv_a_norm",), "column",
               work=Amount(span=2.0 * rank * heads * (nope + value)), weights=up, kv_read=Amount(span=float(rank)),
               write=expanded, stored=up.one, output=expanded)
        )  # fmt: skip
        turned = Amount(span=float(rope))
        core = Core(
            heads, nope + rope, value, turned, NOTHING, turned, expanded, ("q_b_proj", "kv_b_proj", "kv_b_proj")
        )
        return (*ops, *score(core, fusion))
    fold, unfold = heads * nope * rank, heads * rank * value
    folded, opened = Amount(rows=float(heads * (rank + rope))), Amount(rows=float(heads * value))
    ops.append(
        Op("q_absorb", "matmul", f"{heads} × {nope} × {rank}", ("q_b_proj",), "heads", work=Amount(rows=2.0 * fold),
           weights=Amount(one=float(fold)), read=Amount(rows=float(wide)), write=folded, stored=fold, output=folded)
    )  # fmt: skip
    keys, values = Amount(span=float(rank + rope)), Amount(span=float(rank))
    core = Core(heads, rank + rope, rank, keys, values, keys, sources=("q_absorb", "kv_a_norm", "kv_a_norm"))
    ops.extend(score(core, fusion))
    ops.append(
        Op("v_absorb", "matmul", f"{heads} × {rank} × {value}", (ops[-1].name,), "heads",
        work=Amount(rows=2.0 * unfold),
           weights=Amount(one=float(unfold)), read=Amount(rows=float(heads * rank)), write=opened, stored=unfold,
           output=opened)
    )  # fmt: skip
    return tuple(ops)
