"""Mixtures of experts packed for the kernels."""

import ctypes
from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from foretell.model.block.spec import ExpertWeights, GatedWeights, LinearWeights
from foretell.model.config.model import MoEConfig
from foretell.model.kernels import structures
from foretell.model.kernels.linear import LinearPlan, PartMemory, plan_gate_up, plan_linear
from foretell.model.kernels.pack import plan_rows
from foretell.model.kernels.structures import SCORINGS, Precision
from foretell.model.matrices.stored import StoredMatrix

_PACKED_TOGETHER = 8
"""Experts that are packed into one allocation: while it is filled their packed weights are in memory twice."""


def pack_experts(config: MoEConfig, weights: ExpertWeights, precision: Precision, memory: PartMemory) -> int:
    """The address of the mixture of experts of a layer. The router is float32 and reads float32, in every precision.
    The gate of the shared expert is its last row.

    Raises:
        ValueError: the experts' weights need inputs that are rounded in different ways.
    """
    (router,) = memory.linears([_plan_router(weights)])
    pairs = list[structures.Weight]()
    for some in _batches(weights.experts):
        pairs += memory.linears([plan for m in some for plan in _plan_gated(m, precision)])
    shared = [structures.Weight(), structures.Weight()]
    if weights.shared is not None:
        shared = memory.linears(_plan_gated(weights.shared, precision))
    vectors = ("selection_bias", "expert_scale", "router_norm", "input_norm", "output_norm", "dense_norm")
    struct = structures.make(
        structures.Experts,
        **{name: memory.vector(getattr(weights, name)) for name in vectors},
        router=router,
        gate_up=memory.keep(_same_operands(pairs[::2])),
        down=memory.keep(_same_operands(pairs[1::2])),
        shared_gate_up=shared[0],
        shared_down=shared[1],
        count=config.count,
        active=config.active,
        ffn=config.ffn,
        shared_ffn=config.shared_ffn,
        shared_gate=weights.shared_gate is not None,
        scoring=SCORINGS.index(config.scoring),
        renormalize=config.renormalize,
        groups=config.groups,
        active_groups=config.active_groups,
        ranked_by=config.ranked_by,
        scale=config.scale,
        weighs_inputs=config.weighs_inputs,
    )
    return memory.keep(struct)


def supports(config: MoEConfig) -> bool:
    """Whether the kernels choose experts in this way: of softmax scores by the logits alone."""
    return config.scoring == "sigmoid" or not (config.selection_bias or config.ranked_by > 1)


def planned_bytes(config: MoEConfig, weights: ExpertWeights, precision: Precision, kernels: ctypes.CDLL) -> int:
    """About how many bytes the packed experts take: as many for each as for the first."""
    first = next(iter(weights.experts))
    parts = [(config.count, first), *([] if weights.shared is None else [(1, weights.shared)])]
    plans = ((count, plan) for count, network in parts for plan in _plan_gated(network, precision))
    return sum(count * panels.nbytes(kernels) for count, plan in plans for panels in plan.weights)


def _batches(experts: Iterable[GatedWeights]) -> Iterator[list[GatedWeights]]:
    rest = iter(experts)
    while some := list(islice(rest, _PACKED_TOGETHER)):
        yield some


def _plan_router(weights: ExpertWeights) -> LinearPlan:
    linears = [weights.router, *([] if weights.shared_gate is None else [weights.shared_gate])]
    matrix, bias = torch.cat([_floats(linear) for linear in linears]), weights.router.bias
    if bias is not None:
        bias = torch.nn.functional.pad(bias.detach().float(), (0, len(matrix) - len(bias)))
    return LinearPlan(plan_rows([matrix], "float32"), bias)


def _floats(linear: LinearWeights) -> torch.Tensor:
    (matrix,) = linear.parts
    return (matrix.widen() if isinstance(matrix, StoredMatrix) else matrix.detach()).float()


def _plan_gated(network: GatedWeights, precision: Precision) -> list[LinearPlan]:
    """Gate, if there is one, and up in one weight, and down."""
    return [plan_gate_up(network, precision), plan_linear(network.down, precision)]


def _same_operands(weights: list[structures.Weight]) -> "ctypes.Array[structures.Weight]":
    """The weights as an array, which read the same rounded inputs."""
    if len({w.operand for w in weights}) != 1:
        raise ValueError("experts of one layer are stored in types whose inputs are rounded in different ways")
    return (structures.Weight * len(weights))(*weights)
