"""The accounting of the survey (arXiv 2402.16363, LLM-Viewer), to reproduce its tables.

Differences from `graph_builder`: norms cost 7 OPs and no weights; a residual addition reads one operand; the activation
is counted on the hidden width; decode does not attend to the new token; prefill attention is the full square; the head
is counted with half its OPs and one row whatever the batch; embedding and rotary embedding are free; memory omits
embedding and head. Its fused attention writes twice the score matrix and (when the paper was written) reads only one
of keys and values, for every query head even where heads share them.
"""

import math
from dataclasses import replace

from foretell.model.config.model import ModelConfig
from foretell.roofline.linear_cost import LinearCost
from foretell.roofline.op_graph import LayerGroup, Op, OpGraph, elementwise, linear, with_live_activations

QUERY_TILE = 128
"""Queries per tile of the fused attention, as in LLM-Viewer."""
NORM_OPS, SOFTMAX_OPS, ACTIVATION_OPS = 7.0, 5.0, 2.0


def paper_graph(config: ModelConfig, flash: bool = False, prompt: int = 1) -> OpGraph:
    """The graph of a dense model as the survey counts it.

    prompt: prefill length in tokens; its fused attention re-reads keys once per QUERY_TILE of them.

    Raises:
        ValueError: a model the survey's tool cannot describe (experts, latent attention, no gate).
    """
    if config.experts or config.latent or not config.gated:
        raise ValueError(f"the paper's accounting covers dense gated models only, not {config.architecture}")
    h = config.hidden
    residual = LinearCost(rows=float(h))
    layer = LayerGroup(
        "layer",
        config.layers,
        _layer(config, flash, prompt),
        kv_elements=2.0 * config.kv_heads * config.head_dim,
        kv_heads=config.kv_heads,
    )
    head = Op(
        "lm_head", "matmul", f"{h} × {config.vocab}", ("x",), "column",
        work=LinearCost(logit_rows=float(h * config.vocab)), weights=LinearCost(constant=float(h * config.vocab)),
        read=LinearCost(constant=float(h)), write=LinearCost(constant=float(config.vocab)),
    )  # fmt: skip
    groups = (with_live_activations(layer, residual), LayerGroup("head", 1, (head,)))
    return OpGraph(config.architecture, groups, config.heads, config.context, square=True, skip_new_tokens=True)


def _layer(config: ModelConfig, flash: bool, prompt: int) -> tuple[Op, ...]:
    h, f, d = config.hidden, config.ffn, config.head_dim
    kv = config.kv_heads * d

    def norm(name: str, source: str) -> Op:
        return elementwise(name, h, (source,), NORM_OPS, 1.0)

    def add(name: str, branch: str, residual: str) -> Op:
        return elementwise(name, h, (residual, branch), 1.0, 1.0)

    act = elementwise("mlp_act", h, ("gate_proj", "up_proj"), ACTIVATION_OPS, 2.0)
    core = (_fused_attention(config, prompt),) if flash else _unfused_attention(config)
    return (
        norm("attn_norm", "x"),
        linear("q_proj", h, config.heads * d, "attn_norm", "column"),
        linear("k_proj", h, kv, "attn_norm", "column", to_cache=True),
        linear("v_proj", h, kv, "attn_norm", "column", to_cache=True),
        *core,
        linear("o_proj", config.heads * d, h, core[-1].name, "row"),
        add("attn_add", "o_proj", "x"),
        norm("mlp_norm", "attn_add"),
        linear("gate_proj", h, f, "mlp_norm", "column"),
        linear("up_proj", h, f, "mlp_norm", "column"),
        replace(act, split="column"),
        linear("down_proj", f, h, "mlp_act", "row"),
        add("mlp_add", "down_proj", "attn_add"),
    )


def _unfused_attention(config: ModelConfig) -> tuple[Op, ...]:
    heads, d, kv = config.heads, config.head_dim, float(config.kv_heads * config.head_dim)
    scores, queries = LinearCost(pairs=float(heads)), LinearCost(rows=float(heads * d))
    work, shape = LinearCost(pairs=2.0 * heads * d), f"{heads} heads × {d}"
    return (
        Op("qk_matmul", "attention", shape, ("q_proj", "k_proj"), "heads", work=work, read=queries, write=scores,
           kv_read=LinearCost(kv_positions=kv), output=scores),
        Op("softmax", "elementwise", "scores", ("qk_matmul",), "heads", work=scores.scaled(SOFTMAX_OPS), read=scores,
           write=scores, output=scores),
        Op("sv_matmul", "attention", shape, ("softmax", "v_proj"), "heads", work=work, read=scores, write=queries,
           kv_read=LinearCost(kv_positions=kv), output=queries),
    )  # fmt: skip


def _fused_attention(config: ModelConfig, prompt: int) -> Op:
    heads, d = config.heads, config.head_dim
    queries = LinearCost(rows=float(heads * d))
    work = LinearCost(pairs=4.0 * heads * d + SOFTMAX_OPS * heads)
    return Op(
        "attention", "attention", f"{heads} heads × {d}", ("q_proj", "k_proj", "v_proj"), "heads", work=work,
        read=queries, write=LinearCost(pairs=2.0 * heads), output=queries,
        kv_read=LinearCost(kv_positions=math.ceil(prompt / QUERY_TILE) * float(heads * d)),
    )  # fmt: skip
