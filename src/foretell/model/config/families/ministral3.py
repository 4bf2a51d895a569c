"""Ministral 3: Mistral with queries that are scaled by their position."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from foretell.model.config.attention import QueryScaling
from foretell.model.config.families.base import Family, Kind
from foretell.model.config.rope import read_rope
from foretell.utils.validation import Fields

_BETA = "llama_4_scaling_beta"
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1,
}  # fmt: skip


def _read(read: Fields, layers: int) -> dict[str, Any]:
    """The values of `ModelConfig` that are Ministral 3's own."""
    head_dim = read.integer("head_dim", default=128, least=2)
    parameters = read.fields("rope_parameters")
    given = Fields(parameters.raw or _ROPE, read.source, "rope_parameters.")
    # `max_position_embeddings` repeats the configuration's own.
    plain = {key: value for key, value in given.raw.items() if key not in (_BETA, "max_position_embeddings")}
    trained = read.integer("max_position_embeddings", least=1)
    rope = read_rope(Fields(plain, read.source, "rope_parameters."), 1e6, trained, head_dim, read)
    beta, window = given.number(_BETA, default=0.0), read.integer("sliding_window", default=0)
    return {
        "head_dim": head_dim,
        "kv_heads": read.integer("num_key_value_heads", default=8, least=1),
        "ffn": read.integer("intermediate_size", least=1),
        "rope": rope,
        "query_scaling": QueryScaling(beta, rope.original_context) if beta else None,
        "window": window,
        "window_layers": tuple(range(layers)) if window else (),
    }


_MSCALE = "rope.scaling.yarn_log_multiplier"


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    beta, mscale, rope = (
        read.number("attention.temperature_scale", default=0.0),
        read.number(_MSCALE, default=0.0),
        values["rope"],
    )
    if mscale and rope.kind == "yarn":
        log = 0.1 * math.log(max(rope.factor, 1.0))
        rope = replace(rope, attention_factor=(log + 1) / (log * mscale + 1))
    return {"rope": rope, "query_scaling": QueryScaling(beta, rope.original_context) if beta else None}


MINISTRAL3 = Family(
    kinds={
        "ministral3": Kind(
            defaults={"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
        )
    },
    gguf_kinds={"mistral3": "ministral3"},
    gguf_interleaved=True,
    prepare_gguf=lambda raw: {key: value for key, value in raw.items() if key != _MSCALE},
    read_gguf=_read_gguf,
    read_all=_read,
)
