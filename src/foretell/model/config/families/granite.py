"""Granite 3 and 4: multipliers, experts in one tensor per layer beside a shared network, Mamba-2 layers."""

import torch

from foretell.model.config.families.base import Family, Rows
from foretell.model.config.model import ModelConfig

_BOTH, _DOWN = "shared_mlp.input_linear", "shared_mlp.output_linear"


def _halves(ffn: int) -> list[Rows]:
    """Gate and up, which are one matrix."""
    return [Rows(_BOTH, 2 * ffn, half) for half in torch.arange(2 * ffn).view(2, ffn)]


def _shared_network(config: ModelConfig, layer: int) -> list[Rows]:
    assert config.experts is not None
    return _halves(config.experts.shared_ffn)


GRANITE_MOE = Family(
    names={
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.down_proj": _DOWN,
        "mlp.shared_experts.down_proj": _DOWN,
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    },
    rows={
        "mlp.gate_up": lambda config, layer: _halves(config.ffn_of(layer)),
        "experts.shared.gate_up": _shared_network,
    },
    experts="stacked",
)
