"""Mixtures of experts packed for the kernels."""

import ctypes
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import torch
from torch import Tensor

from foretell.model.config import MoEConfig
from foretell.model.expert_matrices import ExpertMatrices, GatedMatrices
from foretell.model.kernels import structures
from foretell.model.kernels.linear import PackedLinears
from foretell.model.kernels.pack import PackedWeight, interleave_bias, pack_floats, pack_gate_up, pack_rows
from foretell.model.kernels.structures import SCORINGS, Precision

_PACKED_TOGETHER = 8
"""Experts that are packed into one allocation: while it is filled their packed weights are in memory twice."""


class PackedExperts:
    """The mixture of experts of a layer, packed: its structure, and the tensors that this points into.

    The router is float32 and reads float32, in every precision. The gate of the shared expert is its last row.

    Raises:
        ValueError: the experts' weights need inputs that are rounded in different ways.
    """

    def __init__(self, config: MoEConfig, weights: ExpertMatrices, precision: Precision, kernels: ctypes.CDLL) -> None:
        how = precision, kernels
        self._linears = [_pack_router(weights, kernels)]
        pairs = list[structures.Weight]()
        for some in _batches(weights.experts):
            self._linears.append(PackedLinears([linear for m in some for linear in _pack_gated(m, *how)]))
            pairs += self._linears[-1].structs
        gate_up, down = (_same_operands(pairs[i::2]) for i in (0, 1))
        shared = [structures.Weight(), structures.Weight()]
        if weights.shared is not None:
            self._linears.append(PackedLinears(_pack_gated(weights.shared, *how)))
            shared = self._linears[-1].structs
        self._biases = [] if weights.selection_bias is None else [weights.selection_bias.detach().float().contiguous()]
        self.struct = structures.Experts(
            *(self._linears[0].structs[0], self._biases[0].data_ptr() if self._biases else None, gate_up, down),
            *(*shared, config.count, config.active, config.ffn, config.shared_ffn, weights.shared_gate is not None),
            *(SCORINGS.index(config.scoring), config.renormalize),
            *(config.groups, config.active_groups, config.ranked_by, config.scale),
        )

    @staticmethod
    def supports(config: MoEConfig) -> bool:
        """Whether the kernels choose experts in this way: of softmax scores by the logits alone."""
        return config.scoring == "sigmoid" or not (config.selection_bias or config.ranked_by > 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in (*chain(*(p.tensors for p in self._linears)), *self._biases))


def _batches(experts: Iterable[GatedMatrices]) -> Iterator[list[GatedMatrices]]:
    rest = iter(experts)
    while some := list(islice(rest, _PACKED_TOGETHER)):
        yield some


def _pack_router(weights: ExpertMatrices, kernels: ctypes.CDLL) -> PackedLinears:
    parts = [weights.router, *([] if weights.shared_gate is None else [weights.shared_gate])]
    matrix, bias = torch.cat([part.detach().float() for part in parts]), weights.router_bias
    if bias is not None:
        bias = torch.nn.functional.pad(bias.detach().float(), (0, len(matrix) - len(bias)))
    return PackedLinears([([pack_floats(matrix, "float32", kernels)], bias)])


def _pack_gated(
    matrices: GatedMatrices, precision: Precision, kernels: ctypes.CDLL
) -> list[tuple[list[PackedWeight], Tensor | None]]:
    """Gate and up in one weight, and down, with their biases."""
    bias = interleave_bias(matrices.gate_bias, matrices.up_bias)
    gate_up = [pack_gate_up(matrices.gate, matrices.up, precision, kernels)]
    return [(gate_up, bias), (pack_rows([matrices.down], precision, kernels), matrices.down_bias)]


def _same_operands(weights: list[structures.Weight]) -> "ctypes.Array[structures.Weight]":
    """The weights as an array, which read the same rounded inputs."""
    if len({w.operand for w in weights}) != 1:
        raise ValueError("experts of one layer are stored in types whose inputs are rounded in different ways")
    return (structures.Weight * len(weights))(*weights)
