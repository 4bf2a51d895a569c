"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with one matrix of queries, keys and values, and one of gate and up."""

from itertools import accumulate, pairwise

from foretell.model.config.families.base import Family, Kind, Rows
from foretell.model.config.model import ModelConfig

_QKV, _GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"


def _split(name: str, outputs: list[int]) -> list[Rows]:
    """Consecutive parts of a matrix."""
    return [Rows(name, sum(outputs), range(first, last)) for first, last in pairwise(accumulate(outputs, initial=0))]


def _qkv(config: ModelConfig, layer: int) -> list[Rows]:
    keys = config.kv_heads * config.head_dim
    return _split(_QKV, [config.heads * config.head_dim, keys, keys])


PHI3 = Family(
    kinds={
        "phi3": Kind(
            defaults={
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "eos_token_id": 32000,
            }
        )
    },
    rows={"qkv": _qkv, "mlp.gate_up": lambda config, layer: _split(_GATE_UP, [config.ffn] * 2)},
    gguf_kinds={"phi3": "phi3"},
    gguf_names={_QKV: "attn_qkv", _GATE_UP: "ffn_up"},
)
