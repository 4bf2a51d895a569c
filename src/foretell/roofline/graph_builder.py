"""The operation graph of a model configuration: embedding, layers of each kind, final norm and LM head."""

from dataclasses import replace

from foretell.model.config.model import ModelConfig
from foretell.model.config.states import DeltaNetConfig
from foretell.roofline.attention import RMS_NORM_OPS, Fusion, grouped_query_attention, latent_attention
from foretell.roofline.compressed import compressed_layer
from foretell.roofline.feedforward import dense_feed_forward, mixture_of_experts
from foretell.roofline.linear_cost import LinearCost
from foretell.roofline.op_graph import LayerGroup, Op, OpGraph, elementwise, linear, with_live_activations
from foretell.roofline.state_layers import gated_delta_net, state_elements

LAYER_NORM_OPS = 7.0
"""OPs per element."""
LAYER_NORM_ARCHITECTURES = ("opt", "gptj", "falcon")


def build_graph(
    config: ModelConfig, name: str = "", fusion: Fusion = "flash", absorbed: bool = True, square: bool = False
) -> OpGraph:
    """The operation graph of a model.

    fusion: `none` writes attention scores to memory; `flash` fuses attention; `full` also fuses the rotary embedding,
    the activation, and the residual addition with the next norm. absorbed: how latent attention runs (see
    `latent_attention`). square: count causal attention as the full square.
    """
    kinds: dict[tuple[bool, bool, bool], int] = {}
    for layer in range(config.layers):
        has_experts = config.experts is not None and layer in config.experts.layers
        kind = (layer in config.state_layers, config.window_of(layer) > 0, has_experts)
        kinds[kind] = kinds.get(kind, 0) + 1
    residual = LinearCost(rows=float(config.hidden))
    groups = [_embedding_group(config)]
    for (has_state, windowed, has_experts), count in kinds.items():
        label = " ".join(["recurrent"] * has_state + ["sliding"] * windowed + ["experts"] * has_experts) or "full"
        group = LayerGroup(
            label if len(kinds) > 1 else "layer",
            count,
            compressed_layer(config, _layer(config, has_state, has_experts, fusion, absorbed)),
            config.window if windowed else 0,
            kv_elements=0.0 if has_state else _kv_elements(config),
            kv_heads=_delta_net(config).key_heads if has_state else 1 if config.latent else config.kv_heads,
            state_elements=state_elements(_delta_net(config)) if has_state else 0.0,
        )
        groups.append(with_live_activations(group, residual))
    groups.append(with_live_activations(_head_group(config), residual))
    experts = config.experts
    return OpGraph(
        name or config.architecture,
        tuple(groups),
        config.heads,
        config.context,
        experts.count if experts else 0.0,
        experts.active if experts else 0.0,
        square,
    )


def _kv_elements(config: ModelConfig) -> float:
    if config.latent:
        return config.latent.kv_rank + config.latent.rope_dim
    return 2.0 * config.kv_heads * config.head_dim


def norm(config: ModelConfig, name: str, source: str) -> Op:
    """A normalisation of the residual stream."""
    layer_norm = config.architecture in LAYER_NORM_ARCHITECTURES
    weights = config.hidden * (2 if layer_norm else 1)
    return elementwise(
        name, config.hidden, (source,), LAYER_NORM_OPS if layer_norm else RMS_NORM_OPS, 1.0, "replicated", weights
    )


def _all_reduce(name: str, source: str, width: int) -> Op:
    row = LinearCost(rows=float(width))
    return Op(name, "all_reduce", str(width), (source,), write=row, output=row)


def _delta_net(config: ModelConfig) -> DeltaNetConfig:
    assert isinstance(config.state, DeltaNetConfig)
    return config.state


def _mixer(config: ModelConfig, has_state: bool, fusion: Fusion, absorbed: bool) -> tuple[tuple[Op, ...], int]:
    """What mixes tokens, before the output projection, and its width."""
    if has_state:
        state = _delta_net(config)
        return gated_delta_net(config, state), state.value_heads * state.value_dim
    if config.latent:
        return latent_attention(config, config.latent, fusion, absorbed), config.heads * config.latent.value_dim
    return grouped_query_attention(config, fusion), config.heads * config.head_dim


def _layer(config: ModelConfig, has_state: bool, has_experts: bool, fusion: Fusion, absorbed: bool) -> tuple[Op, ...]:
    h, full = config.hidden, fusion == "full"
    mixer, inner = _mixer(config, has_state, fusion, absorbed)
    ops = [norm(config, "attn_norm", "x"), *mixer]
    ops.append(linear("o_proj", inner, h, ops[-1].name, "row", config.output_bias))
    if config.parallel_blocks:
        ops.extend(_feed_forward(config, has_experts, "attn_norm", full))
        ops.append(elementwise("add", h, ("x", "o_proj", ops[-1].name), 2.0, 3.0))
        return (*ops[:-1], _all_reduce("all_reduce", ops[-2].name, h), ops[-1])
    ops.append(_all_reduce("attn_reduce", "o_proj", h))
    if config.post_norms:
        ops.append(norm(config, "post_attn_norm", ops[-1].name))
    following = norm(config, "mlp_norm", "attn_add")
    ops.append(elementwise("attn_add", h, ("x", ops[-1].name), 1.0, 2.0))
    ops.append(replace(following, read=LinearCost()) if full else following)  # fused, it does not read memory
    ops.extend(_feed_forward(config, has_experts, "mlp_norm", full))
    ops.append(_all_reduce("mlp_reduce", ops[-1].name, h))
    if config.post_norms:
        ops.append(norm(config, "post_mlp_norm", ops[-1].name))
    ops.append(elementwise("mlp_add", h, ("attn_add", ops[-1].name), 1.0, 2.0))
    return tuple(ops)


def _feed_forward(config: ModelConfig, has_experts: bool, source: str, full: bool) -> tuple[Op, ...]:
    if has_experts and config.experts:
        return mixture_of_experts(config, config.experts, source, full)
    return dense_feed_forward(config, config.ffn, source, fuse_activation=full)


def _embedding_group(config: ModelConfig) -> LayerGroup:
    h = config.hidden
    row = LinearCost(rows=float(h))
    tables = config.vocab * h
    read = row
    if config.learned_positions:
        # OPT's position table has two unused rows in front.
        tables, read = tables + (config.context + 2) * h, LinearCost(rows=2.0 * h)
    lookup = Op(
        "embedding", "lookup", f"{config.vocab} × {h}", (), weights=read, write=row, stored=float(tables), output=row
    )
    return LayerGroup("embedding", 1, (lookup,))


def _head_group(config: ModelConfig) -> LayerGroup:
    h, v = config.hidden, config.vocab
    bias = config.architecture == "gptj"
    logits = LinearCost(logit_rows=float(v))
    head = Op(
        "lm_head",
        "matmul",
        f"{h} × {v}",
        ("final_norm",),
        "column",
        work=LinearCost(logit_rows=2.0 * h * v),
        weights=LinearCost(constant=float(h * v + v * bias)),
        read=LinearCost(logit_rows=float(h)),
        write=logits,
        stored=0.0 if config.tied else float(h * v + v * bias),
        output=logits,
    )
    gather = Op("logits_gather", "all_gather", str(v), ("lm_head",), write=logits, output=logits)
    return LayerGroup("head", 1, (norm(config, "final_norm", "x"), head, gather))
