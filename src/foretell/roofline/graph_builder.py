"""From a configuration to its network: embedding, layers of each kind, final norm and language-model head."""

from dataclasses import replace

from foretell.model.config import ModelConfig
from foretell.roofline.attention import Fusion, grouped_query, latent
from foretell.roofline.feedforward import dense, mixture
from foretell.roofline.linear_cost import Amount
from foretell.roofline.op_graph import Block, Network, Op, elementwise, linear, with_lifetimes

RMS_NORM_OPS, LAYER_NORM_OPS = 4.0, 7.0
LAYER_NORMED = ("opt", "gptj")


def network(
    config: ModelConfig, name: str = "", fusion: Fusion = "flash", absorbed: bool = True, square: bool = False
) -> Network:
    """Price list of a model.

    fusion: `none` keeps attention scores in memory; `flash` fuses attention; `full` also fuses rotation, activation,
    and residual addition with the next norm. absorbed: how latent attention runs (ignored by other models). square:
    count attention as the full square instead of the causal half.
    """
    kinds: dict[tuple[bool, bool], int] = {}
    for layer in range(config.layers):
        kind = (config.window_of(layer) > 0, config.experts is not None and layer in config.experts.layers)
        kinds[kind] = kinds.get(kind, 0) + 1
    stream = Amount(rows=float(config.hidden))
    blocks = [_before(config)]
    for (windowed, sparse), count in kinds.items():
        label = (
            "layer"
            if len(kinds) == 1
            else " ".join((["sliding"] if windowed else []) + (["experts"] if sparse else [])) or "full"
        )
        block = Block(
            label,
            count,
            _layer(config, sparse, fusion, absorbed),
            config.window if windowed else 0,
            kv=_cached(config),
            kv_heads=1 if config.latent else config.kv_heads,
        )
        blocks.append(with_lifetimes(block, stream))
    blocks.append(with_lifetimes(_after(config), stream))
    experts = config.experts
    return Network(
        name or config.architecture,
        tuple(blocks),
        config.heads,
        config.context,
        experts.count if experts else 0.0,
        experts.active if experts else 0.0,
        square,
    )


def _cached(config: ModelConfig) -> float:
    if config.latent:
        return config.latent.kv_rank + config.latent.rope_dim
    return 2.0 * config.kv_heads * config.head_dim


def norm(config: ModelConfig, name: str, source: str) -> Op:
    """A normalisation of the residual stream."""
    layered = config.architecture in LAYER_NORMED
    weights = config.hidden * (2 if layered else 1)
    return elementwise(
        name, config.hidden, (source,), LAYER_NORM_OPS if layered else RMS_NORM_OPS, 1.0, "whole", weights
    )


def _reduce(name: str, source: str, width: int) -> Op:
    row = Amount(rows=float(width))
    return Op(name, "reduce", str(width), (source,), write=row, output=row)


def _layer(config: ModelConfig, sparse: bool, fusion: Fusion, absorbed: bool) -> tuple[Op, ...]:
    h, full = config.hidden, fusion == "full"
    ops = [norm(config, "attn_norm", "x")]
    ops.extend(latent(config, config.latent, fusion, absorbed) if config.latent else grouped_query(config, fusion))
    inner = config.heads * (config.latent.value_dim if config.latent else config.head_dim)
    ops.append(linear("o_proj", inner, h, ops[-1].name, "row", config.output_bias))
    if config.parallel_blocks:
        ops.extend(_feed_forward(config, sparse, "attn_norm", full))
        ops.append(elementwise("add", h, ("x", "o_proj", ops[-1].name), 2.0, 3.0))
        return (*ops[:-1], _reduce("reduce", ops[-2].name, h), ops[-1])
    ops.append(_reduce("attn_reduce", "o_proj", h))
    if config.post_norms:
        ops.append(norm(config, "post_attn_norm", ops[-1].name))
    ops.extend(_residual("attn_add", norm(config, "mlp_norm", "attn_add"), ops[-1].name, "x", h, full))
    ops.extend(_feed_forward(config, sparse, "mlp_norm", full))
    ops.append(_reduce("mlp_reduce", ops[-1].name, h))
    if config.post_norms:
        ops.append(norm(config, "post_mlp_norm", ops[-1].name))
    ops.append(elementwise("mlp_add", h, ("attn_add", ops[-1].name), 1.0, 2.0))
    return tuple(ops)


def _residual(name: str, following: Op, branch: str, stream: str, h: int, full: bool) -> tuple[Op, ...]:
    """The residual addition and the norm after it; fused, the norm reads what the addition has just made without a trip
    to memory.
    """
    add = elementwise(name, h, (stream, branch), 1.0, 2.0)
    return (add, replace(following, read=Amount())) if full else (add, following)


def _feed_forward(config: ModelConfig, sparse: bool, source: str, full: bool) -> tuple[Op, ...]:
    if sparse and config.experts:
        return mixture(config, config.experts, source, full)
    return dense(config, config.ffn, source, fuse=full)


def _before(config: ModelConfig) -> Block:
    h = config.hidden
    row = Amount(rows=float(h))
    tables = config.vocab * h
    read = row
    if config.learned_positions:
        # OPT's position table has two unused rows in front.
        tables, read = tables + (config.context + 2) * h, Amount(rows=2.0 * h)
    lookup = Op(
        "embedding", "lookup", f"{config.vocab} × {h}", (), weights=read, write=row, stored=float(tables), output=row
    )
    return Block("embedding", 1, (lookup,))


def _after(config: ModelConfig) -> Block:
    h, v = config.hidden, config.vocab
    bias = config.architecture == "gptj"
    logits = Amount(outputs=float(v))
    head = Op(
        "lm_head",
        "matmul",
        f"{h} × {v}",
        ("final_norm",),
        "column",
        work=Amount(outputs=2.0 * h * v),
        weights=Amount(one=float(h * v + v * bias)),
        read=Amount(outputs=float(h)),
        write=logits,
        stored=0.0 if config.tied else float(h * v + v * bias),
        output=logits,
    )
    gather = Op("logits_gather", "gather", str(v), ("lm_head",), write=logits, output=logits)
    return Block("head", 1, (norm(config, "final_norm", "x"), head, gather))
