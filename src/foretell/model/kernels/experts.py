"""Mixtures of experts packed for the kernels."""

import ctypes
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import torch
from torch import Tensor

from foretell.model.block.expert_matrices import ExpertMatrices, ExpertNorms, GatedMatrices
from foretell.model.config.model import MoEConfig
from foretell.model.kernels import structures
from foretell.model.kernels.linear import PackedLinears
from foretell.model.kernels.pack import Panels, interleave_bias, plan_inner, plan_rows
from foretell.model.kernels.structures import SCORINGS, Precision

_PACKED_TOGETHER = 8
"""Experts that are packed into one allocation: while it is filled their packed weights are in memory twice."""


class PackedExperts:
    """The mixture of experts of a layer, packed: its structure, and all memory that this points into.

    The router is float32 and reads float32, in every precision. The gate of the shared expert is its last row.

    Raises:
        ValueError: the experts' weights need inputs that are rounded in different ways.
    """

    def __init__(self, config: MoEConfig, weights: ExpertMatrices, precision: Precision, kernels: ctypes.CDLL) -> None:
        linears = [_pack_router(weights, kernels)]
        pairs = list[structures.Weight]()
        for some in _batches(weights.experts):
            linears.append(PackedLinears.pack([linear for m in some for linear in _plan_gated(m, precision)], kernels))
            pairs += linears[-1].structs
        gate_up, down = (_same_operands(pairs[i::2]) for i in (0, 1))
        shared = [structures.Weight(), structures.Weight()]
        if weights.shared is not None:
            linears.append(PackedLinears.pack(_plan_gated(weights.shared, precision), kernels))
            shared = linears[-1].structs
        norms = weights.norms
        vectors = [
            None if each is None else each.detach().float().contiguous()
            for each in (weights.selection_bias, weights.expert_scale, *(norms or [None] * len(ExpertNorms._fields)))
        ]
        self.tensors = (*chain(*(packed.tensors for packed in linears)), *(v for v in vectors if v is not None))
        """All memory of weights."""
        pointers = [None if vector is None else vector.data_ptr() for vector in vectors]
        struct = structures.Experts(
            *(linears[0].structs[0], pointers[0]),
            *(ctypes.addressof(gate_up), ctypes.addressof(down)),
            *(*shared, config.count, config.active, config.ffn, config.shared_ffn, weights.shared_gate is not None),
            *(SCORINGS.index(config.scoring), config.renormalize),
            *(config.groups, config.active_groups, config.ranked_by, config.scale, config.weighs_inputs),
            *pointers[1:],
        )
        self.structs = struct, gate_up, down
        """The structure, and the weights of the experts that it points to."""

    @staticmethod
    def supports(config: MoEConfig) -> bool:
        """Whether the kernels choose experts in this way: of softmax scores by the logits alone."""
        return config.scoring == "sigmoid" or not (config.selection_bias or config.ranked_by > 1)


def planned_bytes(config: MoEConfig, weights: ExpertMatrices, precision: Precision, kernels: ctypes.CDLL) -> int:
    """About how many bytes the packed experts take: as many for each as for the first."""
    first = next(iter(weights.experts))
    parts = [(config.count, first), *([] if weights.shared is None else [(1, weights.shared)])]
    return sum(n * panels.nbytes(kernels) for n, m in parts for plan, _ in _plan_gated(m, precision) for panels in plan)


def _batches(experts: Iterable[GatedMatrices]) -> Iterator[list[GatedMatrices]]:
    rest = iter(experts)
    while some := list(islice(rest, _PACKED_TOGETHER)):
        yield some


def _pack_router(weights: ExpertMatrices, kernels: ctypes.CDLL) -> PackedLinears:
    parts = [weights.router, *([] if weights.shared_gate is None else [weights.shared_gate])]
    matrix, bias = torch.cat([part.detach().float() for part in parts]), weights.router_bias
    if bias is not None:
        bias = torch.nn.functional.pad(bias.detach().float(), (0, len(matrix) - len(bias)))
    return PackedLinears.pack([(plan_rows([matrix], "float32"), bias)], kernels)


def _plan_gated(matrices: GatedMatrices, precision: Precision) -> list[tuple[list[Panels], Tensor | None]]:
    """Gate, if there is one, and up in one weight, and down, with their biases."""
    bias = interleave_bias(matrices.gate_bias, matrices.up_bias)
    gate_up = plan_inner(matrices.gate, matrices.up, precision)
    return [(gate_up, bias), (plan_rows([matrices.down], precision), matrices.down_bias)]


def _same_operands(weights: list[structures.Weight]) -> "ctypes.Array[structures.Weight]":
    """The weights as an array, which read the same rounded inputs."""
    if len({w.operand for w in weights}) != 1:
        raise ValueError("experts of one layer are stored in types whose inputs are rounded in different ways")
    return (structures.Weight * len(weights))(*weights)
