"""Foretell's own checkpoints of speculators: a directory with `config.json`, `model.safetensors` and a model card."""

import os
import re
import stat
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.load.safetensors_file import what_is_wrong
from foretell.speculator.config_file import CONFIG, read_config
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import Speculator, SpeculatorConfig
from foretell.utils.paths import replace_file
from foretell.utils.validation import validate

WEIGHTS = "model.safetensors"
_SCALE = "::scale"
"""Suffix of the scales of a matrix that is stored in 8 or 4 bits."""
_GROUP_SIZE = 32
"""Neighbours in a row that share a scale in 4 bits."""
_CLIP_RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Clipping thresholds that 4-bit quantisation tries, relative to a group's absolute maximum."""

_FACTOR = re.compile(r"blocks\.\d+\.scale")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Bits = Literal[16, 8, 4]


def save(folder: Path, network: Speculator, config: SpeculatorConfig, bits: Bits = 16) -> None:
    """Write a speculator; files of the same names in `folder` are replaced, each atomically.

    `bits` per number of a matrix: 16, bfloat16; 8, int8 with a scale per row; 4, two numbers a byte with a scale per 32
    numbers of a row (8 bits for matrices whose width 32 does not divide).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict[str, torch.Tensor]()
    for name, tensor in network.state_dict().items():
        tensors.update(_quantize(name, tensor.detach().cpu(), bits))
    write_weights(folder, tensors)
    replace_file(folder / CONFIG, config.model_dump_json(indent=2) + "\n")


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], name: str = WEIGHTS) -> None:
    """Write or replace a file of tensors atomically, with the permissions of the umask (safetensors alone would let
    only the owner read it).

    Raises:
        ValueError: they cannot be written, as on a full disk.
    """
    part = folder / (name + ".part")
    part.touch()
    mode = stat.S_IMODE(part.stat().st_mode)
    try:
        save_file(tensors, part, metadata={"format": "pt"})
    except SafetensorError as error:
        part.unlink()
        raise ValueError(
            f"{folder}: the weights cannot be written ({error}); make room, or choose another folder"
        ) from error
    part.chmod(mode)
    os.replace(part, folder / name)


def load_own(folder: Path, embedding_and_head: EmbeddingAndHead) -> Speculator:
    """Read what `save` wrote, for the target with this embedding and head; quantised matrices become float32.

    Raises:
        ValueError: a damaged or incomplete checkpoint, or one for a target of other sizes.
    """
    values = read_config(folder)
    kind = str(values.get("kind"))
    if kind not in NETWORKS:
        raise ValueError(f"{folder}: speculators of kind {kind!r} are not known here; known: {', '.join(NETWORKS)}")
    config_type, network_type = NETWORKS[kind]
    network = network_type(validate(config_type, values, str(folder / CONFIG)), embedding_and_head)
    tensors = _read_tensors(folder / WEIGHTS)
    if network.token_of is not None and "token_of" in tensors:
        network.set_draft_vocab(_check_draft_vocab(tensors["token_of"], network, folder))
    wanted = network.state_dict()
    # Earlier versions left out the factor behind each block of Gemma 4, and trained and ran with 1.
    factors = {name: torch.ones_like(t) for name, t in wanted.items() if _FACTOR.fullmatch(name)}
    tensors = factors | tensors
    if set(wanted) != set(tensors):
        missing, surplus = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        what = f"lacks {missing[0]}" if missing else f"holds {surplus[0]}, which this kind does not have"
        raise ValueError(f"{folder / WEIGHTS}: the checkpoint {what}; is it complete?")
    for name, tensor in tensors.items():
        if wanted[name].is_floating_point() != (tensor.dtype in _FLOATS):
            raise ValueError(f"{folder / WEIGHTS}: {name} is stored as {tensor.dtype} without a scale; is it damaged?")
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS}: {str(error).splitlines()[-1].strip()}") from error
    return network


def _check_draft_vocab(tokens: torch.Tensor, network: Speculator, folder: Path) -> torch.Tensor:
    """The draft vocabulary of a checkpoint, which must be ascending tokens of the target."""
    count, vocab = network.config.draft_vocab, network.target_info.vocab
    complete = tokens.dtype == torch.int64 and tokens.shape == (count,) and len(tokens) > 0
    if not complete or bool((tokens.diff() <= 0).any()) or not 0 <= int(tokens[0]) <= int(tokens[-1]) < vocab:
        raise ValueError(
            f"{folder / WEIGHTS}: damaged: token_of is no ascending list of {count} of the target's {vocab} tokens"
        )
    return tokens


def _quantize(name: str, tensor: torch.Tensor, bits: Bits) -> dict[str, torch.Tensor]:
    """The tensors that store a tensor: itself, or the numbers and scales of a matrix."""
    if not tensor.is_floating_point():
        return {name: tensor.contiguous()}
    if bits == 16 or tensor.ndim != 2:
        return {name: tensor.to(torch.bfloat16).contiguous()}
    if bits == 4 and tensor.shape[1] % _GROUP_SIZE == 0:
        return dict(zip((name, name + _SCALE), _quantize_4bit(tensor.float()), strict=True))
    scale = (tensor.float().abs().amax(-1) / 127).clamp_min(1e-12)
    return {name: (tensor.float() / scale[:, None]).round().to(torch.int8), name + _SCALE: scale}


def _quantize_4bit(tensor: Float[torch.Tensor, "r c"]) -> tuple[UInt8[torch.Tensor, "r h"], Float[torch.Tensor, "r g"]]:
    """Numbers from -7 to 7, offset by 7, even columns in the low nibbles; and the scales of the least squared error."""
    groups = tensor.reshape(len(tensor), -1, _GROUP_SIZE)
    largest = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-12)
    scales = torch.stack([largest * ratio for ratio in _CLIP_RATIOS]).bfloat16()
    numbers = (groups / scales).round().clamp(-7, 7)
    best = (numbers * scales - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    scale, number = scales.gather(0, best)[0, :, :, 0], numbers.gather(0, best.expand(-1, -1, -1, _GROUP_SIZE))[0]
    nibbles = (number + 7).to(torch.uint8).flatten(1)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, scale


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as handle:
            raw = {k: handle.get_tensor(k) for k in handle.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(what_is_wrong(file, error)) from error
    scales = {k.removesuffix(_SCALE): raw.pop(k) for k in [k for k in raw if k.endswith(_SCALE)]}
    try:
        return {k: _dequantize(t, scales[k]) if k in scales else t for k, t in raw.items()}
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{file}: scales that do not fit their matrix ({str(error).splitlines()[0]})") from error


def _dequantize(tensor: torch.Tensor, scale: torch.Tensor) -> Float[torch.Tensor, "r c"]:
    if tensor.dtype == torch.int8:
        return tensor.float() * scale[:, None]
    numbers = torch.stack([tensor & 15, tensor >> 4], -1).flatten(1).float() - 7
    return (numbers.view(*scale.shape, _GROUP_SIZE) * scale[:, :, None]).flatten(1)
