"""The tensors of a checkpoint by name, from safetensors or another format; nothing is unpickled."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped

from foretell.model.block.weights import names_of
from foretell.model.config.families import family_of
from foretell.model.config.families.base import PredictionNames
from foretell.model.config.model import ModelConfig
from foretell.model.load.quantization_config import QUANTIZED_ADVICE
from foretell.model.load.safetensors_file import SafetensorsFile
from foretell.model.matrices.mapped_file import MappedFile
from foretell.model.matrices.stored import Matrix, StoredMatrix
from foretell.utils.validation import read_json

Tensor = torch.Tensor
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of readable weights, by their names in safetensors."""
_QUANTIZED = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|scales|biases|SCB|absmax|quant_map|quant_state.*"
    r"|weight_(scale|packed|zero_point|shape|format|global_scale).*|input_global_scale"
    r"|.*(weight|input|output|[qkv])_scale(_inv|_\d)?)$"
)
"""Names of tensors that only quantised checkpoints have: of GPTQ, AWQ, bitsandbytes, FP8, compressed-tensors and
MLX.
"""
_LAYER = re.compile(
    r"(?:(?:(?:language_model\.)?model\.(?:(?:language|text)_model\.)?|backbone\.|)layers|model\.transformer\.blocks)"
    r"\.(\d+)\.(.+)"
)
"""Names of the tensors of a layer: its number, and the tensor in it."""
_PREDICTION = "eh_proj."
"""A matrix that, of all layers, those of multi-token prediction have, which follow the model's own (DeepSeek-V3)."""
_NEVER_READ = ("rotary_emb.inv_freq", "attn.masked_bias")
"""Ends of the names of tensors of a layer that repeat the configuration."""
_BLOCKS = ("_blocks", "_scales")
"""Ends of the names of experts in MXFP4."""
_NUMBER = re.compile(r"\.experts\.\d+\.")
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
"""Names of the embedding, of the last norm (of most families) and of the output matrix."""
_AGAIN = "download it again"


Storage = Literal["quantized", "float32", "half"]
"""How a checkpoint stores its matrices: as quantised blocks, in float32, or in a float of 16 bits."""


class Weights(ABC):
    """The tensors of a checkpoint by their Hugging Face names, whatever its format."""

    source: str
    files: Sequence[Path] = ()
    """Files that the tensors come from; none: they are made up."""
    mapped: Sequence[MappedFile] = ()
    """Those that tensors are views of."""

    variant = ""
    """What distinguishes the weights from others of the same files."""
    adapter = ""
    """Digits that identify the adapter that is merged into them; empty: none."""

    @property
    def unadapted(self) -> "Weights":
        """The same without an adapter."""
        return self

    @property
    def storage(self) -> Storage:
        """How the matrices of the blocks are stored, most of them."""
        return "float32"

    def maps(self, name: str) -> bool:
        """Whether `matrix` gives this one as a view of a mapped file, so that keeping it takes no memory."""
        return False

    @abstractmethod
    def get(self, name: str) -> Shaped[Tensor, "*shape"] | None:
        """The tensor of this name, or None."""

    def require(self, name: str, *shape: int) -> Float[Tensor, "*shape"]:
        """The tensor of this name and shape.

        Raises:
            ValueError: it is missing, has another shape or integers.
        """
        return self._of_kind(name, shape, integers=False)

    def integers(self, name: str, *shape: int) -> Int[Tensor, "*shape"]:
        """The tensor of integers of this name and shape.

        Raises:
            ValueError: it is missing, has another shape or floats.
        """
        return self._of_kind(name, shape, integers=True)

    def _of_kind(self, name: str, shape: tuple[int, ...], *, integers: bool) -> Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise ValueError(f"{self.source}: the checkpoint has no {name}; is it complete?")
        if tensor.is_floating_point() == integers:
            kind = "integers" if integers else "floats"
            raise ValueError(f"{self.source}: {name} should have {kind}, and has numbers of {tensor.dtype}")
        return self._checked(name, tensor, shape)

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape, as the file stores it.

        Raises:
            ValueError: it is missing or has another shape.
        """
        return StoredMatrix.of(self.require(name, outputs, inputs), self.mapped)

    def expert_matrices(self, name: str, count: int, outputs: int, inputs: int) -> Iterator[StoredMatrix]:
        """The matrices of all experts, one after the other, from one tensor: floats [experts, inputs, outputs].

        Raises:
            ValueError: it is missing or has another shape.
        """
        whole = self.require(name, count, inputs, outputs)
        return (StoredMatrix.of(each.T, self.mapped) for each in whole)

    def prediction_names(self, names: PredictionNames) -> PredictionNames:
        """Names of the parts of the layer of multi-token prediction, of those in safetensors: here these."""
        return names

    def round_matrix(self, name: str, matrix: Matrix) -> Matrix:
        """A matrix of a block as it is packed: here as it is."""
        return matrix

    def head(self, vocab: int, hidden: int) -> Float[Tensor, "v d"] | None:
        """The output matrix; None: it is tied to the embedding.

        Raises:
            ValueError: it has another shape, or is missing in a format that always has it.
        """
        head = self.get(HEAD)
        return None if head is None else self._checked(HEAD, head, (vocab, hidden))

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix | None:
        """As `head`, but as the file stores it."""
        head = self.head(vocab, hidden)
        return None if head is None else StoredMatrix.of(head, self.mapped)

    def output_matrix(self, config: ModelConfig) -> StoredMatrix:
        """The output matrix as the file stores it; the embedding where the two are tied."""
        own = None if config.tied else self.head_matrix(config.vocab, config.hidden)
        return self.matrix(EMBEDDING, config.vocab, config.hidden) if own is None else own

    def _checked(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self.source}: {name} has shape {tuple(tensor.shape)}, the configuration asks for {shape}"
            )
        return tensor

    def release_pages(self) -> None:
        """Return the files' memory pages to the system; later calls of `get` read them again."""
        for file in self.mapped:
            file.release_pages()


class NamedWeights(Weights):
    """Tensors in memory."""

    def __init__(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        self.source, self._tensors = source, tensors

    def get(self, name: str) -> Shaped[Tensor, "*shape"] | None:
        """The tensor of this name, or None."""
        return self._tensors.get(name)


class DelegatedWeights(Weights):
    """The tensors of another checkpoint, `inner`, some of which a subclass changes or names otherwise."""

    def __init__(self, inner: Weights) -> None:
        self._inner, self.source, self.files = inner, inner.source, inner.files
        self.variant, self.adapter, self.mapped = inner.variant, inner.adapter, inner.mapped

    @property
    def unadapted(self) -> Weights:
        """The tensors without an adapter, before any change."""
        return self._inner.unadapted

    def _name(self, name: str) -> str:
        """The name of a tensor in the inner checkpoint."""
        return name

    @property
    def storage(self) -> Storage:
        """As in the checkpoint."""
        return self._inner.storage

    def maps(self, name: str) -> bool:
        """As in the checkpoint."""
        return self._inner.maps(self._name(name))

    def get(self, name: str) -> Shaped[Tensor, "*shape"] | None:
        """The tensor of this name, or None."""
        return self._inner.get(self._name(name))

    def require(self, name: str, *shape: int) -> Float[Tensor, "*shape"]:
        """The tensor of this name and shape."""
        return self._inner.require(self._name(name), *shape)

    def integers(self, name: str, *shape: int) -> Int[Tensor, "*shape"]:
        """The tensor of integers of this name and shape."""
        return self._inner.integers(self._name(name), *shape)

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape, as the file stores it."""
        return self._inner.matrix(self._name(name), outputs, inputs)

    def expert_matrices(self, name: str, count: int, outputs: int, inputs: int) -> Iterator[StoredMatrix]:
        """The matrices of all experts of one tensor."""
        return self._inner.expert_matrices(self._name(name), count, outputs, inputs)

    def prediction_names(self, names: PredictionNames) -> PredictionNames:
        """Those of the checkpoint."""
        return self._inner.prediction_names(names)

    def round_matrix(self, name: str, matrix: Matrix) -> Matrix:
        """As the checkpoint does it."""
        return self._inner.round_matrix(self._name(name), matrix)

    def head(self, vocab: int, hidden: int) -> Float[Tensor, "v d"] | None:
        """The output matrix; None: it is tied to the embedding."""
        return self._inner.head(vocab, hidden)

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix | None:
        """As `head`, but as the file stores it."""
        return self._inner.head_matrix(vocab, hidden)


def refuse_quantized(file: Path, name: str, dtype: str) -> None:
    """Refuse a tensor of a quantised checkpoint: by its name, or a weight by its `dtype` (as safetensors names it)
    that is not a float of 16 bits or more.

    Raises:
        ValueError: the tensor belongs to a quantised checkpoint.
    """
    if _QUANTIZED.search(name) or (name.endswith(".weight") and dtype not in _FLOATS):
        raise ValueError(
            f"{file}: {name} ({dtype}) belongs to a quantised checkpoint, which is not supported; {QUANTIZED_ADVICE}"
        )


def candidate_names(name: str) -> tuple[str, ...]:
    """Names that a tensor or module has in checkpoints of a language model, and of a multimodal model that holds it.

    Nemotron-H calls the model `backbone`, and its embedding `embeddings`; a base model is saved without `model.`.
    """
    inner = (name.replace("model.", f"model.{part}.", 1) for part in ("language_model", "text_model"))
    multimodal = f"language_model.{name}", *inner
    backbone = name.replace("embed_tokens", "embeddings")
    return name, *multimodal, backbone.replace("model.", "backbone.", 1), backbone, name.removeprefix("model.")


class SafetensorsWeights(Weights):
    """One `model.safetensors`, or shards with an index. `check(file, name, dtype)` is called for every tensor.

    Raises:
        ValueError: there is no safetensors file (a pickle is refused by name), it is damaged, or `check` refuses it.
    """

    def __init__(self, path: Path, check: Callable[[Path, str, str], None] = refuse_quantized) -> None:
        self.source = str(path)
        index = path / "model.safetensors.index.json"
        single = ["model.safetensors"] if (path / "model.safetensors").is_file() else []
        files = _shards(index) if index.is_file() else single
        if not files:
            pickles = [p.name for p in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]]
            if pickles:
                raise ValueError(
                    f"{path}: only a pickle is here ({pickles[0]}), and unpickling can run code; "
                    "convert it to safetensors with `save_pretrained` of transformers"
                )
            raise ValueError(f"{path}: no model.safetensors here")
        self.files = [path / name for name in files]
        self._opened = [SafetensorsFile(file) for file in self.files]
        self.mapped = [file.mapped for file in self._opened]
        self._file_of = {name: file for file in self._opened for name in file.dtypes}
        self._stored_as = dict[str, str]()
        for file in self._opened:
            for name, dtype in file.dtypes.items():
                check(file.path, name, dtype)

    def check_layers(self, count: int) -> None:
        """Check that there are no layers but the `count` of the configuration and those of multi-token prediction.

        Raises:
            ValueError: there is one, so the model would not be the one that was trained.
        """
        inner = [match for match in map(_LAYER.fullmatch, self._file_of) if match is not None]
        predicting = {match[1] for match in inner if match[2].startswith(_PREDICTION)}
        own = {int(match[1]) for match in inner if match[1] not in predicting}
        if own and max(own) >= count:
            raise ValueError(
                f"{self.source}: config.json says that there are {count} layers, and the weights have a layer "
                f"{max(own)}, counted from 0; they are of different models, or config.json was changed: {_AGAIN}"
            )

    def check_tensors(self, config: ModelConfig) -> None:
        """Check that every tensor of the layers is read, those of quantised matrices by the name of the matrix.

        Raises:
            ValueError: one is not, so the numbers would be others.
        """
        changes = config.state is not None or config.experts is not None or config.latent is not None
        if changes and any(file.writer == "mlx" for file in self._opened):
            raise ValueError(
                f"{self.source}: a checkpoint of MLX, which changes tensors of {config.architecture}; take that of "
                "transformers, or a GGUF file"
            )
        known = [names_of(config, i) for i in range(config.layers)]
        for name in self._file_of:
            match = _LAYER.fullmatch(name)
            if match is None or int(match[1]) >= config.layers or match[2].endswith(_NEVER_READ):
                continue
            if match[2].startswith(family_of(config.architecture).unread):
                continue
            inner = _NUMBER.sub(".experts.{}.", match[2])
            quantized = _QUANTIZED.search(inner) or inner.endswith(_BLOCKS)
            if inner not in known[int(match[1])] and not quantized:
                raise ValueError(
                    f"{self.source}: the checkpoint has a tensor {name}, which the decoder of {config.architecture} "
                    "does not read with this config.json, so its answers would be others; is config.json of this model?"
                )
        outer = EMBEDDING, HEAD, f"{family_of(config.architecture).final_norm}.weight"
        for biased in (f"{name.removesuffix('.weight')}.bias" for name in outer):
            if any(name in self._file_of for name in candidate_names(biased)):
                raise ValueError(
                    f"{self.source}: the checkpoint has a tensor {biased}, which the decoder does not read"
                )

    def unread(self, config: ModelConfig) -> list[str]:
        """The tensors that are not the decoder's: those of images, of multi-token prediction and others beside it."""
        outer = EMBEDDING, HEAD, f"{family_of(config.architecture).final_norm}.weight"
        known = {candidate.rpartition(".")[0] for name in outer for candidate in candidate_names(name)}

        def is_read(name: str) -> bool:
            layer = _LAYER.fullmatch(name)
            return int(layer[1]) < config.layers if layer is not None else name.rpartition(".")[0] in known

        return [name for name in self._file_of if not is_read(name)]

    def settle_head(self, config: ModelConfig) -> ModelConfig:
        """The configuration with an output matrix of its own if it is said to be tied to the embedding and has other
        numbers, as transformers takes it. A head that stands alone is the embedding, too.
        """
        if not config.tied or HEAD not in self._file_of:
            return config
        table = self.get(EMBEDDING)
        if table is None:
            self._file_of[EMBEDDING] = self._file_of[HEAD]
            self._stored_as[EMBEDDING] = HEAD
            return config
        head = self._file_of[HEAD].tensor(HEAD)
        same = head.shape == table.shape and torch.equal(head, table)
        self.release_pages()
        return config if same else replace(config, tied=False)

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, or None."""
        for candidate in candidate_names(name):
            if candidate in self._file_of:
                tensor: Tensor = self._file_of[candidate].tensor(self._stored_as.get(candidate, candidate))
                return tensor
        return None

    @property
    def storage(self) -> Storage:
        """By the embedding, which is there in every checkpoint."""
        table = self.get(EMBEDDING)
        return "float32" if table is not None and table.dtype == torch.float32 else "half"

    def maps(self, name: str) -> bool:
        """True: all tensors are views."""
        return True

    def head(self, vocab: int, hidden: int) -> Tensor:
        """The output matrix; required, because transformers would initialise a missing one at random.

        Raises:
            ValueError: it is missing or has another shape.
        """
        head: Tensor = self.require(HEAD, vocab, hidden)
        return head


def _shards(index: Path) -> list[str]:
    files = read_json(index, _AGAIN).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index}: weight_map should name a file for every tensor; {_AGAIN}")
    outside = next((name for name in files.values() if Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"{index}: weight_map names a file outside its directory ({outside!r}); {_AGAIN}")
    return sorted(set(files.values()))
