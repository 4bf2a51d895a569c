"""Linear layers and embeddings in the form of the native kernels, and what these refuse to read."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.model.kernels import build, structures
from foretell.model.kernels.pack import pack, pack_vector, together
from foretell.model.kernels.structures import PANEL, PRECISIONS, Precision


class NativeLinear:
    """A linear layer whose weight was packed for the kernels; int8 means int8 weights and int8 activations.

    Raises:
        RuntimeError: the kernels are not available here.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: Precision) -> None:
        self._kernels = build.library()
        self.outputs, self.inputs = weight.shape
        self.precision: Precision = dtype
        self._packed = PackedLinears([(weight, bias)], dtype, self._kernels)

    @property
    def struct(self) -> structures.Weight:
        """For the kernels; points into memory that lives as long as this layer."""
        return self._packed.structs[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 [t, in] to float32 [t, out]."""
        expect(x, torch.float32, "x", x.shape[0], self.inputs)
        y = torch.empty(x.shape[0], self.outputs)
        self._kernels.foretell_linear(
            *(PRECISIONS.index(self.precision), self.struct, x.data_ptr(), y.data_ptr()),
            *(x.shape[0], self.outputs, torch.get_num_threads()),
        )
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""
        return sum(tensor.nbytes for tensor in self._packed.tensors)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, float32 [t, in]; not for int8, whose weight is rotated.

        Raises:
            ValueError: the precision is int8.
        """
        if self.precision == "int8":
            raise ValueError("rows of an int8 weight cannot be read back")
        dtype = torch.float32 if self.precision == "float32" else torch.bfloat16
        depth, words = 4 // dtype.itemsize, self._packed.tensors[0]
        panels = words.view(dtype).view(-(-self.outputs // PANEL), -1, PANEL, depth)
        return panels[index // PANEL, :, index % PANEL].flatten(1)[:, : self.inputs].float()

    def likeliest(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest outputs for float32 [t, in] under their softmax, best first: probabilities and numbers,
        [t, count] each.
        """
        expect(x, torch.float32, "x", x.shape[0], self.inputs)
        expect_count(count, self.outputs)
        chances, index = torch.empty(x.shape[0], count), torch.empty(x.shape[0], count, dtype=torch.int64)
        self._kernels.foretell_guess(
            *(PRECISIONS.index(self.precision), self.struct, x.data_ptr(), chances.data_ptr(), index.data_ptr()),
            *(x.shape[0], count, torch.get_num_threads()),
        )
        return chances, index


class PackedLinears:
    """Packed linear layers that are read one after the other: the structures for the kernels, and what they point
    into.
    """

    def __init__(
        self, layers: Sequence[tuple[Tensor, Tensor | None]], precision: Precision, kernels: ctypes.CDLL
    ) -> None:
        words = together([pack(weight, precision, kernels) for weight, _ in layers])
        biases = [None if bias is None else pack_vector(bias) for _, bias in layers]
        self.tensors = [*words, *(bias for bias in biases if bias is not None)]
        self.structs = [
            structures.Weight(
                packed.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[1], weight.shape[0]
            )
            for packed, bias, (weight, _) in zip(words, biases, layers, strict=True)
        ]


def embedding_of(table: Tensor, scale: float) -> tuple[Tensor, structures.Embedding]:
    """An embedding, [vocab, hidden], for the kernels, which read the tensor that comes with it."""
    table = table.detach().contiguous()
    if table.dtype not in (torch.float32, torch.bfloat16):
        table = table.float()
    return table, structures.Embedding(table.data_ptr(), len(table), table.dtype == torch.bfloat16, scale)


def expect(tensor: Tensor, dtype: torch.dtype, name: str, *shape: int) -> None:
    """Refuse what the kernels would read wrongly.

    Raises:
        ValueError: another type, shape or order than they expect.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name} must be contiguous {dtype} {shape}, found {found}")


def expect_count(count: int, most: int) -> None:
    """Refuse to look for more numbers than there are.

    Raises:
        ValueError: with both.
    """
    if not 1 <= count <= most:
        raise ValueError(f"the best {count} of {most} numbers were asked for")
