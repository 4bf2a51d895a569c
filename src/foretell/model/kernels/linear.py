"""Linear layers and embeddings packed for the kernels, and the checks of tensors that are passed to them."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.model.kernels import build, structures
from foretell.model.kernels.pack import Matrix, pack_matrices, pad_bias
from foretell.model.kernels.structures import PANEL, PRECISIONS, Precision


class NativeLinear:
    """A linear layer packed for the kernels; int8 means int8 weights and int8 activations.

    Raises:
        RuntimeError: the kernels are not available here.
    """

    def __init__(self, weight: Tensor | Matrix, bias: Tensor | None, dtype: Precision) -> None:
        self._kernels = build.library()
        matrix = Matrix.of(weight)
        self.outputs, self.inputs = matrix.outputs, matrix.inputs
        self.precision: Precision = dtype
        self._packed = PackedLinears([(matrix, bias)], dtype, self._kernels)

    @property
    def struct(self) -> structures.Weight:
        """The argument of the kernels; points into memory that this layer owns."""
        return self._packed.structs[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to float32 [t, in]; returns float32 [t, out]."""
        check_tensor(x, torch.float32, "x", x.shape[0], self.inputs)
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

    def gather_rows(self, index: Tensor) -> Tensor:
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

    def topk_softmax(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest outputs for float32 [t, in], descending: probabilities under their softmax and indices,
        [t, count] each.
        """
        check_tensor(x, torch.float32, "x", x.shape[0], self.inputs)
        check_k(count, self.outputs)
        probabilities, index = torch.empty(x.shape[0], count), torch.empty(x.shape[0], count, dtype=torch.int64)
        self._kernels.foretell_linear_topk_softmax(
            *(PRECISIONS.index(self.precision), self.struct, x.data_ptr(), probabilities.data_ptr(), index.data_ptr()),
            *(x.shape[0], count, torch.get_num_threads()),
        )
        return probabilities, index


class PackedLinears:
    """Packed linear layers that are read one after the other: their structures, and the tensors these point into."""

    def __init__(
        self, layers: Sequence[tuple[Matrix, Tensor | None]], precision: Precision, kernels: ctypes.CDLL
    ) -> None:
        words = pack_matrices([matrix for matrix, _ in layers], precision, kernels)
        biases = [None if bias is None else pad_bias(bias) for _, bias in layers]
        self.tensors = [*words, *(bias for bias in biases if bias is not None)]
        self.structs = [
            structures.Weight(
                packed.data_ptr(), None if bias is None else bias.data_ptr(), matrix.inputs, matrix.outputs
            )
            for packed, bias, (matrix, _) in zip(words, biases, layers, strict=True)
        ]


def pack_embedding(table: Tensor, scale: float) -> tuple[Tensor, structures.Embedding]:
    """An embedding, [vocab, hidden], for the kernels: the tensor, which must be kept alive, and its structure."""
    table = table.detach().contiguous()
    if table.dtype not in (torch.float32, torch.bfloat16):
        table = table.float()
    return table, structures.Embedding(table.data_ptr(), len(table), table.dtype == torch.bfloat16, scale)


def check_tensor(tensor: Tensor, dtype: torch.dtype, name: str, *shape: int) -> None:
    """Check dtype, shape and contiguity of a tensor before a kernel reads it.

    Raises:
        ValueError: one of them is not as expected.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name} must be contiguous {dtype} {shape}, found {found}")


def check_k(count: int, most: int) -> None:
    """Check the k of a top-k over `most` numbers.

    Raises:
        ValueError: it is not in 1 .. `most`.
    """
    if not 1 <= count <= most:
        raise ValueError(f"the best {count} of {most} numbers were asked for")
