"""What a compression method is: a new one is a class in a file of its own and a line in `foretell.lab.compress`."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import InputStatistics
from foretell.model.block.linear import AnyLinear, Linear

Tensor = torch.Tensor


class Compressor(ABC):
    """A method that compresses the matrices of a model, one block after the other."""

    calibrated: bool = True
    """Whether it reads statistics of the inputs."""

    def check(self, outputs: int, inputs: int, name: str) -> None:
        """Refuse a matrix of this shape, which is called `name`.

        Raises:
            ValueError: the method cannot compress it.
        """
        return

    @abstractmethod
    def compress(self, weight: Float[Tensor, "o i"], inputs: InputStatistics | None) -> Float[Tensor, "o i"]:
        """The compressed matrix in dense form; `inputs` is None where the method is not calibrated."""

    def replace(self, linear: Linear, inputs: InputStatistics | None, dtype: torch.dtype) -> AnyLinear:
        """What takes the place of a matrix of a block, its numbers in `dtype`, stored as float32."""
        return Linear(self.compress(linear.weight.data, inputs).to(dtype).float(), linear.bias)
