"""Linear layers and embeddings packed for the kernels, and the checks of tensors that are passed to them."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.model.block.spec import GatedWeights, LinearWeights
from foretell.model.kernels import build, structures
from foretell.model.kernels.pack import Panels, interleave_bias, pack, pad_bias, plan_inner, plan_rows
from foretell.model.kernels.packed_file import PackedPart
from foretell.model.kernels.structures import OPERANDS, PANEL, PANEL_KINDS, Precision
from foretell.model.matrices.stored import Matrix


class NativeLinear:
    """A linear layer packed for the kernels; int8 means int8 weights and int8 activations.

    Raises:
        RuntimeError: the kernels are not available here.
    """

    def __init__(self, weight: Matrix, bias: Tensor | None, dtype: Precision) -> None:
        self._kernels = build.library()
        self.outputs, self.inputs = weight.shape
        self.precision: Precision = dtype
        self._packed = PackedLinears.pack([LinearPlan(plan_rows([weight], dtype), bias)], self._kernels)

    @classmethod
    def of_packed(cls, part: PackedPart, precision: Precision) -> "NativeLinear":
        """A layer that was packed before; see `packed`."""
        made = object.__new__(cls)
        made._kernels, made.precision = build.library(), precision
        first, *further = (struct for struct in part.structs if isinstance(struct, structures.Weight))
        made._packed = PackedLinears([first], list(part.tensors), further)
        made.inputs, made.outputs = first.inputs, sum(struct.outputs for struct in (first, *further))
        return made

    @property
    def packed(self) -> PackedPart:
        """Its structures and tensors."""
        return PackedPart((*self._packed.structs, *self._packed.further), self._packed.tensors)

    @property
    def struct(self) -> structures.Weight:
        """The argument of the kernels; points into memory that this layer owns."""
        return self._packed.structs[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to float32 [t, in]; returns float32 [t, out]."""
        check_tensor(x, torch.float32, "x", x.shape[0], self.inputs)
        y = torch.empty(x.shape[0], self.outputs)
        self._kernels.foretell_linear(
            self.struct,
            x.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            self.outputs,
            torch.get_num_threads(),
        )
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""
        return sum(tensor.nbytes for tensor in self._packed.tensors)

    @property
    def holds_floats(self) -> bool:
        """Whether rows can be read back; see `gather_rows`."""
        return self.struct.kind in (PANEL_KINDS.index("F32"), PANEL_KINDS.index("BF16"))

    def gather_rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, float32 [t, in]; only for weights that are packed as floats.

        Raises:
            ValueError: the weight is quantised.
        """
        dtypes = {PANEL_KINDS.index("F32"): torch.float32, PANEL_KINDS.index("BF16"): torch.bfloat16}
        dtype = dtypes.get(self.struct.kind)
        if dtype is None:
            raise ValueError(f"rows of a {PANEL_KINDS[self.struct.kind]} weight cannot be read back")
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
            self.struct,
            x.data_ptr(),
            probabilities.data_ptr(),
            index.data_ptr(),
            x.shape[0],
            count,
            torch.get_num_threads(),
        )
        return probabilities, index


class LinearPlan(NamedTuple):
    """How to pack a linear layer: its weights, one below the other, and the bias of all their outputs."""

    weights: Sequence[Panels]
    bias: Tensor | None = None


def plan_linear(linear: LinearWeights, precision: Precision) -> LinearPlan:
    """How to pack a linear layer."""
    return LinearPlan(plan_rows(linear.parts, precision), linear.bias)


def plan_gate_up(network: GatedWeights, precision: Precision) -> LinearPlan:
    """How to pack gate, if there is one, and up of a feed-forward network in one weight."""
    gate, bias = network.gate, network.gate_up.bias
    if gate is not None and bias is not None:
        bias = interleave_bias(bias)
    return LinearPlan(plan_inner(gate, network.up, precision), bias)


def float_precision(precision: Precision) -> Precision:
    """The precision of matrices that are floats in all precisions."""
    return "float32" if precision == "float32" else "bfloat16"


@dataclass(frozen=True)
class PackedLinears:
    """Packed linear layers that are read one after the other: their structures, and the tensors these point into."""

    structs: list[structures.Weight]
    tensors: list[Tensor]
    further: list[structures.Weight]
    """Structures of the second and further weights of a layer."""

    @staticmethod
    def pack(layers: Sequence[LinearPlan], kernels: ctypes.CDLL) -> "PackedLinears":
        """Pack layers."""
        words = iter(pack([weight for weights, _ in layers for weight in weights], kernels))
        made = PackedLinears([], [], [])
        for weights, bias in layers:
            biases = [None] * len(weights) if bias is None else torch.split(bias, [w.outputs for w in weights])
            parts = [made._struct(w, next(words), b) for w, b in zip(weights, biases, strict=True)]
            for part, following in pairwise(parts):
                part.next = ctypes.addressof(following)
            made.structs.append(parts[0])
            made.further.extend(parts[1:])
        return made

    def _struct(self, weight: Panels, words: Tensor, bias: Tensor | None) -> structures.Weight:
        self.tensors.append(words)
        if bias is not None:
            self.tensors.append(pad_bias(bias))
        return structures.Weight(
            words=words.data_ptr(),
            bias=None if bias is None else self.tensors[-1].data_ptr(),
            inputs=weight.inputs,
            outputs=weight.outputs,
            kind=PANEL_KINDS.index(weight.kind),
            operand=OPERANDS.index(weight.operand),
            next=None,
        )


def _weights_of(layer: structures.Weight) -> Iterator[structures.Weight]:
    """The weights of a layer, which write their outputs side by side."""
    yield layer
    if layer.next:
        yield from _weights_of(structures.Weight.from_address(layer.next))


def set_factor(layer: structures.Weight, address: int) -> None:
    """Let all weights of a layer read their inputs through the factor at an address."""
    for weight in _weights_of(layer):
        weight.factor = address


def linear_outputs(layer: structures.Weight) -> int:
    """Outputs of all weights of a layer."""
    return sum(weight.outputs for weight in _weights_of(layer))


class PartMemory:
    """Collects the structures and tensors that the structure of a packed part points into."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.structs, self.tensors = list[structures.Memory](), list[Tensor]()
        self._kernels = kernels

    def keep(self, struct: structures.Memory) -> int:
        """Keep a structure; returns its address."""
        self.structs.append(struct)
        return ctypes.addressof(struct)

    def vector(self, tensor: Tensor | None) -> int | None:
        """Keep a tensor in float32; returns its address."""
        if tensor is None:
            return None
        self.tensors.append(tensor.detach().float().contiguous())
        return self.tensors[-1].data_ptr()

    def linears(self, plans: Sequence[LinearPlan]) -> list[structures.Weight]:
        """Pack linear layers, which are read one after the other; returns their structures, which are not kept."""
        packed = PackedLinears.pack(plans, self._kernels)
        self.structs += packed.further
        self.tensors += packed.tensors
        return packed.structs


def pack_embedding(table: Tensor, scale: float) -> tuple[Tensor, structures.Embedding]:
    """An embedding, [vocab, hidden], for the kernels: the tensor, which must be kept alive, and its structure."""
    table = table.detach().contiguous()
    if table.dtype not in (torch.float32, torch.bfloat16):
        table = table.float()
    return table, structures.Embedding(
        table=table.data_ptr(), vocab=len(table), is_bfloat16=table.dtype == torch.bfloat16, scale=scale
    )


def check_tensor(tensor: Tensor, dtype: torch.dtype, name: str, *shape: int) -> None:
    """Check dtype, shape and contiguity of a tensor before a kernel reads it.

    Raises:
        ValueError: one of them is not as expected.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        actual = f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"{name} must be contiguous {dtype} {shape}, found {actual}")


def check_k(count: int, most: int) -> None:
    """Check the k of a top-k over `most` numbers.

    Raises:
        ValueError: it is not in 1 .. `most`.
    """
    if not 1 <= count <= most:
        raise ValueError(f"the best {count} of {most} numbers were asked for")
