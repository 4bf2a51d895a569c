"""LoRA adapters (Hu et al., arXiv 2106.09685), merged into a model's tensors while these are read, or beside them."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped

from foretell.model.block.spec import LinearWeights
from foretell.model.block.weights import linear_places
from foretell.model.config.families import family_of
from foretell.model.config.families.base import Rows
from foretell.model.config.model import ModelConfig
from foretell.model.load.adapter_change import EXPERT, Change, Factors, check_shape
from foretell.model.load.gguf_adapter import read_gguf
from foretell.model.load.peft_adapter import CONFIG, TENSORS, read_peft
from foretell.model.load.weights import EMBEDDING, HEAD, DelegatedWeights, Weights
from foretell.model.matrices.stored import StoredMatrix
from foretell.utils.validation import read_json

log = logging.getLogger(__name__)
Tensor = torch.Tensor


class AdapterName(NamedTuple):
    """The name of an adapter, None: it has none, and its directory or file."""

    name: str | None
    place: Path


def adapter_folder(folder: Path) -> Path | None:
    """The directory of a PEFT adapter in a directory without a model, or its own `adapter`, which `foretell train uno`
    writes, too; None: there is none.
    """
    config, inside = folder / "config.json", folder / "adapter"
    places = (folder, inside) if not config.is_file() else (inside,) if _is_training(config) else ()
    return next((place for place in places if (place / CONFIG).is_file()), None)


def _is_training(config: Path) -> bool:
    return read_json(config, "train the adapter again").get("kind") == "uno"


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


def _read(config: ModelConfig, weights: Weights, reference: str) -> tuple[Path, Sequence[Path], dict[str, Change]]:
    """The place of an adapter, its files, and what it changes."""
    place = adapter_name(reference).place
    if place.is_dir():
        files, changes = read_peft(place, config, weights)
    elif place.is_file() and place.suffix.lower() == ".gguf":
        files, changes = read_gguf(place, config)
    else:
        raise ValueError(
            f"--lora {reference}: no such adapter; give a directory with {CONFIG} and {TENSORS} (PEFT) or an "
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
    pairs, used, blocks = dict[str, Factors](), Counter[str](), list[dict[str, LinearWeights]]()
    for name, change in changes.items():
        factors = change.factors()
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
                    check_shape(place, name, shape, (each.outputs, layer.inputs), weights)
            if own := {name: pairs[name] for name in names if name in pairs}:
                blocks[i][path] = _beside(own, names, layer.rows)
    return blocks if all(used[name] == len(pair.high) for name, pair in pairs.items()) else None


def _beside(pairs: Mapping[str, Factors], names: Sequence[str], rows: Sequence[Rows]) -> LinearWeights:
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
        check_shape(self._place, name, tuple(changed.shape), tuple(tensor.shape), self)
        return changed


def _refuse_stacked(place: Path, names: Iterable[str], config: ModelConfig, weights: Weights) -> None:
    """Refuse changes of single experts of a layer whose experts are one tensor."""
    family = family_of(config.architecture)
    stem = family.name(family.stacked_names[0])
    for layer in {name.split(".")[2] for name in names if EXPERT.search(name)}:
        if weights.get(f"model.layers.{layer}.{stem}") is not None:
            raise ValueError(
                f"{place}: the adapter changes single experts of layer {layer}, and in {weights.source} these are one "
                "tensor; merge the adapter with PEFT"
            )
