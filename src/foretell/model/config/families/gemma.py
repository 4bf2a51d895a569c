"""Gemma 2 and 3: norms after attention and feed-forward, norms that are stored less one, scaled embeddings."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, gguf_windows, window_pattern, windowed
from foretell.model.config.rope import RopeConfig
from foretell.utils.validation import Fields

_SETTINGS: Mapping[str, Any] = {"norm_offset": 1.0, "post_norms": True, "activation": "gelu_tanh", "tied": True}
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
"""Published Gemma files omit even sizes. For other types sizes are required, so that a damaged file is recognised."""


def _windows(read: Fields, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    by_kind = (lambda: tuple(range(0, layers, 2))) if kind == "gemma2" else lambda: window_pattern(read, layers, 6)
    return windowed(read, layers, by_kind)


def _further(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    if read.flag("use_bidirectional_attention", default=False):
        raise ValueError(f"{read.source}: use_bidirectional_attention is not supported: the decoder is causal")
    scalar = read.has("query_pre_attn_scalar")
    return {
        "attention_scale": float(read.positive("query_pre_attn_scalar") ** -0.5) if scalar else None,
        "attention_softcap": read.number("attn_logit_softcapping", default=0.0, least=0),
        "logit_softcap": read.number("final_logit_softcapping", default=0.0, least=0),
        "embedding_scale": values["hidden"] ** 0.5,
    }


_LAYERS_27B = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers of the models of 27B, by which llama.cpp recognises them; only their attention scale is
(hidden / heads) ** -0.5.
"""


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """GGUF files hold the weights of norms with the offset added."""
    hidden, layers, second = values["hidden"], values["layers"], kind == "gemma2"
    return {
        **gguf_windows(read, layers, 2 if second else 6, 4096 if second else 0),
        "local_rope": None if second else RopeConfig(theta=read.positive("rope.freq_base_swa", default=10000.0)),
        "attention_scale": (hidden // values["heads"]) ** -0.5 if layers == _LAYERS_27B[kind] else None,
        "attention_softcap": read.number("attn_logit_softcapping", default=50.0 * second, least=0),
        "logit_softcap": read.number("final_logit_softcapping", default=30.0 * second, least=0),
        "embedding_scale": hidden**0.5,
        "norm_offset": 0.0,
        "tied": True,
    }


_GEMMA2: Mapping[str, Any] = {
    **_DEFAULTS, "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA = Family(
    kinds={
        "gemma2": Kind(
            settings=_SETTINGS,
            defaults=_GEMMA2,
            optional_bias=True,
        ),
        "gemma3_text": Kind(
            settings={**_SETTINGS, "qk_norm": True},
            defaults={**_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
            optional_bias=True,
            local_rope=True,
            text_of="gemma3",
        ),
    },
    gguf_kinds={"gemma2": "gemma2", "gemma3": "gemma3_text"},
    read_gguf=_read_gguf,
    gguf_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    activation_keys=("hidden_activation",),
    read_windows=_windows,
    read_further=_further,
)
