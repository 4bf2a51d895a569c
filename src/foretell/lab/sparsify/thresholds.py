"""Thresholds on the magnitude of activations, per layer, from the quantiles on a calibration text."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int

from foretell.lab.quantize.base import ROLES
from foretell.lab.sparsify.activations import BlockActivations, block_activations
from foretell.model.config.model import ModelConfig
from foretell.model.load.weights import Weights

Tensor = torch.Tensor
THRESHOLD_METHODS = ("cats", "teal")
_MOST_NUMBERS = 1 << 22
"""Numbers that a quantile is taken of; of more, evenly spaced ones."""


def check_share(sparsity: float, option: str = "--sparsity") -> None:
    """Check a share of neurons, inputs or heads that are not read.

    Raises:
        ValueError: it is not at least 0 and less than 1.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"{option} is the share that is not read, at least 0 and less than 1; found {sparsity:g}")


def calibrate_thresholds(
    config: ModelConfig,
    weights: Weights,
    tokens: Int[Tensor, "b s"],
    method: str,
    sparsity: float,
    progress: Callable[[int], None] = lambda block: None,
) -> tuple[tuple[float, ...], ...]:
    """The thresholds of every layer below which the share `sparsity` of the activations lies; see
    `SparsityFile.thresholds`. `cats`: of the activated gates (arXiv 2404.08763); `teal`: of the inputs of every matrix
    (arXiv 2408.14690). `progress` is called with the number of blocks done.

    Raises:
        ValueError: the share is outside its range.
    """
    check_share(sparsity)
    thresholds = []
    for block in block_activations(config, weights, tokens):
        thresholds.append(_thresholds(block, method, sparsity))
        progress(block.index + 1)
    return tuple(thresholds)


def _thresholds(block: BlockActivations, method: str, sparsity: float) -> tuple[float, ...]:
    if method == "cats":
        return (magnitude_quantile(block.gates(), sparsity),)
    return tuple(magnitude_quantile(block.inputs[role], sparsity) for role in ROLES)


def magnitude_quantile(x: Float[Tensor, "*any"], share: float) -> float:
    """The magnitude that the share of the numbers does not exceed; 0 of a share of 0: only zeros are left out."""
    flat = x.abs().flatten()
    flat = flat[:: max(1, len(flat) // _MOST_NUMBERS)]
    count = round(share * len(flat))
    return float(flat.kthvalue(count).values) if count else 0.0
