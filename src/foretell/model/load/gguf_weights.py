"""The tensors of a GGUF file by their Hugging Face names."""

import re

import torch

from foretell.model.block.weights import names_of
from foretell.model.config.families import family_of
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.gguf import from_gguf
from foretell.model.load.build import OUTER_NAMES
from foretell.model.load.gguf import GGUF
from foretell.model.load.weights import HEAD, Storage, Weights
from foretell.model.matrices.stored import StoredMatrix

Tensor = torch.Tensor

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_CONFIG = {f"{name}.weight" for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")}
"""Tensors that are a part of the configuration."""
_EXPERT = re.compile(r"\.experts\.(\d+|\{\})\.")


def gguf_config(file: GGUF) -> ModelConfig:
    """The configuration of the model in a GGUF file.

    Raises:
        ValueError: see `codec_from_gguf`.
    """
    names = [n for n in ("rope_freqs", "rope_factors_short", "rope_factors_long") if f"{n}.weight" in file.tensors]
    factors = {n: file.load_tensor(f"{n}.weight").flatten().tolist() for n in names}
    return from_gguf(file.metadata, str(file.path), factors, file.tensors)


def gguf_place(name: str, config: ModelConfig) -> tuple[str, int | None]:
    """The name in GGUF of the tensor that holds this tensor of Hugging Face, and the index of the expert whose part it
    is; None: all of it.
    """
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name], None
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    expert = _EXPERT.search(rest)
    own = family_of(config.architecture).gguf_name(_EXPERT.sub(".experts.{}.", rest))
    return f"blk.{layer}.{own}", None if expert is None or expert[1] == "{}" else int(expert[1])


class GGUFWeights(Weights):
    """Tensors of a GGUF file, dequantised; llama.cpp's interleaved rotary order becomes the half-split order."""

    def __init__(self, file: GGUF, config: ModelConfig) -> None:
        self.source, self._file, self._config = str(file.path), file, config
        self.files = file.files
        self._require_read()

    def _require_read(self) -> None:
        """Check that every tensor of the file is read.

        Raises:
            ValueError: one is not, so the numbers would be others.
        """
        config, outer = self._config, (*_GGUF_NAMES, *OUTER_NAMES)
        inner = (f"model.layers.{i}.{name}" for i in range(config.layers) for name in names_of(config, i))
        known = {gguf_place(name, config)[0] for name in (*outer, *inner)} | _OF_CONFIG
        unread = next((name for name in self._file.tensors if name not in known), None)
        if unread is not None:
            raise ValueError(
                f"{self.source}: the file has a tensor {unread}, which the decoder of {config.architecture} does not "
                "read, so its answers would be others; it may be of an architecture that is not supported yet"
            )

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, or None."""
        place = self._place_in_file(name)
        if place is None:
            return None
        tensor: Tensor = self._file.load_tensor(*place)
        return tensor[self._half_split_order(len(tensor))] if self._is_interleaved(name) else tensor

    def require(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape; a matrix of one row may be stored as a vector.

        Raises:
            ValueError: it is missing or has another shape.
        """
        found = self.get(name)
        if found is not None and shape[0] == 1 and found.shape == shape[1:]:
            return found.unsqueeze(0)
        checked: Tensor = super().require(name, *shape)
        return checked

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape, as the file stores it: a view of the mapped file where rows keep their
        order. Storage types without a `Kind` are widened.
        """
        place = self._place_in_file(name)
        found = None if place is None else self._file.stored_matrix(*place)
        if found is None or found.shape != (outputs, inputs):
            return super().matrix(name, outputs, inputs)
        return found.rows(self._half_split_order(outputs)) if self._is_interleaved(name) else found

    @property
    def storage(self) -> Storage:
        """By the types of the tensors in the blocks."""
        return self._file.storage

    def maps(self, name: str) -> bool:
        """Whether the file stores it in one of the known kinds."""
        place = self._place_in_file(name)
        return place is not None and self._file.stored_matrix(*place) is not None

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix | None:
        """The output matrix as the file stores it; None: it is tied to the embedding."""
        return None if self._place_in_file(HEAD) is None else self.matrix(HEAD, vocab, hidden)

    def _place_in_file(self, name: str) -> tuple[str, int | None] | None:
        """The tensor that holds this one, and the index of the expert whose part it is."""
        found, expert = gguf_place(name, self._config)
        return (found, expert) if found in self._file.tensors else None

    def _is_interleaved(self, name: str) -> bool:
        """Whether the rows of a head are in llama.cpp's order: pairs of the two halves."""
        return self._file.metadata["general.architecture"] == "llama" and name.split(".")[-2] in ("q_proj", "k_proj")

    def _half_split_order(self, rows: int) -> Tensor:
        return torch.arange(rows).view(-1, self._config.head_dim // 2, 2).transpose(1, 2).flatten()

    def release_pages(self) -> None:
        """Return the file's memory pages to the system."""
        self._file.release_pages()
