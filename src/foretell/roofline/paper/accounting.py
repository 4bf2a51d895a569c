"""The survey's own accounting (arXiv 2402.16363, LLM-Viewer), kept only to reproduce its table and to show where it
departs.

Differences from `build`: norms cost 7 OPs and no weights; a residual addition reads one operand; the activation is
counted on the hidden width; decode does not attend to the new token; prefill attention is the full square; the head is
priced at half its OPs and one row whatever the batch; embedding and rotation are free; memory leaves out embedding and
head. Its fused attention writes twice the score matrix and, when the paper was written, read only one of keys and
values, for every query head even where heads share them.
"""

import math
from dataclasses import replace

from foretell.model.config import ModelConfig
from foretell.roofline.linear_cost import Amount
from foretell.roofline.op_graph import Block, Network, Op, elementwise, linear, with_lifetimes

QUERY_TILE = 128
NORM_OPS, SOFTMAX_OPS, ACTIVATION_OPS = 7.0, 5.0, 2.0


def paper_network(config: ModelConfig, name: str = "", flash: bool = False, prompt: int = 1) -> Network:
    """A dense network as the survey prices it; `prompt`: prefill length, which sets how often its fused attention
    re-reads keys.

    Raises:
        ValueError: a model the survey's tool cannot describe (experts, latent attention, no gate).
    """
    if config.experts or config.latent or not config.gated:
        raise ValueError(f"the paper's accounting covers dense gated models only, not {name or config.architecture}")
    h = config.hidden
    stream = Amount(rows=float(h))
    layer = Block(
        "layer",
        config.layers,
        _layer(config, flash, prompt),
        kv=2.0 * config.kv_heads * config.head_dim,
        kv_heads=config.kv_heads,
    )
    head = Op(
        "lm_head", "matmul", f"{h} × {config.vocab}", ("x",), "column", work=Amount(outputs=float(h * config.vocab)),
        weights=Amount(one=float(h * config.vocab)), read=Amount(one=float(h)), write=Amount(one=float(config.vocab)),
    )  # fmt: skip
    blocks = (with_lifetimes(layer, stream), Block("head", 1, (head,)))
    return Network(name or config.architecture, blocks, config.heads, config.context, square=True, skip_new=True)


def _layer(config: ModelConfig, flash: bool, prompt: int) -> tuple[Op, ...]:
    h, f, d = config.hidden, config.ffn, config.head_dim
    kv = config.kv_heads * d

    def norm(name: str, source: str) -> Op:
        return elementwise(name, h, (source,), NORM_OPS, 1.0)

    def add(name: str, branch: str, stream: str) -> Op:
        return elementwise(name, h, (stream, branch), 1.0, 1.0)

    act = elementwise("mlp_act", h, ("gate_proj", "up_proj"), ACTIVATION_OPS, 2.0)
    core = (_fused(config, prompt),) if flash else _plain(config)
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


def _plain(config: ModelConfig) -> tuple[Op, ...]:
    heads, d, kv = config.heads, config.head_dim, float(config.kv_heads * config.head_dim)
    scores, queries = Amount(pairs=float(heads)), Amount(rows=float(heads * d))
    work, shape = Amount(pairs=2.0 * heads * d), f"{heads} heads × {d}"
    return (
        Op("qk_matmul", "attend", shape, ("q_proj", "k_proj"), "heads", work=work, read=queries, write=scores,
           kv_read=Amount(span=kv), output=scores),
        Op("softmax", "vector", "scores", ("qk_matmul",), "heads", work=scores.times(SOFTMAX_OPS), read=scores,
        write=scores,
           output=scores),
        Op("sv_matmul", "attend", shape, ("softmax", "v_proj"), "heads", work=work, read=scores, write=queries,
           kv_read=Amount(span=kv), output=queries),
    )  # fmt: skip


def _fused(config: ModelConfig, prompt: int) -> Op:
    heads, d = config.heads, config.head_dim
    queries = Amount(rows=float(heads * d))
    work = Amount(pairs=4.0 * heads * d + SOFTMAX_OPS * heads)
    return Op(
        "attention", "attend", f"{heads} heads × {d}", ("q_proj", "k_proj", "v_proj"), "heads", work=work, read=queries,
        write=Amount(pairs=2.0 * heads), kv_read=Amount(span=math.ceil(prompt / QUERY_TILE) * float(heads * d)),
        output=queries,
    )  # fmt: skip
