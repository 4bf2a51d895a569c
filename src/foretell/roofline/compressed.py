"""Operations of compressed models: matrices as two factors of low rank, and shortcuts of a sliced residual stream."""

from collections.abc import Mapping
from dataclasses import replace

from foretell.model.config.model import ModelConfig
from foretell.roofline.op_graph import Op, linear

_MATRICES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Products that share a factor, by its name in `LowRank`."""
_SHORTCUTS = {"attn_add": "attention_shortcut", "mlp_add": "mlp_shortcut"}
"""What multiplies the stream before an addition to it."""


def compressed_layer(config: ModelConfig, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The operations of a layer with those of its compression, its ranks those of the configuration's only layer."""
    for role, names in _MATRICES.items():
        rank = config.low_rank.rank(role, 0)
        if rank:
            ops = _factored(ops, names, rank, _inputs(config)[role], f"{role}_factor")
    return _with_shortcuts(config, ops) if config.shortcuts else ops


def _inputs(config: ModelConfig) -> Mapping[str, int]:
    h = config.hidden
    return {"qkv": h, "output": config.heads * config.head_dim, "gate_up": h, "down": config.ffn}


def _factored(ops: tuple[Op, ...], names: tuple[str, ...], rank: int, inputs: int, factor: str) -> tuple[Op, ...]:
    """The products of these names after a shared factor."""
    factored, share = list[Op](), rank / inputs
    for op in ops:
        if op.name not in names:
            factored.append(op)
            continue
        if not any(other.name == factor for other in factored):
            factored.append(linear(factor, inputs, rank, op.inputs[0], "replicated"))
        shape = op.shape.replace(f"{inputs} ×", f"{rank} ×", 1)
        cost = {name: getattr(op, name).scaled(share) for name in ("work", "weights", "read")}
        factored.append(replace(op, shape=shape, inputs=(factor,), stored=op.stored * share, **cost))
    return tuple(factored)


def _with_shortcuts(config: ModelConfig, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    extended, stream = list[Op](), "x"
    for op in ops:
        if op.name in _SHORTCUTS:
            name = _SHORTCUTS[op.name]
            extended.append(linear(name, config.hidden, config.hidden, stream, "replicated"))
            op = replace(op, inputs=tuple(name if source == stream else source for source in op.inputs))
            stream = op.name
        extended.append(op)
    return tuple(extended)
