"""What a quantisation method is: a new one is a class in a file of its own and a line in `quantize.METHODS`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float

from foretell.lab.quantize.grid import Grid, QuantizedRows, Weight
from foretell.model.block.layer import DecoderBlock, FeedForward
from foretell.model.block.linear import AnyLinear, FactoredLinear, Linear
from foretell.model.config.model import ModelConfig

Tensor = torch.Tensor
Role = Literal["qkv", "output", "gate_up", "down"]
"""A matrix of a block; matrices of the same input are one below the other."""
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of the inputs x of a matrix over the calibration tokens."""

    second_moment: Float[Tensor, "i i"]
    """Mean of x x^T: the output's mean squared error for an error E of the matrix is trace(E M E^T)."""
    mean_magnitude: Float[Tensor, " i"]
    """Mean of |x|."""

    def scaled(self, factor: Float[Tensor, " i"]) -> "InputStatistics":
        """The statistics of `factor * x`, with positive factors."""
        return InputStatistics(self.second_moment * factor * factor[:, None], self.mean_magnitude * factor)


def matrices(block: DecoderBlock) -> dict[Role, AnyLinear]:
    """The matrices of a block without experts by role."""
    mlp, by_role = block.mlp, dict[Role, AnyLinear]()
    assert isinstance(mlp, FeedForward)
    for role, linear in zip(ROLES, (block.qkv, block.output, mlp.gate_up, mlp.down), strict=True):
        assert isinstance(linear, Linear | FactoredLinear)
        by_role[role] = linear
    return by_role


def linears(block: DecoderBlock) -> dict[Role, Linear]:
    """As `matrices`, of a block whose matrices are all dense."""
    by_role = dict[Role, Linear]()
    for role, linear in matrices(block).items():
        assert isinstance(linear, Linear)
        by_role[role] = linear
    return by_role


def set_matrix(block: DecoderBlock, role: Role, linear: AnyLinear) -> None:
    """Replace a matrix of a block without experts."""
    owner = block if role in ("qkv", "output") else block.mlp
    setattr(owner, role, linear)


def output_error(error: Float[Tensor, "o i"], inputs: InputStatistics) -> float:
    """Mean squared error of the outputs of a matrix with this error."""
    return float(((error @ inputs.second_moment) * error).sum())


class Quantizer(ABC):
    """A method that quantises the matrices of a model, one block after the other."""

    calibrated: bool = True
    """Whether it reads statistics of the inputs."""

    def fold(
        self,
        block: DecoderBlock,
        config: ModelConfig,
        grids: Mapping[Role, Grid],
        inputs: Mapping[Role, InputStatistics],
    ) -> Mapping[Role, InputStatistics]:
        """Change the weights of a block, in place, so that it computes the same and is easier to quantise; returns the
        statistics of the inputs afterwards.
        """
        return inputs

    @abstractmethod
    def quantize(self, role: Role, weight: Weight, grid: Grid, inputs: InputStatistics | None) -> QuantizedRows:
        """Quantise a matrix; `inputs` is None where the method is not calibrated."""
