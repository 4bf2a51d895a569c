"""Nemotron-H and Nemotron 3 (arXiv 2504.03624): layers of one sub-layer each, all of the same names."""

from foretell.model.config.families.base import Family

NEMOTRON = Family(
    names={
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        "self_attn": "mixer",
        "mamba": "mixer",
        "mlp": "mixer",
    },
    final_norm="model.norm_f",
)
