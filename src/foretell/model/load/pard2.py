"""Loads PARD-2's projection of its target's hidden states (arXiv 2605.08632)."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import save_file

from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.model.load.safetensors_file import SafetensorsFile
from foretell.utils.validation import Fields, read_json

log = logging.getLogger(__name__)
_CONFIG, _STEM, _WEIGHT, _BIAS = "config.json", "warp_model", "target_proj.weight", "target_proj.bias"
_KEYS = frozenset({
    "pard_token", "pard2", "spd_type", "pard2_target_layers", "pard2_target_dim", "pard_target_dim", "pard2_scale",
    "pard_scale", "feat_scale", "pard2_proj_bias",
})  # fmt: skip
"""Keys of PARD's models beside those of the language model; the last is said by the tensors, too."""
STATE_SCALE = 0.02
"""Factor of what is added, in the authors' code."""


class StateProjection(NamedTuple):
    """What is added to a token's embedding: `weight @ states + bias`, of the target's states at the token before."""

    layers: tuple[int, ...]
    """Layers of the target whose hidden states are read."""
    weight: Float[torch.Tensor, "d ms"]
    bias: Float[torch.Tensor, " d"]


def load_state_projection(folder: Path, hidden: int, target_layers: int, target_hidden: int) -> StateProjection | None:
    """The projection of a draft model of width `hidden`; None: it is not PARD-2, or without one or for another width:
    then it drafts from tokens alone, as it was trained to do, too.

    Raises:
        ValueError: it is damaged, a pickle, has an unknown key of PARD's, or names layers that the target lacks.
    """
    raw = read_json(folder / _CONFIG) if (folder / _CONFIG).is_file() else {}
    read = Fields(raw, str(folder / _CONFIG))
    if not (read.flag("pard2", default=False) or raw.get("spd_type") == "pard2"):
        return None
    refuse_other_keys(Fields({key: raw[key] for key in raw if key.startswith(("pard", "spd"))}, read.source), _KEYS)
    named = read.integers("pard2_target_layers")
    width = read.integer("pard2_target_dim", "pard_target_dim", default=4096)
    fits = width == len(named) * target_hidden
    file = _file_of(folder) if fits else None
    if file is None:
        why = f"there is no {_WEIGHT}" if fits else f"it projects {width} numbers of a target's states"
        log.warning("%s: it drafts from tokens alone: %s", folder, why)
        return None
    # Entries of the list that transformers gives: the embeddings, outputs of blocks, and last the normed output.
    entries = [i + target_layers + 1 if i < 0 else i for i in named]
    if not all(0 <= i <= target_layers for i in entries):
        raise read.wrong("pard2_target_layers", f"of {target_layers + 1} states of its target", list(named))
    scale = read.number("pard2_scale", "pard_scale", "feat_scale", default=STATE_SCALE)
    weight = file.tensor(_WEIGHT).float() * scale
    bias = file.tensor(_BIAS).float() * scale if _BIAS in file.dtypes else torch.zeros(hidden)
    if weight.shape != (hidden, width) or bias.shape != (hidden,):
        raise ValueError(f"{file.path}: {_WEIGHT} should be {hidden} x {width}, found {list(weight.shape)}")
    return StateProjection(tuple(target_layers + 1 if i == target_layers else i for i in entries), weight, bias)


def _file_of(folder: Path) -> SafetensorsFile | None:
    """The file with the projection: its own, which the authors write as a pickle, or the model's."""
    for name in (f"{_STEM}.safetensors", "model.safetensors"):
        if (folder / name).is_file() and _WEIGHT in (file := SafetensorsFile(folder / name)).dtypes:
            return file
    pickle = folder / f"{_STEM}.bin"
    if not pickle.is_file():
        return None
    how = f"write what torch.load reads to {_STEM}.safetensors by save_file of safetensors.torch"
    raise ValueError(f"{pickle}: a pickle, and unpickling can run code; convert it once where you trust it: {how}")


def write_state_projection(folder: Path, projection: StateProjection, target_layers: int) -> dict[str, Any]:
    """Write the projection beside a draft model, and return the keys of its configuration."""
    save_file({_WEIGHT: (projection.weight / STATE_SCALE).contiguous()}, folder / f"{_STEM}.safetensors")
    return {
        "pard2": True, "spd_type": "pard2", "pard2_scale": STATE_SCALE, "pard2_proj_bias": False,
        "pard2_target_dim": projection.weight.shape[1],
        "pard2_target_layers": [-1 if i > target_layers else i for i in projection.layers],
    }  # fmt: skip
