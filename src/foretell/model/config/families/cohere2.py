"""Command R, R7B and A (Cohere, Cohere 2): parallel blocks with layer norms; in Cohere 2 windows, and no rotation
without one.
"""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, gguf_windows, interleaved_qkv, window_pattern, windowed
from foretell.model.config.families.exaone4 import unrotated_without_window
from foretell.utils.validation import Fields


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    windows = gguf_windows(read, values["layers"], 4)
    return {**windows, **unrotated_without_window({**values, **windows}), "logit_scale": read.positive("logit_scale")}


_SETTINGS = {"parallel_blocks": True, "centered": True, "tied": True}
_DEFAULTS = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
    "bos_token_id": 5, "eos_token_id": 255001,
}  # fmt: skip
_EPS = "attention.layer_norm_epsilon"
COHERE2 = Family(
    kinds={
        "cohere": Kind(_SETTINGS, _DEFAULTS | {"rope_theta": 500000.0}, optional_bias=True),
        "cohere2": Kind(_SETTINGS, _DEFAULTS | {"sliding_window": 4096}, optional_bias=True),
    },
    rows={"qkv": interleaved_qkv},
    gguf_kinds={"cohere2": "cohere2", "command-r": "cohere"},
    prepare_gguf=lambda raw: {"attention.layer_norm_rms_epsilon": raw.get(_EPS), **raw},
    read_gguf=_read_gguf,
    read_windows=lambda read, kind, layers: windowed(read, layers, lambda: window_pattern(read, layers, 4)),
    read_further=lambda read, kind, values: {
        **unrotated_without_window(values),
        "norm_eps": read.number("layer_norm_eps", least=0),
        "logit_scale": read.positive("logit_scale"),
    },
)
