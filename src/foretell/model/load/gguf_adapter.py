"""LoRA adapters in GGUF files, as llama.cpp reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float

from foretell.model.config.families import family_of
from foretell.model.config.model import ModelConfig
from foretell.model.load.adapter_change import EXPERT, Change, Factors, added, known_names
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import TensorInfo
from foretell.model.load.gguf_weights import GGUFWeights

Tensor = torch.Tensor


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


def read_gguf(place: Path, config: ModelConfig) -> tuple[list[Path], dict[str, Change]]:
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
    for name in set(known_names(config).values()):
        experts = range(config.experts.count) if "{}" in name and config.experts is not None else range(1)
        own = (name.replace("{}", str(i)) for i in experts)
        changes |= {each: _Update(updates, each) for each in own if updates.has(each)}
    return file.files, changes


@dataclass(frozen=True)
class _Update(Change):
    """What an adapter in GGUF adds to a tensor."""

    updates: _UpdateWeights
    name: str

    def __call__(self, base: Tensor) -> Tensor:
        return added(base, self._whole)

    @property
    def _whole(self) -> Tensor:
        update = self.updates.get(self.name)
        assert update is not None
        return update

    def factors(self) -> Factors | None:
        """The update; its first factor is an orthonormal basis of its rows, since those of the file may be of other
        rows and columns. None: it is not of a linear layer.
        """
        if not self.name.startswith("model.layers.") or EXPERT.search(self.name):
            return None
        whole, drawn = self._whole.double(), torch.Generator().manual_seed(0)
        sketch = torch.randn(len(whole), self.updates.rank(self.name), generator=drawn, dtype=torch.float64)
        basis = torch.linalg.qr(whole.T @ sketch).Q
        return Factors(basis.T.float().contiguous(), (whole @ basis).float())
