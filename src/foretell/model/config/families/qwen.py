"""Qwen's mixtures of experts, and Qwen3-Next: gated attention beside layers of Gated DeltaNet."""

import torch

from foretell.model.config.families.base import Family, Rows
from foretell.model.config.model import ModelConfig
from foretell.model.config.states import DeltaNetConfig

_EXPERTS = {"mlp.shared_experts": "mlp.shared_expert"}
QWEN_MOE = Family(names=_EXPERTS)


def _grouped(name: str, key_heads: int, parts: list[int]) -> list[Rows]:
    """Parts that a checkpoint stores per key head, in the order of the parts."""
    whole = torch.arange(key_heads * sum(parts)).view(key_heads, -1)
    return [Rows(name, whole.numel(), torch.cat([part.flatten() for part in torch.split(whole, parts, 1)]))]


def _projections(config: ModelConfig, layer: int) -> list[Rows] | None:
    """Of [q, k, v, z] per key head."""
    c = config.state
    if not isinstance(c, DeltaNetConfig) or layer not in config.state_layers:
        return None
    values = c.value_heads // c.key_heads * c.value_dim
    return _grouped("linear_attn.in_proj_qkvz", c.key_heads, [c.key_dim, c.key_dim, values, values])


def _gates(config: ModelConfig, layer: int) -> list[Rows] | None:
    """Of [b, a] per key head."""
    c = config.state
    assert isinstance(c, DeltaNetConfig)
    return _grouped("linear_attn.in_proj_ba", c.key_heads, [c.value_heads // c.key_heads] * 2)


QWEN3_NEXT = Family(names=_EXPERTS, rows={"qkv": _projections, "mixer.gates": _gates})
