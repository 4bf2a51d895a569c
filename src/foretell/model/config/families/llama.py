"""Llama and its likes, which differ by settings and defaults: SmolLM3, Mistral."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, no_windows, windowed
from foretell.utils.validation import Fields


def _mlp_bias(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"mlp_bias": read.flag("mlp_bias", default=False)}


def _whole_rotation(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    size = values["head_dim"]
    if read.integer("rope.dimension_count", default=size) != size:
        raise read.wrong("rope.dimension_count", f"{size}, all of a head", read.raw["rope.dimension_count"])
    return {}


LLAMA = Family(
    kinds={"llama": Kind(defaults={"max_position_embeddings": 2048}, optional_bias=True)},
    gguf_kinds={"llama": "llama"},
    gguf_interleaved=True,
    read_gguf=_whole_rotation,
    read_windows=no_windows,
    read_further=_mlp_bias,
)
_MINISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
MISTRAL = Family(
    kinds={
        "mistral": Kind(
            defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
            text_of="mistral3",
        ),
        "ministral": Kind(defaults=_MINISTRAL),
    },
    read_windows=lambda read, kind, layers: windowed(
        read, layers, lambda: tuple(range(layers)), types=kind != "mixtral"
    ),
)


def _unrotated(read: Fields, layers: int) -> tuple[int, ...]:
    """Layers without rotary positions."""
    interval = read.integer("no_rope_layer_interval", default=4, least=1)
    rotated = read.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(layers))
    if len(rotated) != layers:
        raise read.wrong("no_rope_layers", f"{layers} of 0 (not rotated) or 1", list(rotated))
    return tuple(i for i, rotates in enumerate(rotated) if not rotates)


def _smollm3_windows(read: Fields, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    if not read.flag("use_sliding_window", default=False):
        return 0, ()
    return windowed(read, layers, lambda: _unrotated(read, layers))


SMOLLM3 = Family(
    kinds={
        "smollm3": Kind(
            settings={"tied": True},
            defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6},
            optional_bias=True,
        )
    },
    gguf_kinds={"smollm3": "smollm3"},
    gguf_interleaved=True,
    read_gguf=lambda read, kind, values, tensors: {"unrotated_layers": tuple(range(3, values["layers"], 4))},
    read_windows=_smollm3_windows,
    read_further=lambda read, kind, values: {
        **_mlp_bias(read, kind, values),
        "unrotated_layers": _unrotated(read, values["layers"]),
    },
)
