"""The tensors of a GGUF file by their Hugging Face names."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from foretell.model.block.weights import names_of
from foretell.model.config.families import family_of
from foretell.model.config.families.base import PredictionNames
from foretell.model.config.model import ModelConfig
from foretell.model.load.build import LAYER_INPUTS_NORM, LAYER_INPUTS_PROJECTION, LAYER_INPUTS_TABLE
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import (
    OUTER_NAMES,
    ROPE_FACTORS,
    TensorInfo,
    check_model,
    kind_name,
)
from foretell.model.load.nearest_blocks import Nearest, nearest_of
from foretell.model.load.weights import EMBEDDING, HEAD, Storage, Weights
from foretell.model.matrices.kinds import BLOCKS
from foretell.model.matrices.stored import StoredMatrix

Tensor = torch.Tensor
log = logging.getLogger(__name__)

_OUTER = EMBEDDING, HEAD, LAYER_INPUTS_TABLE, LAYER_INPUTS_PROJECTION, LAYER_INPUTS_NORM
_GGUF_NAMES = dict(zip(_OUTER, OUTER_NAMES, strict=True))
_OF_CONFIG = {f"{name}.weight" for name in ROPE_FACTORS}
"""Tensors that are a part of the configuration."""
_ONE = torch.ones(1)
_FACTOR = re.compile(r"(.+)\.(?:input_)?scale")
"""Names of factors of matrices (of NVFP4) or of their inputs, which stay unrounded here."""
_EXPERT = re.compile(r"(?:^|(?<=\.))experts\.(\d+|\{\})\.")


def gguf_place(name: str, config: ModelConfig) -> tuple[str, int | None]:
    """The name in GGUF of the tensor that holds this tensor of Hugging Face, and the index of the expert whose part it
    is; None: all of it.
    """
    layer, own, expert = _split(name)
    family = family_of(config.architecture)
    if layer is not None:
        return f"blk.{layer}.{family.gguf_name(own)}", expert
    if name == f"{family.final_norm}.weight":
        return f"{family.gguf_names.get(family.final_norm, 'output_norm')}.weight", None
    return _GGUF_NAMES.get(name, name), None


def _split(name: str) -> tuple[str | None, str, int | None]:
    """The layer of a tensor, its name in the block with `{}` for the number of an expert, and this number."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if not name.startswith("model.layers."):
        return None, name, None
    expert = _EXPERT.search(rest)
    number = None if expert is None or expert[1] == "{}" else int(expert[1])
    return layer, _EXPERT.sub("experts.{}.", rest), number


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor in the file."""

    tensor: str
    expert: int | None
    rows: Tensor | None = None
    """In this order; None: all."""


class GGUFWeights(Weights):
    """Tensors of a GGUF file, dequantised; llama.cpp's interleaved rotary order becomes the half-split order.

    `predicts`: the file may hold the layer of multi-token prediction alone.
    """

    def __init__(self, file: GGUF, config: ModelConfig, predicts: bool = False) -> None:
        self.source, self._file, self._config = str(file.path), file, config
        self.files, self.mapped, self._family = file.files, file.mapped, family_of(config.architecture)
        if not predicts:
            check_model(file)
        if lossy := {kind_name(e.ggml_type): near.words for e in file.tensors.values() if (near := self._lossy(e))}:
            log.warning("%s: %s", self.source, ", ".join(f"{kind} is read as {words}" for kind, words in lossy.items()))
        self._scales = self._require_read()
        """Factors of matrices, one or one for each expert, by the names of these (NVFP4)."""

    def _require_read(self) -> dict[str, Tensor]:
        """Check that every tensor of the file is read; the factors of its matrices."""
        config = self._config
        outer = *_GGUF_NAMES, f"{family_of(config.architecture).final_norm}.weight"
        inner = (f"model.layers.{i}.{name}" for i in range(config.layers) for name in names_of(config, i))
        known = {part.tensor for name in (*outer, *inner) for part in self._parts(name)} | _OF_CONFIG
        own = [name for name in self._file.tensors if not (self._predicts(name) or self._can_be_left(name))]
        factors = {name: matrix for name in self._file.tensors if name not in known and (matrix := self._scaled(name))}
        unread = next((name for name in own if name not in known and name not in factors), None)
        if unread is not None:
            raise ValueError(
                f"{self.source}: the file has a tensor {unread}, which the decoder of {config.architecture} does not "
                "read, so its answers would be others; it may be of an architecture that is not supported yet"
            )
        used = [name for name in factors if not name.endswith(".input_scale")]
        return {factors[name]: self._file.load_tensor(name).flatten() for name in used}

    @staticmethod
    def _lossy(tensor: TensorInfo) -> Nearest | None:
        """The type that a matrix becomes, if it has not all of its numbers."""
        nearest = nearest_of(tensor.ggml_type) if len(tensor.shape) > 1 else None
        return nearest if nearest is not None and nearest.loss else None

    def _can_be_left(self, name: str) -> bool:
        return name.startswith("blk.") and name.split(".", 2)[-1].startswith(self._family.unread)

    def _scaled(self, name: str) -> str | None:
        """The matrix, or those of all experts, that this tensor scales, or whose inputs it does; None: it is none."""
        match, tensors = _FACTOR.fullmatch(name), self._file.tensors
        matrix = "" if match is None else f"{match[1]}.weight"
        if matrix not in tensors:
            return None
        experts = tensors[matrix].shape[0] if len(tensors[matrix].shape) == 3 else 1
        return matrix if prod(tensors[name].shape) in (1, experts) else None

    def _load(self, part: "_Part") -> Tensor:
        """The tensor of a part in the file, times its factor."""
        whole: Tensor = self._file.load_tensor(part.tensor, part.expert)
        factors = self._scales.get(part.tensor)
        if factors is None:
            return whole
        if len(factors) == 1:
            return whole * factors
        return whole * (factors[:, None, None] if part.expert is None else factors[part.expert])

    def _predicts(self, name: str) -> bool:
        """Whether a tensor belongs to a layer of multi-token prediction, which follow the model's own."""
        return name.startswith(tuple(f"blk.{i}." for i in self._predicting))

    @property
    def _predicting(self) -> range:
        """The numbers of the layers of multi-token prediction, by the metadata."""
        own = self._config.layers
        return range(own, own + self._file.metadata.get(f"{self._kind}.nextn_predict_layers", 0))

    def prediction_names(self, names: PredictionNames) -> PredictionNames:
        """Those of the first layer after the model's own.

        Raises:
            ValueError: the file lacks a layer after it, which it should have by its metadata.
        """
        there = [f"blk.{i}.nextn.eh_proj.weight" in self._file.tensors for i in self._predicting]
        if any(there) and not all(there):
            raise ValueError(
                f"{self.source}: it should have {len(there)} layers of multi-token prediction, and block "
                f"{self._config.layers + there.index(False)} is none; is the file complete?"
            )
        at = f"model.layers.{self._config.layers}."
        norm = f"{at}nextn.shared_head_norm"
        return PredictionNames(
            layer=at,
            norm=norm if self._parts(f"{norm}.weight") else self._family.final_norm,
            combine=f"{at}nextn.eh_proj",
            embedding_norm=f"{at}nextn.enorm",
            hidden_norm=f"{at}nextn.hnorm",
            several=names.several,
        )

    @property
    def _kind(self) -> str:
        """The architecture that the file names."""
        return str(self._file.metadata["general.architecture"])

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, or None."""
        parts = self._parts(name)
        if not parts:
            return None
        if joined := self._joined(name):
            _, join = self._family.gguf_joined[_split(name)[1]]
            made: Tensor = join(*map(self._load, joined), self._config)
            return made
        loaded = [(self._load(part), part.rows) for part in parts]
        pieces = [whole if rows is None else whole[rows] for whole, rows in loaded]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        _, own, _ = _split(name)
        change = self._family.gguf_vectors.get(own)
        tensor = tensor if change is None else change(tensor, self._config, self._kind)
        columns = self._columns(own)
        return tensor if columns is None else tensor[:, columns]

    def _checked(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor in this shape; dimensions of one may be left out or added."""
        same = [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]
        if same or (len(shape) == 1 and tensor.numel() == shape[0]):
            return tensor.reshape(shape)
        checked: Tensor = super()._checked(name, tensor, shape)
        return checked

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape, as the file stores it: a view of the mapped file where rows keep their
        order. Storage types without a `Kind` are widened.
        """
        stored = self._stored(name)
        return super().matrix(name, outputs, inputs) if stored is None or stored.shape != (outputs, inputs) else stored

    def _joined(self, name: str) -> list[_Part]:
        """The tensors that one is made of; none: it is not."""
        layer, own, _ = _split(name)
        names, _ = self._family.gguf_joined.get(own, ((), None))
        made = [_Part(f"blk.{layer}.{each}", None) for each in names]
        return made if all(part.tensor in self._file.tensors for part in made) else []

    def _stored(self, name: str) -> StoredMatrix | None:
        """The matrix of this name as the file stores it; None: it has to be widened."""
        pieces = list[StoredMatrix]()
        for part in () if self._joined(name) else self._parts(name):
            factors = self._scales.get(part.tensor, _ONE)
            factor = float(factors[0 if len(factors) == 1 or part.expert is None else part.expert])
            whole = self._file.stored_matrix(part.tensor, part.expert, factor)
            if whole is None or (len(factors) > 1 and part.expert is None):
                return None
            pieces.append(whole if part.rows is None else whole.rows(part.rows))
        if not pieces or any((p.kind, p.inputs) != (pieces[0].kind, pieces[0].inputs) for p in pieces):
            return None
        first, columns = pieces[0], self._columns(_split(name)[1])
        if len(pieces) > 1:
            first = StoredMatrix(first.kind, first.inputs, torch.cat([piece.data for piece in pieces]))
        return first if columns is None else _with_columns(first, columns)

    def has(self, name: str) -> bool:
        """Whether the file has all parts of a tensor."""
        return bool(self._parts(name))

    @property
    def storage(self) -> Storage:
        """By the types of the tensors in the blocks."""
        return self._file.storage

    def maps(self, name: str) -> bool:
        """Whether the file stores it in one of the known kinds."""
        return all(self._file.maps(part.tensor) for part in self._parts(name)) and self._stored(name) is not None

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix | None:
        """The output matrix as the file stores it; None: it is tied to the embedding."""
        return self.matrix(HEAD, vocab, hidden) if self._parts(HEAD) else None

    def _parts(self, name: str) -> list[_Part]:
        """The rows of which a tensor consists; none: the file does not have it."""
        layer, own, expert = _split(name)
        module, _, end = own.rpartition(".")
        rows = self._family.gguf_rows.get(module)
        if layer is not None and rows is not None:
            made = [
                _Part(f"blk.{layer}.{each.name}.{end}", expert, _order(each.chosen))
                for each in rows(self._config, self._kind) or ()
            ]
            if made and all(part.tensor in self._file.tensors for part in made):
                return made
        if joined := self._joined(name):
            return joined
        place, expert = gguf_place(name, self._config)
        if place not in self._file.tensors:
            return []
        return [_Part(place, expert, self._half_split_order(place) if self._is_interleaved(name) else None)]

    def _columns(self, own: str) -> Tensor | None:
        """The columns of a matrix of a block in the file."""
        columns = self._family.gguf_inputs.get(own.removesuffix(".weight"))
        return None if columns is None else _order(columns(self._config, self._kind))

    def _is_interleaved(self, name: str) -> bool:
        """Whether the rows of a head are in llama.cpp's order: pairs of the two halves."""
        return self._family.gguf_interleaved and name.split(".")[-2] in ("q_proj", "k_proj")

    def _half_split_order(self, tensor: str) -> Tensor:
        rows = self._file.tensors[tensor].shape[0]
        return torch.arange(rows).view(-1, self._config.head_dim // 2, 2).transpose(1, 2).flatten()


def _order(chosen: Sequence[int] | None) -> Tensor | None:
    return None if chosen is None else torch.tensor(chosen)


def _with_columns(matrix: StoredMatrix, columns: Tensor) -> StoredMatrix:
    """The matrix with its columns in this order: its blocks where they stay whole, else widened."""
    per_block, size = BLOCKS[matrix.kind]
    blocks = columns.view(-1, per_block)
    first = blocks[:, 0]
    if torch.equal(blocks, first[:, None] + torch.arange(per_block)) and not (first % per_block).any():
        data = matrix.data.view(matrix.outputs, -1, size)[:, first // per_block]
        return StoredMatrix(matrix.kind, matrix.inputs, data.reshape(matrix.outputs, -1))
    return StoredMatrix.of(matrix.widen()[:, columns])
