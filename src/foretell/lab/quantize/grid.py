"""The numbers that a storage type can hold: `scale * level + offset`, with few bits per level.

A row of a matrix is cut into blocks, a block into groups. A group has a scale and an offset; a block is what the file
stores together.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, UInt8

Tensor = torch.Tensor
Weight: TypeAlias = Float[Tensor, "o i"]
Groups: TypeAlias = Float[Tensor, "o n g w"]
"""Rows of a matrix in blocks and groups of numbers."""
Scales: TypeAlias = Float[Tensor, "o n g"]
"""A number per group."""
Importance: TypeAlias = Float[Tensor, "n g w"] | None
"""Weights of the squared errors of inputs."""


@dataclass(frozen=True)
class Parameters:
    """Scales and offsets of blocks as the file stores them."""

    scale: Scales
    offset: Scales
    fields: tuple[Tensor, ...]
    """What the file stores for a block, in the order of the type."""

    @staticmethod
    def join(parts: "list[Parameters]") -> "Parameters":
        """Parameters of consecutive blocks."""
        fields = tuple(torch.cat(field, 1) for field in zip(*(p.fields for p in parts), strict=True))
        return Parameters(torch.cat([p.scale for p in parts], 1), torch.cat([p.offset for p in parts], 1), fields)

    @staticmethod
    def stack(parts: "list[Parameters]") -> "Parameters":
        """Parameters of rows below each other."""
        fields = tuple(torch.cat(field) for field in zip(*(p.fields for p in parts), strict=True))
        return Parameters(torch.cat([p.scale for p in parts]), torch.cat([p.offset for p in parts]), fields)

    def rows(self, first: int, last: int) -> "Parameters":
        """The parameters of some outputs."""
        return Parameters(self.scale[first:last], self.offset[first:last], tuple(f[first:last] for f in self.fields))


class Grid(ABC):
    """A storage type for quantised matrices."""

    name: str
    block: int
    """Inputs of a block."""
    groups: int
    """Groups of a block."""
    low: int
    high: int
    """Smallest and largest level."""
    has_offset: bool

    @property
    def width(self) -> int:
        """Inputs of a group."""
        return self.block // self.groups

    @abstractmethod
    def fit(self, weight: Groups, importance: Importance = None) -> tuple[Scales, Scales]:
        """Scales and offsets that round these weights to the nearest with a small error; `importance` weighs the
        squared errors of inputs (types that search for their scales use it).
        """

    @abstractmethod
    def store(self, scale: Scales, offset: Scales) -> Parameters:
        """Round scales and offsets to what the file can hold."""

    def split(self, weight: Float[Tensor, "*o i"]) -> Float[Tensor, "*o n g w"]:
        """Blocks and groups of rows.

        Raises:
            ValueError: the rows are no whole blocks.
        """
        if weight.shape[-1] % self.block:
            raise ValueError(f"{self.name} needs rows of whole blocks of {self.block}, found {weight.shape[-1]} inputs")
        return weight.unflatten(-1, (-1, self.groups, self.width))

    def levels(self, weight: Groups, parameters: Parameters) -> Groups:
        """The levels nearest to the weights."""
        scale, offset = parameters.scale[..., None], parameters.offset[..., None]
        inverse = torch.where(scale == 0, 0, 1 / scale)
        return ((weight - offset) * inverse).round().clamp(self.low, self.high)

    def values(self, levels: Groups, parameters: Parameters) -> Groups:
        """The numbers of levels."""
        scaled = parameters.scale[..., None] * levels
        return scaled + parameters.offset[..., None] if self.has_offset else scaled

    def round(self, weight: Groups, parameters: Parameters) -> "QuantizedRows":
        """The weights rounded to the nearest numbers of these parameters."""
        return QuantizedRows(self, self.levels(weight, parameters).to(torch.int16).flatten(1), parameters)


@dataclass(frozen=True)
class QuantizedRows:
    """A quantised matrix: levels, and the parameters of its blocks."""

    grid: Grid
    level: Int[Tensor, "o i"]
    parameters: Parameters

    def values(self) -> Float[Tensor, "o i"]:
        """The numbers in float32."""
        return self.grid.values(self.grid.split(self.level.float()), self.parameters).flatten(1)

    def rows(self, first: int, last: int) -> "QuantizedRows":
        """Some outputs."""
        return QuantizedRows(self.grid, self.level[first:last], self.parameters.rows(first, last))


def largest(weight: Float[Tensor, "*o w"]) -> Float[Tensor, "*o"]:
    """The number of largest magnitude along the last axis, with its sign."""
    return weight.gather(-1, weight.abs().argmax(-1, keepdim=True))[..., 0]


HALF_MAX = 65504.0
"""Largest float16."""


def to_half(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The nearest float16, finite."""
    return x.clamp(-HALF_MAX, HALF_MAX).half()


def half_bytes(x: Float[Tensor, "o n"]) -> UInt8[Tensor, "o n 2"]:
    """The bytes of float16 numbers."""
    return x.contiguous().view(torch.uint8).view(*x.shape, 2)
