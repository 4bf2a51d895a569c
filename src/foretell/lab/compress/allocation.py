"""How many weights every block loses: more where it has few outliers (OWL, Yin et al., arXiv 2310.05175)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from foretell.lab.quantize.base import InputStatistics, Role, linears
from foretell.lab.quantize.calibration import BlocksOnText, CalibrationText, embedded
from foretell.lab.quantize.job import Source
from foretell.model.block.layer import DecoderBlock

T = TypeVar("T")
OWL = "owl"
_OUTLIER = 5.0
"""Times the mean of a block above which a weight's score is an outlier (M in OWL)."""
_SPREAD = 0.08
"""Half of the distance between the largest and the smallest share of zeros (lambda in OWL)."""


def measure_blocks(
    source: Source, text: CalibrationText, measure: Callable[[DecoderBlock, Mapping[Role, InputStatistics]], T]
) -> list[T]:
    """What `measure` gives for every block of the source and the inputs of its matrices on the calibration text."""
    states = embedded(source.config, source.weights, text.calibration)
    walk = BlocksOnText(source.config, source.weights, states)
    return [measure(block, walk.inputs(i, block)) for i, block in walk]


def outlier_share(block: DecoderBlock, inputs: Mapping[Role, InputStatistics]) -> float:
    """Share of the weights of a block whose score, |w_ij| * ||x_j||, is above 5 times the mean over the block."""
    sizes = {role: inputs[role].second_moment.diagonal().sqrt() for role in inputs}
    score = torch.cat([(linear.weight.abs() * sizes[role]).flatten() for role, linear in linears(block).items()])
    return float((score > _OUTLIER * score.mean()).float().mean())


def shares_by_outliers(outliers: Sequence[float], share: float) -> list[float]:
    """Shares of zeros by block, whose mean is `share`: linear in the outliers, the fewer the more, over a range of
    0.16, or of as much as keeps all shares in 0..1.
    """
    spread = min(2 * _SPREAD, share, 1 - share) / ((max(outliers) - min(outliers)) or 1.0)
    mean = sum(outliers) / len(outliers)
    return [share + spread * (mean - each) for each in outliers]
