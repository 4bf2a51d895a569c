"""The operations of a feed-forward block: dense (gated or not) and mixture of experts."""

from collections.abc import Mapping
from dataclasses import replace

from foretell.model.config.model import Activation, ModelConfig, MoEConfig
from foretell.roofline.linear_cost import ZERO, LinearCost
from foretell.roofline.op_graph import Op, elementwise, linear

ACTIVATION_OPS: Mapping[Activation, float] = {
    "silu": 4.0,
    "gelu": 6.0,
    "gelu_tanh": 6.0,
    "relu": 1.0,
    "clamped_swiglu": 8.0,
}
"""OPs per element."""


def dense_feed_forward(
    config: ModelConfig, width: int, source: str, prefix: str = "", fuse_activation: bool = False
) -> tuple[Op, ...]:
    """A dense feed-forward of inner size `width` that reads `source`.

    fuse_activation: the activation runs inside the projection kernels, without memory traffic.
    """
    h, bias = config.hidden, config.mlp_bias
    cost = ACTIVATION_OPS[config.activation] + config.gated
    up = linear(f"{prefix}up_proj", h, width, source, "column", bias)
    gate = linear(f"{prefix}gate_proj", h, width, source, "column", bias)
    ops = [gate, up] if config.gated else [up]
    inner = [op.name for op in ops]
    if fuse_activation:
        ops = [without_output(op) for op in ops[:-1]] + [ops[-1]]
        return (*ops, linear(f"{prefix}down_proj", width, h, inner[-1], "row", bias))
    ops.append(elementwise(f"{prefix}mlp_act", width, tuple(inner), cost, len(inner), "column"))
    return (*ops, linear(f"{prefix}down_proj", width, h, f"{prefix}mlp_act", "row", bias))


def without_output(op: Op) -> Op:
    """The operation with its result kept on chip for the next one."""
    return replace(op, write=ZERO, output=ZERO)


def mixture_of_experts(
    config: ModelConfig, experts: MoEConfig, source: str, fuse_activation: bool = False
) -> tuple[Op, ...]:
    """Router, routed experts, shared experts if any, and the weighted sum; reads `source`."""
    h, f, k = config.hidden, experts.ffn, experts.active
    cost = ACTIVATION_OPS[config.activation] + config.gated
    first = ("experts_gate", "experts_up") if config.gated else ("experts_up",)
    # DeepSeek-V3 keeps a selection bias per expert.
    ops = [linear("router", h, experts.count, source, "replicated", experts.router_bias or experts.selection_bias)]
    ops.extend(_expert_matmul(name, h, f, experts, (source, "router")) for name in first)
    if fuse_activation:
        ops = ops[:1] + [without_output(op) for op in ops[1:-1]] + ops[-1:]
        inner = first[-1]
    else:
        inner = "experts_act"
        ops.append(elementwise(inner, k * f, first, cost, len(first), "column"))
    ops.append(_expert_matmul("experts_down", f, h, experts, (inner,), row_parallel=True))
    summed: tuple[str, ...] = ("experts_down",)
    if experts.shared_ffn:
        ops.extend(dense_feed_forward(config, experts.shared_ffn, source, "shared_", fuse_activation))
        summed = ("experts_down", "shared_down_proj")
        if experts.shared_gate:
            ops.append(linear("shared_gate", h, 1, source, "replicated"))
    row = LinearCost(rows=float(h))
    ops.append(
        Op("combine", "elementwise", f"{k} × {h}", (*summed, "router"), work=row.scaled(2.0 * k),
           read=row.scaled(k + bool(experts.shared_ffn)), write=row, output=row)
    )  # fmt: skip
    return tuple(ops)


def _expert_matmul(
    name: str, in_width: int, out_width: int, experts: MoEConfig, inputs: tuple[str, ...], row_parallel: bool = False
) -> Op:
    """One matrix of every expert: reads the weights of the active experts, multiplies each row with its experts."""
    k = experts.active
    return Op(
        name,
        "matmul",
        f"{experts.count} × {in_width} × {out_width}",
        inputs,
        "row" if row_parallel else "column",
        work=LinearCost(rows=2.0 * k * in_width * out_width),
        weights=LinearCost(active_experts=float(in_width * out_width)),
        read=LinearCost(rows=float(k * in_width)),
        write=LinearCost(rows=float(k * out_width)),
        stored=float(experts.count * (in_width + experts.bias) * out_width),
        output=LinearCost(rows=float(k * out_width)),
    )
