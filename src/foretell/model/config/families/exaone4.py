"""EXAONE 4 (arXiv 2507.11407): norms after attention and feed-forward alone; windows, and no rotation without one."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, gguf_windows, window_pattern, windowed
from foretell.model.config.families.olmo import POST_NORMS_GGUF
from foretell.utils.validation import Fields


def unrotated_without_window(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """No rotation in layers without a window, of models that have windows."""
    full = tuple(i for i in range(values["layers"]) if i not in values["window_layers"])
    return {"unrotated_layers": full if values["window"] else ()}


_LAYERS_32B = 64
"""By which llama.cpp recognises the model that has a window where its file has none."""


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    layers = values["layers"]
    windows = gguf_windows(read, layers, 4, 4096 * (layers == _LAYERS_32B))
    return {**windows, **unrotated_without_window({**values, **windows})}


_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
    "sliding_window_pattern": 4, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
EXAONE4 = Family(
    kinds={"exaone4": Kind({"pre_norms": False, "post_norms": True, "qk_norm": True}, _DEFAULTS)},
    gguf_kinds={"exaone4": "exaone4"},
    gguf_names=POST_NORMS_GGUF,
    read_gguf=_read_gguf,
    read_windows=lambda read, kind, layers: windowed(read, layers, lambda: window_pattern(read, layers)),
    read_further=lambda read, kind, values: unrotated_without_window(values),
)
