"""Mixtral (arXiv 2401.04088): Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, gguf_experts
from foretell.model.config.families.llama import MISTRAL
from foretell.model.config.model import MoEConfig
from foretell.utils.validation import Fields


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig:
    count = read.integer("num_local_experts", "num_experts", least=1)
    active = read.integer("num_experts_per_tok", least=1, most=count)
    return MoEConfig(count, active, read.integer("intermediate_size", least=1), layers=tuple(range(layers)))


_MIXTRAL: Mapping[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "num_experts_per_tok": 2, "num_experts": 8,
}  # fmt: skip
MIXTRAL = Family(
    kinds={"mixtral": Kind(defaults=_MIXTRAL)},
    names={
        "mlp": "block_sparse_moe",
        "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
    },
    gguf_names={
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.experts.{}.w1": "ffn_gate_exps",
        "block_sparse_moe.experts.{}.w3": "ffn_up_exps",
        "block_sparse_moe.experts.{}.w2": "ffn_down_exps",
    },
    gguf_interleaved=True,
    read_gguf=lambda read, kind, values, tensors: {"experts": gguf_experts(read, values["layers"])},
    read_windows=MISTRAL.read_windows,
    read_experts=_experts,
)
