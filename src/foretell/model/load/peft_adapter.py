"""Directories of PEFT with a LoRA adapter, whose weights may be scaled to magnitudes (DoRA, arXiv 2402.09353)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.model.config.model import ModelConfig
from foretell.model.load.adapter_change import EXPERT, Change, Factors, added, known_names
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.safetensors_file import SafetensorsFile
from foretell.model.load.weights import Weights
from foretell.utils.validation import Fields, read_json

Tensor = torch.Tensor
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)"
    r"(?:\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector)|\.base_layer|\.modules_to_save)?"
    r"(?:\.default)?(?:\.(?P<end>weight|bias))?"
)
"""Names of tensors in `adapter_model.safetensors`."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base model as they are."""
_DEFAULT = 8.0
"""Rank and alpha in PEFT where nothing else is said."""


@dataclass(frozen=True)
class _Module(Change):
    """What a directory of PEFT has for the weight of a module."""

    parts: Mapping[str, Tensor]
    """By the part of their names after the module."""
    scale: float

    def __call__(self, base: Tensor) -> Tensor:
        """The weight that PEFT merges: W + s B A, its rows scaled to the magnitudes of DoRA (arXiv 2402.09353)."""
        parts = {name: part.float() for name, part in self.parts.items()}
        base = parts.get("weight", base)
        if "lora_B" in parts:
            base = added(base, self.scale * (parts["lora_B"] @ parts["lora_A"]))
        if "lora_embedding_B" in parts:
            base = added(base, self.scale * (parts["lora_embedding_B"] @ parts["lora_embedding_A"]).T)
        if "lora_magnitude_vector" in parts:
            base = base * (parts["lora_magnitude_vector"].flatten() / base.norm(dim=1))[:, None]
        return base

    def factors(self) -> Factors | None:
        """The update; None: there is more than one of a linear layer."""
        if set(self.parts) != {"lora_A", "lora_B"}:
            return None
        return Factors(self.parts["lora_A"].float(), self.scale * self.parts["lora_B"].float())


def read_peft(place: Path, config: ModelConfig, weights: Weights) -> tuple[list[Path], dict[str, Change]]:
    """Files and changes of a directory of PEFT. All layers here are linear, so `fan_in_fan_out` changes nothing."""
    for name, remedy in ((CONFIG, "save it with PEFT"), (TENSORS, "a pickle is not read; save it as safetensors")):
        if not (place / name).is_file():
            raise ValueError(f"{place}: an adapter of PEFT was asked for, and there is no {name} here; {remedy}")
    fields = Fields(read_json(place / CONFIG, "save the adapter again"), str(place / CONFIG))
    _refuse_unsupported(fields.raw, place)
    file, modules = SafetensorsFile(place / TENSORS), dict[str, dict[str, Tensor]]()
    for key in file.dtypes:
        match, tensor = _KEY.fullmatch(key), file.tensor(key)
        inside, end = ("", "") if match is None else (match["part"] or "", match["end"] or "")
        if match is None or not (inside or end) or (inside and end == "bias") or not tensor.is_floating_point():
            raise _unknown(place, key, weights)
        modules.setdefault(match["module"], {})[inside or end] = tensor
    names, changes = known_names(config), dict[str, Change]()
    for module, parts in modules.items():
        own: dict[str, Change] = {"bias": _Module({"weight": parts.pop("bias")}, 1.0)} if "bias" in parts else {}
        if parts:
            own["weight"] = _module(fields, place, module, parts)
        for end, change in own.items():
            known = _find(f"{module}.{end}", names, config)
            if known is None:
                raise _unknown(place, f"{module}.{end}", weights)
            _refuse_vector_of_gguf(place, known, parts, weights)
            changes[known] = change
    return [place / CONFIG, place / TENSORS], changes


def _refuse_unsupported(raw: Mapping[str, Any], place: Path) -> None:
    """Refuse adapters whose update is not that of LoRA or DoRA on linear layers and embeddings."""
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise ValueError(f"{place}: an adapter of the kind {kind}, and only LORA is supported; merge it with PEFT")
    start = raw.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ValueError(
            f"{place}: init_lora_weights {start!r} changed the base model's weights, which are not saved here; save "
            "the adapter with path_initial_model_for_weight_conversion of PEFT, or merge it"
        )
    further = "target_parameters", "layer_replication", "alora_invocation_tokens", "use_qalora"
    asked = next((name for name in further if raw.get(name)), None)
    if asked is not None:
        raise ValueError(f"{place}: {asked} in {CONFIG} is not supported; merge the adapter with PEFT")


def _module(fields: Fields, place: Path, module: str, parts: Mapping[str, Tensor]) -> _Module:
    """The change of a module's weight."""
    stem = "lora_embedding_" if "lora_embedding_A" in parts or "lora_embedding_B" in parts else "lora_"
    low, high = parts.get(f"{stem}A"), parts.get(f"{stem}B")
    if low is None and high is None and set(parts) == {"weight"}:
        return _Module(parts, 1.0)
    rank = _of_pattern(fields, "rank_pattern", module, fields.number("r", default=_DEFAULT))
    if low is None or high is None or low.ndim != 2 or high.ndim != 2 or not 1 <= len(low) == high.shape[1] == rank:
        shapes = {name: tuple(tensor.shape) for name, tensor in parts.items()}
        raise ValueError(
            f"{place}: {module} needs lora_A and lora_B of the rank {rank:g} that {CONFIG} says, found {shapes}; "
            "save the adapter again"
        )
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and magnitude.numel() != len(high):
        raise ValueError(f"{place}: DoRA's magnitudes of {module} are not as many as its outputs; save it again")
    if magnitude is not None and stem != "lora_":
        raise ValueError(f"{place}: DoRA of the embedding {module} is not supported; merge the adapter with PEFT")
    alpha = _of_pattern(fields, "alpha_pattern", module, fields.number("lora_alpha", default=_DEFAULT))
    return _Module(parts, alpha / (rank**0.5 if fields.flag("use_rslora", default=False) else rank))


def _of_pattern(fields: Fields, name: str, module: str, default: float) -> float:
    """The number for a module: that of the first pattern that ends its name, as PEFT takes it."""
    patterns = fields.raw.get(name) or {}
    if not isinstance(patterns, dict):
        raise fields.wrong(name, "an object", patterns)
    for pattern in patterns:
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as error:
            raise fields.wrong(name, "regular expressions", pattern) from error
        if fits:
            return Fields(patterns, fields.source, f"{name}.").number(pattern)
    return default


def _find(own: str, names: Mapping[str, str], config: ModelConfig) -> str | None:
    """The name in the model of the adapter's tensor; None: there is no such tensor."""
    expert = EXPERT.search(own)
    name = names.get(own if expert is None else own.replace(expert[0], ".experts.{}."))
    if name is None or expert is None:
        return name
    assert config.experts is not None
    return name.replace("{}", expert[1]) if int(expert[1]) < config.experts.count else None


def _refuse_vector_of_gguf(place: Path, name: str, parts: Mapping[str, Tensor], weights: Weights) -> None:
    whole = parts.get("weight")
    if isinstance(weights, GGUFWeights) and name.endswith(".weight") and whole is not None and whole.ndim == 1:
        raise ValueError(
            f"{place}: the adapter has its own {name}, which GGUF files store in other numbers; load the directory of "
            "the base model instead"
        )


def _unknown(place: Path, name: str, weights: Weights) -> ValueError:
    return ValueError(
        f"{place}: the adapter has a tensor for {name}, which the model of {weights.source} does not have or which "
        "cannot be merged into it; is it for another model?"
    )
