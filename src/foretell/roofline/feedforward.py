"""The feed-forward half of a layer as operations: dense (gated or not) and mixture of experts."""

from collections.abc import Mapping

from foretell.model.config import Activation, ModelConfig, MoEConfig
from foretell.roofline.linear_cost import Amount
from foretell.roofline.op_graph import Op, elementwise, linear

ACTIVATION_OPS: Mapping[Activation, float] = {"silu": 4.0, "gelu": 6.0, "gelu_tanh": 6.0, "relu": 1.0}


def dense(config: ModelConfig, width: int, source: str, prefix: str = "", fuse: bool = False) -> tuple[Op, ...]:
    """A dense feed-forward of inner size `width` reading `source`; `fuse`: the activation runs where its operands are
    made.
    """
    h, bias = config.hidden, config.mlp_bias
    cost = ACTIVATION_OPS[config.activation] + config.gated
    up = linear(f"{prefix}up_proj", h, width, source, "column", bias)
    gate = linear(f"{prefix}gate_proj", h, width, source, "column", bias)
    ops = [gate, up] if config.gated else [up]
    made = [op.name for op in ops]
    if fuse:
        ops = [silent(op) for op in ops[:-1]] + [ops[-1]]
        return (*ops, linear(f"{prefix}down_proj", width, h, made[-1], "row", bias))
    ops.append(elementwise(f"{prefix}mlp_act", width, tuple(made), cost, len(made), "column"))
    return (*ops, linear(f"{prefix}down_proj", width, h, f"{prefix}mlp_act", "row", bias))


def silent(op: Op) -> Op:
    """The operation with its result kept on chip for the next one."""
    return Op(
        op.name,
        op.kind,
        op.shape,
        op.inputs,
        op.split,
        op.work,
        op.weights,
        op.read,
        kv_read=op.kv_read,
        stored=op.stored,
    )


def mixture(config: ModelConfig, experts: MoEConfig, source: str, fuse: bool = False) -> tuple[Op, ...]:
    """Router, the expected distinct experts of the pass, shared experts if any, and the weighted sum; reads
    `source`.
    """
    h, f, k = config.hidden, experts.ffn, experts.active
    cost = ACTIVATION_OPS[config.activation] + config.gated
    first = ("experts_gate", "experts_up") if config.gated else ("experts_up",)
    # DeepSeek-V3 keeps a selection bias per expert.
    ops = [linear("router", h, experts.count, source, "whole", config.architecture == "deepseek_v3")]
    ops.extend(_routed(name, h, f, experts, (source, "router")) for name in first)
    if fuse:
        ops = ops[:1] + [silent(op) for op in ops[1:-1]] + ops[-1:]
        made = first[-1]
    else:
        made = "experts_act"
        ops.append(elementwise(made, k * f, first, cost, len(first), "column"))
    ops.append(_routed("experts_down", f, h, experts, (made,), inward=True))
    summed: tuple[str, ...] = ("experts_down",)
    if experts.shared_ffn:
        ops.extend(dense(config, experts.shared_ffn, source, "shared_", fuse))
        summed = ("experts_down", "shared_down_proj")
        if experts.shared_gate:
            ops.append(linear("shared_gate", h, 1, source, "whole"))
    width = float(h)
    ops.append(
        Op("combine", "vector", f"{k} × {h}", (*summed, "router"), "whole", work=Amount(rows=2.0 * k * width),
           read=Amount(rows=(k + bool(experts.shared_ffn)) * width), write=Amount(rows=width),
           output=Amount(rows=width))
    )  # fmt: skip
    return tuple(ops)


def _routed(name: str, i: int, o: int, experts: MoEConfig, inputs: tuple[str, ...], inward: bool = False) -> Op:
    """One matrix of every expert: weights of the experts touched, rows times the experts each visits."""
    k = experts.active
    return Op(
        name,
        "matmul",
        f"{experts.count} × {i} × {o}",
        inputs,
        "row" if inward else "column",
        work=Amount(rows=2.0 * k * i * o),
        weights=Amount(touched=float(i * o)),
        read=Amount(rows=float(k * i)),
        write=Amount(rows=float(k * o)),
        stored=float(experts.count * i * o),
        output=Amount(rows=float(k * o)),
    )
