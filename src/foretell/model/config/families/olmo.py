"""OLMo 2 and 3 (arXiv 2501.00656): norms after attention and feed-forward alone, and over all heads together."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, gguf_windows, windowed
from foretell.model.config.rope import RopeConfig
from foretell.utils.validation import Fields

_SETTINGS: Mapping[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "all"}
_DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_THETA = 500000.0
POST_NORMS_GGUF = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _windows(read: Fields, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    if kind == "olmo2":
        return 0, ()
    return windowed(read, layers, lambda: tuple(i for i in range(layers) if (i + 1) % 4))


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """OLMo 3 has a window, and scales the positions of the other layers alone."""
    theta = read.positive("rope.freq_base_swa", "rope.freq_base", default=10000.0)
    windows = gguf_windows(read, values["layers"], 4)
    return windows | {"local_rope": RopeConfig(theta=theta) if windows["window"] else None}


OLMO = Family(
    kinds={
        "olmo2": Kind(_SETTINGS, _DEFAULTS, optional_bias=True),
        "olmo3": Kind(
            _SETTINGS,
            {**_DEFAULTS, "sliding_window": 4096, "rope_theta": _THETA},
            optional_bias=True,
            local_rope=True,
        ),
    },
    gguf_kinds={"olmo2": "olmo2"},
    gguf_names=POST_NORMS_GGUF,
    read_gguf=_read_gguf,
    prepare=lambda raw, source: {"rope_local_base_freq": raw.get("rope_theta") or _THETA, **raw},
    read_windows=_windows,
)
