"""What an adapter changes of a model: changes of tensors by the names that the decoder reads."""

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float

from foretell.model.block.weights import names_of
from foretell.model.config.families import family_of
from foretell.model.config.model import ModelConfig
from foretell.model.load.build import OUTER_NAMES
from foretell.model.load.weights import EMBEDDING, HEAD, Weights, candidate_names

Tensor = torch.Tensor
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Factors(NamedTuple):
    """An update of a matrix: `high @ low`."""

    low: Float[Tensor, "r i"]
    high: Float[Tensor, "o r"]


class Change(ABC):
    """The change of a tensor of the base model."""

    @abstractmethod
    def __call__(self, base: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The tensor of the adapted model."""

    def factors(self) -> Factors | None:
        """The change as an update of low rank; None: it is more than one of a linear layer."""
        return None


def check_shape(place: Path, name: str, shape: tuple[int, ...], wanted: tuple[int, ...], weights: Weights) -> None:
    """Check that a changed tensor has the shape of the model's.

    Raises:
        ValueError: it has another, so that the adapter is for another model.
    """
    if shape != wanted:
        raise ValueError(
            f"{place}: the adapter is for another model: it changes {name} as a tensor of shape {shape}, and that of "
            f"{weights.source} has {wanted}"
        )


def added(base: Tensor, update: Tensor) -> Tensor:
    """The base with an update of the same shape; of another, the update, whose shape is refused then."""
    return base + update if base.shape == update.shape else update


def known_names(config: ModelConfig) -> dict[str, str]:
    """The tensors that the decoder reads, by all names that they may have; `{}` is the number of an expert."""
    inner = (f"model.layers.{i}.{name}" for i in range(config.layers) for name in names_of(config, i))
    outer = EMBEDDING, HEAD, f"{family_of(config.architecture).final_norm}.weight", *OUTER_NAMES
    named = [name for name in (*outer, *inner) if name.endswith((".weight", ".bias"))]
    return {each: name for name in reversed(named) for each in candidate_names(name)}
