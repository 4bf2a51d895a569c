"""ERNIE 4.5: Llama whose rotary pairs lie side by side."""

from foretell.model.config.families.base import Family, Kind, interleaved_qkv, no_windows

_BIASES = ("qkv_bias", "output_bias", "mlp_bias")
_DEFAULTS = {
    "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ERNIE = Family(
    kinds={"ernie4_5": Kind({"tied": True}, _DEFAULTS)},
    rows={"qkv": interleaved_qkv},
    gguf_kinds={"ernie4_5": "ernie4_5"},
    read_windows=no_windows,
    read_further=lambda read, kind, values: dict.fromkeys(_BIASES, read.flag("use_bias", default=False)),
)
