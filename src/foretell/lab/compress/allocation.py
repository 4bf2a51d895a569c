"""What every block gives up: zeros where it has few outliers (OWL), ranks where that adds least to the loss."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from jaxtyping import Float

from foretell.lab.compress.low_rank import LowRankCompressor, fitting, require_finite, saves
from foretell.lab.quantize.base import InputStatistics, Role, linears
from foretell.lab.quantize.calibration import CalibrationText, collect, model_rope_tables, run_block
from foretell.lab.quantize.job import Source
from foretell.lab.quantize.layout import EMBEDDING, shapes_of
from foretell.model.block.layer import DecoderBlock
from foretell.model.load.build import build_block

Tensor = torch.Tensor
T = TypeVar("T")
Matrix = tuple[int, Role]
"""A block and a matrix in it."""
_Form = tuple[int, float, int]
"""Numbers that a matrix stores, what it loses, and its rank; 0: dense."""
OWL, LOSS = "owl", "loss"
_OUTLIER = 5.0
"""Times the mean of a block above which a weight's score is an outlier (M in OWL)."""
_SPREAD = 0.08
"""Half of the distance between the largest and the smallest share of zeros (lambda in OWL)."""


def measure_blocks(
    source: Source, text: CalibrationText, measure: Callable[[DecoderBlock, Mapping[Role, InputStatistics]], T]
) -> list[T]:
    """What `measure` gives for every block of the source and the inputs of its matrices on the calibration text."""
    c, weights, ropes, measured = source.config, source.weights, model_rope_tables(source.config), list[T]()
    x = weights.require(EMBEDDING, c.vocab, c.hidden)[text.calibration].float() * c.embedding_scale
    for i in range(c.layers):
        block = build_block(c, i, weights, torch.float32, torch.device("cpu"))
        measured.append(measure(block, collect(c, ropes, i, block, x)))
        x = run_block(c, ropes, i, block, x)
        weights.release_pages()
    return measured


def outlier_share(block: DecoderBlock, inputs: Mapping[Role, InputStatistics]) -> float:
    """Share of the weights of a block whose score, |w_ij| * ||x_j||, is above 5 times the mean over the block."""
    sizes = {role: inputs[role].second_moment.diagonal().sqrt() for role in inputs}
    score = torch.cat([(linear.weight.abs() * sizes[role]).flatten() for role, linear in linears(block).items()])
    return float((score > _OUTLIER * score.mean()).float().mean())


def shares_by_outliers(outliers: Sequence[float], share: float) -> list[float]:
    """Shares of zeros by block, whose mean is `share`: linear in the outliers, the fewer the more, over a range of
    0.16, or of as much as keeps all shares in 0..1 (Yin et al., arXiv 2310.05175).
    """
    spread = min(2 * _SPREAD, share, 1 - share) / ((max(outliers) - min(outliers)) or 1.0)
    mean = sum(outliers) / len(outliers)
    return [share + spread * (mean - each) for each in outliers]


def dropped_energy(weight: Float[Tensor, "o i"], moment: Float[Tensor, "i i"]) -> Float[Tensor, " r"]:
    """Share of the mean squared outputs, on inputs of this second moment, that a matrix loses with its least directions
    0, 1, ... all of them: the least squared singular values of W S^(1/2).

    Raises:
        ValueError: the moment is not finite.
    """
    require_finite(moment)
    wide, values_of = weight.double(), torch.linalg.eigvalsh
    if len(wide) <= wide.shape[1]:
        energy = values_of(wide @ moment.double() @ wide.T)
    else:
        values, vectors = torch.linalg.eigh(moment.double())
        root = vectors * values.clamp_min(0).sqrt()
        energy = values_of(root.T @ (wide.T @ wide) @ root)
    lost = torch.nn.functional.pad(energy.clamp_min(0).cumsum(0), (1, 0))
    return lost / lost[-1].clamp_min(1e-30)


def allocate_ranks(source: Source, text: CalibrationText, compressor: LowRankCompressor) -> dict[Role, list[int]]:
    """`ranks_by_loss` of a model on the calibration text: by matrix, one rank for every block."""

    def lost(block: DecoderBlock, inputs: Mapping[Role, InputStatistics]) -> dict[Role, Tensor]:
        return {
            role: dropped_energy(linear.weight, compressor.moment(inputs[role], linear.weight.shape[1]))
            for role, linear in linears(block).items()
        }

    shapes, measured = shapes_of(source.config), enumerate(measure_blocks(source, text, lost))
    ranks = ranks_by_loss({(i, role): each[role] for i, each in measured for role in shapes}, shapes, compressor)
    return {role: [ranks[i, role] for i in range(source.config.layers)] for role in shapes}


def ranks_by_loss(
    lost: Mapping[Matrix, Float[Tensor, " r"]], shapes: Mapping[Role, tuple[int, int]], compressor: LowRankCompressor
) -> dict[Matrix, int]:
    """Ranks (0: dense) that store no more numbers than those of the compressor and lose least `dropped_energy`: from
    the smallest factors on, numbers go where they lower the loss most, along the convex hull of each matrix.
    """
    hulls = {at: _hull(_forms(energy, *shapes[at[1]])) for at, energy in lost.items()}
    chosen = {at: hull[0] for at, hull in hulls.items()}
    budget = sum(stored_numbers(compressor.stored_rank(*shapes[role]), *shapes[role]) for _, role in lost)
    left, full = budget - sum(numbers for numbers, _, _ in chosen.values()), set[Matrix]()
    steps = [(_slope(*step), at, step) for at, hull in hulls.items() for step in pairwise(hull)]
    for _, at, (before, after) in sorted(steps, key=lambda step: -step[0]):
        if after[0] - before[0] > left:
            full.add(at)
        elif at not in full:
            chosen[at], left = after, left - (after[0] - before[0])
    return {at: rank for at, (_, _, rank) in chosen.items()}


def stored_numbers(rank: int, outputs: int, inputs: int) -> int:
    """Numbers of a matrix that is stored as two factors of this rank; 0: whole."""
    return rank * (outputs + inputs) if rank else outputs * inputs


def _forms(lost: Tensor, outputs: int, inputs: int) -> list[_Form]:
    """What a matrix can be stored as, the smallest first."""
    least = min(outputs, inputs)
    ranks = sorted({fitting(rank, outputs, inputs) for rank in range(1, least)})
    factors = [rank for rank in ranks if saves(rank, outputs, inputs)]
    forms = [(stored_numbers(rank, outputs, inputs), float(lost[least - rank]), rank) for rank in factors]
    return [*forms, (outputs * inputs, 0.0, 0)]


def _slope(before: _Form, after: _Form) -> float:
    """Loss that is saved by a further number."""
    return (before[1] - after[1]) / (after[0] - before[0])


def _hull(forms: Sequence[_Form]) -> list[_Form]:
    """Those between which each further number saves less than the ones before."""
    hull = list[_Form]()
    for form in forms:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], form):
            hull.pop()
        hull.append(form)
    return hull
