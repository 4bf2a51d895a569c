"""The operations of layers with a recurrent state instead of attention: gated delta nets."""

from foretell.model.config.model import ModelConfig
from foretell.model.config.states import DeltaNetConfig
from foretell.roofline.attention import RMS_NORM_OPS
from foretell.roofline.feedforward import ACTIVATION_OPS
from foretell.roofline.linear_cost import LinearCost
from foretell.roofline.op_graph import Op, elementwise, linear

DELTA_RULE_OPS = 7.0
"""OPs per element of the state and token: decay 1, two products with a vector 2 each, update 2."""


def state_elements(state: DeltaNetConfig) -> float:
    """Elements that a layer keeps for a sequence: the matrices, and the last inputs of the convolution."""
    shape = state.shape
    return float(shape.heads * shape.key_dim * shape.value_dim + shape.channels * (shape.taps - 1))


def gated_delta_net(config: ModelConfig, state: DeltaNetConfig) -> tuple[Op, ...]:
    """Projections, convolution, delta rule and gated norm (Yang et al., arXiv 2412.06464); reads `attn_norm`.

    The state is read and written once per pass and sequence, in the format of the KV cache. Copies of it that a server
    keeps for every drafted token, to go back to, are not counted.
    """
    h, shape = config.hidden, state.shape
    values = state.value_heads * state.value_dim
    matrices = float(shape.heads * shape.key_dim * shape.value_dim)
    kept = float(shape.channels * (shape.taps - 1))
    convolved, out = LinearCost(rows=float(shape.channels)), LinearCost(rows=float(values))
    ops = [
        linear("in_proj", h, shape.channels + values, "attn_norm", "column"),
        linear("gates_proj", h, 2 * state.value_heads, "attn_norm", "column"),
        Op("conv", "elementwise", f"{shape.taps} × {shape.channels}", ("in_proj",), "heads",
           work=convolved.scaled(2.0 * shape.taps + ACTIVATION_OPS["silu"]),
           weights=LinearCost(constant=float(shape.channels * shape.taps)), read=convolved, write=convolved,
           kv_read=LinearCost(sequences=kept), kv_write=LinearCost(sequences=kept),
           stored=float(shape.channels * shape.taps), output=convolved),
        Op("delta_rule", "attention", f"{shape.heads} heads × {shape.key_dim} × {shape.value_dim}",
           ("conv", "gates_proj"), "heads", work=LinearCost(rows=DELTA_RULE_OPS * matrices),
           weights=LinearCost(constant=2.0 * state.value_heads),
           read=LinearCost(rows=float(shape.channels + 2 * state.value_heads)), write=out,
           kv_read=LinearCost(sequences=matrices), kv_write=LinearCost(sequences=matrices),
           stored=2.0 * state.value_heads, output=out),
    ]  # fmt: skip
    gate_ops = RMS_NORM_OPS + ACTIVATION_OPS["silu"] + 1
    ops.append(elementwise("gated_norm", values, ("delta_rule", "in_proj"), gate_ops, 2.0, "heads", state.value_dim))
    return tuple(ops)
