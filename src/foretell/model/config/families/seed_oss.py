"""Seed-OSS: Llama with biases of queries, keys and values."""

from foretell.model.config.families.base import Family, Kind, no_windows

_DEFAULTS = {
    "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
SEED_OSS = Family(
    kinds={"seed_oss": Kind(defaults=_DEFAULTS)},
    gguf_kinds={"seed_oss": "seed_oss"},
    gguf_names={"post_attention_layernorm": "post_attention_norm"},
    read_windows=no_windows,
    read_further=lambda read, kind, values: {
        "qkv_bias": read.flag("attention_bias", default=True),
        "output_bias": read.flag("attention_out_bias", default=False),
        "mlp_bias": read.flag("mlp_bias", default=False),
    },
)
