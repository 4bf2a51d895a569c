"""LoRA adapters (Hu et al., arXiv 2106.09685), merged into a model's tensors while these are read: directories of PEFT,
and the GGUF files of llama.cpp.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped

from foretell.model.block.spec import LinearWeights
from foretell.model.block.weights import linear_places, names_of
from foretell.model.config.families import family_of
from foretell.model.config.families.base import Rows
from foretell.model.config.model import ModelConfig
from foretell.model.load.build import OUTER_NAMES
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import TensorInfo
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.safetensors_file import SafetensorsFile
from foretell.model.load.weights import EMBEDDING, HEAD, DelegatedWeights, Weights, candidate_names
from foretell.model.matrices.stored import StoredMatrix
from foretell.utils.validation import Fields, read_json

log = logging.getLogger(__name__)
Tensor = torch.Tensor
Change = Callable[[Float[Tensor, "*shape"]], Float[Tensor, "*shape"]]
"""Makes a tensor of the adapted model of that of the base model."""
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)"
    r"(?:\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector)|\.base_layer|\.modules_to_save)?"
    r"(?:\.default)?(?:\.(?P<end>weight|bias))?"
)
"""Names of tensors in `adapter_model.safetensors`."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base model as they are."""
_DEFAULT = 8.0
"""Rank and alpha in PEFT where nothing else is said."""


class AdapterName(NamedTuple):
    """The name of an adapter, None: it has none, and its directory or file."""

    name: str | None
    place: Path


def adapter_folder(folder: Path) -> Path | None:
    """The directory of a PEFT adapter in a directory without a model, or its own `adapter`; None: there is none."""
    places = (folder, folder / "adapter") if not (folder / "config.json").is_file() else ()
    return next((place for place in places if (place / _CONFIG).is_file()), None)


def adapter_name(reference: str) -> AdapterName:
    """The name and the place of an adapter that is given as `NAME=PLACE` or as `PLACE`, which may have a `=`, too."""
    name, equals, place = reference.partition("=")
    if not equals or not name or Path(reference).expanduser().exists():
        return AdapterName(None, Path(reference).expanduser())
    return AdapterName(name, Path(place).expanduser())


def with_adapter(config: ModelConfig, weights: Weights, reference: str) -> tuple[ModelConfig, Weights]:
    """The configuration and the weights of a model with an adapter, `[NAME=]` a directory of PEFT or a GGUF file. An
    output matrix that is tied to the embedding is one of its own where the adapter changes one of the two.

    Raises:
        ValueError: there is no such adapter, it is damaged, for another model, or of a kind that is not supported.
    """
    place, files, changes = _read(config, weights, reference)
    if weights.storage == "quantized":
        count = sum(name.endswith(".weight") for name in changes)
        log.warning("%s: %d of the quantised matrices are adapted, so they and those packed with them become floats",
                    place, count)  # fmt: skip
    tied = config.tied and not {EMBEDDING, HEAD}.isdisjoint(changes)
    return replace(config, tied=False) if tied else config, AdaptedWeights(weights, place, files, changes, tied)


def _read(config: ModelConfig, weights: Weights, reference: str) -> "tuple[Path, Sequence[Path], dict[str, Change]]":
    """The place of an adapter, its files, and what it changes."""
    place = adapter_name(reference).place
    if place.is_dir():
        files, changes = _read_peft(place, config, weights)
    elif place.is_file() and place.suffix.lower() == ".gguf":
        files, changes = _read_gguf(place, config)
    else:
        raise ValueError(
            f"--lora {reference}: no such adapter; give a directory with {_CONFIG} and {_TENSORS} (PEFT) or an "
            "adapter's .gguf file, with NAME= before it or without"
        )
    _refuse_stacked(place, changes, config, weights)
    return place, files, changes


def read_updates(config: ModelConfig, weights: Weights, reference: str) -> list[dict[str, LinearWeights]] | None:
    """An adapter as updates of low rank beside the weights of a model, for `NativeDecoder.with_updates`; None: it
    changes more than the linear layers of the blocks that every token reads, or not by LoRA alone.

    Raises:
        ValueError: see `with_adapter`.
    """
    place, _, changes = _read(config, weights, reference)
    pairs, used, blocks = dict[str, _Factors](), Counter[str](), list[dict[str, LinearWeights]]()
    for name, change in changes.items():
        factors = change.factors() if isinstance(change, _Module | _Update) else None
        if factors is None:
            return None
        pairs[name] = factors
    family = family_of(config.architecture)
    for i in range(config.layers):
        blocks.append({})
        for path, layer in linear_places(config, i).items():
            names = [f"model.layers.{i}.{family.name(each.name)}.weight" for each in layer.rows]
            for each, name in zip(layer.rows, names, strict=True):
                if name in pairs:
                    used[name] += len(each)
                    shape = pairs[name].high.shape[0], pairs[name].low.shape[1]
                    _check_shape(place, name, shape, (each.outputs, layer.inputs), weights)
            if own := {name: pairs[name] for name in names if name in pairs}:
                blocks[i][path] = _beside(own, names, layer.rows)
    return blocks if all(used[name] == len(pair.high) for name, pair in pairs.items()) else None


def _beside(pairs: "Mapping[str, _Factors]", names: Sequence[str], rows: Sequence[Rows]) -> LinearWeights:
    """The update of a linear layer: what the first factors of its tensors give, one after the other, is read by the
    rows of their tensors alone.
    """
    ranks = [len(pair.low) for pair in pairs.values()]
    first = dict(zip(pairs, accumulate(ranks, initial=0), strict=False))
    parts = list[Tensor]()
    for name, each in zip(names, rows, strict=True):
        parts.append(torch.zeros(len(each), sum(ranks)))
        if name in pairs:
            high = pairs[name].high if each.chosen is None else pairs[name].high[torch.tensor(each.chosen)]
            parts[-1][:, first[name] : first[name] + high.shape[1]] = high
    return LinearWeights(tuple(parts), factor=torch.cat([pair.low for pair in pairs.values()]))


class _Factors(NamedTuple):
    """An update of a matrix: `high @ low`."""

    low: Float[Tensor, "r i"]
    high: Float[Tensor, "o r"]


class AdaptedWeights(DelegatedWeights):
    """A checkpoint with an adapter merged into its tensors, in float32. `files` are the adapter's; `unties`: the output
    matrix of the checkpoint is its embedding.
    """

    def __init__(
        self, inner: Weights, place: Path, files: Sequence[Path], changes: Mapping[str, Change], unties: bool
    ) -> None:
        super().__init__(inner)
        self._place, self._changes, self._unties = place, changes, unties
        self.files = [*inner.files, *files] if inner.files else ()
        digest = hashlib.sha256((inner.adapter or "").encode())
        for file in files:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        self.adapter = digest.hexdigest()

    def maps(self, name: str) -> bool:
        """As in the checkpoint, unless the adapter changes it."""
        return name not in self._changes and super().maps(name)

    def get(self, name: str) -> Shaped[Tensor, "*shape"] | None:
        """The tensor of this name, or None."""
        tensor = super().get(name)
        return None if tensor is None else self._changed(name, tensor)

    def require(self, name: str, *shape: int) -> Float[Tensor, "*shape"]:
        """The tensor of this name and shape."""
        return self._changed(name, super().require(name, *shape))

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape: as the file stores it, unless the adapter changes it."""
        return self._merged(name, super().matrix(name, outputs, inputs))

    def head(self, vocab: int, hidden: int) -> Float[Tensor, "v d"] | None:
        """The output matrix; None: it is tied to the embedding."""
        matrix = self.head_matrix(vocab, hidden)
        return None if matrix is None else matrix.widen()

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix | None:
        """As `head`, but as the file stores it."""
        tied = self._unties
        head = self._inner.matrix(EMBEDDING, vocab, hidden) if tied else self._inner.head_matrix(vocab, hidden)
        return head if head is None else self._merged(HEAD, head)

    def _merged(self, name: str, matrix: StoredMatrix) -> StoredMatrix:
        return StoredMatrix.of(self._changed(name, matrix.widen())) if name in self._changes else matrix

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor after the adapter's change.

        Raises:
            ValueError: the change is for a tensor of another shape.
        """
        if name not in self._changes:
            return tensor
        changed: Tensor = self._changes[name](tensor.float())
        _check_shape(self._place, name, tuple(changed.shape), tuple(tensor.shape), self)
        return changed


def _check_shape(place: Path, name: str, shape: tuple[int, ...], wanted: tuple[int, ...], weights: Weights) -> None:
    if shape != wanted:
        raise ValueError(
            f"{place}: the adapter is for another model: it changes {name} as a tensor of shape {shape}, and that of "
            f"{weights.source} has {wanted}"
        )


def _sum(base: Tensor, update: Tensor) -> Tensor:
    """The base with an update of the same shape; of another, the update, whose shape is refused then."""
    return base + update if base.shape == update.shape else update


@dataclass(frozen=True)
class _Module:
    """What a directory of PEFT has for the weight of a module."""

    parts: Mapping[str, Tensor]
    """By the part of their names after the module."""
    scale: float

    def __call__(self, base: Tensor) -> Tensor:
        """The weight that PEFT merges: W + s B A, its rows scaled to the magnitudes of DoRA (arXiv 2402.09353)."""
        parts = {name: part.float() for name, part in self.parts.items()}
        base = parts.get("weight", base)
        if "lora_B" in parts:
            base = _sum(base, self.scale * (parts["lora_B"] @ parts["lora_A"]))
        if "lora_embedding_B" in parts:
            base = _sum(base, self.scale * (parts["lora_embedding_B"] @ parts["lora_embedding_A"]).T)
        if "lora_magnitude_vector" in parts:
            base = base * (parts["lora_magnitude_vector"].flatten() / base.norm(dim=1))[:, None]
        return base

    def factors(self) -> _Factors | None:
        """The update; None: there is more than one of a linear layer."""
        if set(self.parts) != {"lora_A", "lora_B"}:
            return None
        return _Factors(self.parts["lora_A"].float(), self.scale * self.parts["lora_B"].float())


def _read_peft(place: Path, config: ModelConfig, weights: Weights) -> tuple[list[Path], dict[str, Change]]:
    """Files and changes of a directory of PEFT. All layers here are linear, so `fan_in_fan_out` changes nothing."""
    for name, remedy in ((_CONFIG, "save it with PEFT"), (_TENSORS, "a pickle is not read; save it as safetensors")):
        if not (place / name).is_file():
            raise ValueError(f"{place}: an adapter of PEFT was asked for, and there is no {name} here; {remedy}")
    fields = Fields(read_json(place / _CONFIG, "save the adapter again"), str(place / _CONFIG))
    _refuse_unsupported(fields.raw, place)
    file, modules = SafetensorsFile(place / _TENSORS), dict[str, dict[str, Tensor]]()
    for key in file.dtypes:
        match, tensor = _KEY.fullmatch(key), file.tensor(key)
        inside, end = ("", "") if match is None else (match["part"] or "", match["end"] or "")
        if match is None or not (inside or end) or (inside and end == "bias") or not tensor.is_floating_point():
            raise _unknown(place, key, weights)
        modules.setdefault(match["module"], {})[inside or end] = tensor
    names, changes = _known_names(config), dict[str, Change]()
    for module, parts in modules.items():
        own: dict[str, Change] = {"bias": partial(_replaced, parts.pop("bias"))} if "bias" in parts else {}
        if parts:
            own["weight"] = _module(fields, place, module, parts)
        for end, change in own.items():
            known = _find(f"{module}.{end}", names, config)
            if known is None:
                raise _unknown(place, f"{module}.{end}", weights)
            _refuse_vector_of_gguf(place, known, parts, weights)
            changes[known] = change
    return [place / _CONFIG, place / _TENSORS], changes


def _replaced(tensor: Tensor, base: Tensor) -> Tensor:
    return tensor.float()


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
        raise ValueError(f"{place}: {asked} in {_CONFIG} is not supported; merge the adapter with PEFT")


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
            f"{place}: {module} needs lora_A and lora_B of the rank {rank:g} that {_CONFIG} says, found {shapes}; "
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


def _known_names(config: ModelConfig) -> dict[str, str]:
    """The tensors that the decoder reads, by all names that they may have; `{}` is the number of an expert."""
    inner = (f"model.layers.{i}.{name}" for i in range(config.layers) for name in names_of(config, i))
    outer = EMBEDDING, HEAD, f"{family_of(config.architecture).final_norm}.weight", *OUTER_NAMES
    named = [name for name in (*outer, *inner) if name.endswith((".weight", ".bias"))]
    return {each: name for name in reversed(named) for each in candidate_names(name)}


def _find(own: str, names: Mapping[str, str], config: ModelConfig) -> str | None:
    """The name in the model of the adapter's tensor; None: there is no such tensor."""
    expert = _EXPERT.search(own)
    name = names.get(own if expert is None else own.replace(expert[0], ".experts.{}."))
    if name is None or expert is None:
        return name
    assert config.experts is not None
    return name.replace("{}", expert[1]) if int(expert[1]) < config.experts.count else None


def _refuse_stacked(place: Path, names: Iterable[str], config: ModelConfig, weights: Weights) -> None:
    """Refuse changes of single experts of a layer whose experts are one tensor."""
    family = family_of(config.architecture)
    stem = family.name(family.stacked_names[0])
    for layer in {name.split(".")[2] for name in names if _EXPERT.search(name)}:
        if weights.get(f"model.layers.{layer}.{stem}") is not None:
            raise ValueError(
                f"{place}: the adapter changes single experts of layer {layer}, and in {weights.source} these are one "
                "tensor; merge the adapter with PEFT"
            )


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


class _Updates(GGUF):
    """The updates of an adapter in GGUF, as tensors of the file that it adapts."""

    def __init__(self, file: GGUF) -> None:
        self.path, self.files, self.mapped, self.metadata = file.path, file.files, file.mapped, file.metadata
        self._factors, pairs = file, dict[str, dict[str, TensorInfo]]()
        self.ranks = dict[str, int]()
        for name, entry in file.tensors.items():
            own, _, end = name.rpartition(".lora_")
            if end not in ("a", "b"):
                raise ValueError(f"{file.path}: {name} in an adapter is no .lora_a or .lora_b; convert it again")
            pairs.setdefault(own, {})[end] = entry
        self.tensors = {name: self._merged(name, pair) for name, pair in pairs.items()}

    def _merged(self, name: str, pair: Mapping[str, TensorInfo]) -> TensorInfo:
        """The update of a pair, as a tensor of the file."""
        low, high = (pair[end].shape if end in pair else () for end in "ab")
        rank = low[-1:] if name == "token_embd.weight" else low[-2:-1]
        if len(low) < 2 or len(low) != len(high) or rank != high[-1:]:
            raise ValueError(
                f"{self.path}: {name} needs .lora_a and .lora_b of one rank, found shapes {low} and {high}; convert "
                "the adapter again"
            )
        self.ranks[name] = high[-1]
        shape = (low[0], high[0]) if name == "token_embd.weight" else (*high[:-1], low[-1])
        return TensorInfo(shape, 0, 0)

    def load_tensor(self, name: str, expert: int | None = None) -> Float[Tensor, "*shape"]:
        """The update of the tensor of this name, as llama.cpp scales it. The embedding's first factor is transposed."""
        low, high = (self._factors.load_tensor(f"{name}.lora_{end}", expert) for end in "ab")
        alpha = float(self.metadata.get("adapter.lora.alpha") or 0)
        scale = alpha / high.shape[-1] if alpha else 1.0
        product: Tensor = low @ high.T if name == "token_embd.weight" else high @ low
        return scale * product


class _UpdateWeights(GGUFWeights):
    """The updates by the names of the tensors that they change."""

    def __init__(self, file: _Updates, config: ModelConfig) -> None:
        super().__init__(file, config)
        self._ranks = file.ranks

    def rank(self, name: str) -> int:
        """The greatest rank that the update of a matrix can have."""
        return sum(self._ranks[part.tensor] for part in self._parts(name))


def _read_gguf(place: Path, config: ModelConfig) -> tuple[list[Path], dict[str, Change]]:
    """Files and changes of an adapter in GGUF; rows are in the order of GGUF, which the reader of models knows."""
    file = GGUF(place)
    kinds = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise ValueError(
            f"--lora {place}: this file is no LoRA adapter (general.type is {kinds[0]}); name it as --model"
        )
    if file.metadata.get("adapter.alora.invocation_tokens"):
        raise ValueError(f"{place}: activated LoRA (adapter.alora.invocation_tokens) is not supported")
    named = str(file.metadata.get("general.architecture"))
    if named == "llama" and config.architecture == "mistral":
        config = replace(config, architecture="llama")  # whose order of rows the file has
    if named not in family_of(config.architecture).gguf_kinds and (named, config.architecture) != ("llama", "mixtral"):
        raise ValueError(
            f"{place}: the adapter is for a model of the architecture {named}, and this one is {config.architecture}"
        )
    updates = _UpdateWeights(_Updates(file), config)
    changes = dict[str, Change]()
    for name in set(_known_names(config).values()):
        experts = range(config.experts.count) if "{}" in name and config.experts is not None else range(1)
        own = (name.replace("{}", str(i)) for i in experts)
        changes |= {each: _Update(updates, each) for each in own if updates.has(each)}
    return file.files, changes


@dataclass(frozen=True)
class _Update:
    """What an adapter in GGUF adds to a tensor."""

    updates: _UpdateWeights
    name: str

    def __call__(self, base: Tensor) -> Tensor:
        return _sum(base, self._whole)

    @property
    def _whole(self) -> Tensor:
        update = self.updates.get(self.name)
        assert update is not None
        return update

    def factors(self) -> _Factors | None:
        """The update; its first factor is an orthonormal basis of its rows, since those of the file may be of other
        rows and columns. None: it is not of a linear layer.
        """
        if not self.name.startswith("model.layers.") or _EXPERT.search(self.name):
            return None
        whole, drawn = self._whole.double(), torch.Generator().manual_seed(0)
        sketch = torch.randn(len(whole), self.updates.rank(self.name), generator=drawn, dtype=torch.float64)
        basis = torch.linalg.qr(whole.T @ sketch).Q
        return _Factors(basis.T.float().contiguous(), (whole @ basis).float())
