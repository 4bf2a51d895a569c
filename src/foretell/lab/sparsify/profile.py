"""How often tokens choose every neuron (PowerInfer, arXiv 2312.12456)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from jaxtyping import Int

from foretell.lab.sparsify.activations import block_activations
from foretell.model.block.layer import FeedForward
from foretell.model.block.sparsity import GateThreshold, PredictedNeurons, SparseFeedForward
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.linear import float_precision
from foretell.model.kernels.neuron_file import write_layer
from foretell.model.kernels.structures import Precision
from foretell.model.load.native import packable_block
from foretell.model.load.weights import Weights
from foretell.model.offload.placement_file import FILE, NEURONS, PlacementFile, file_order, save_counts
from foretell.model.offload.sparsity_file import SparseModel

Tensor = torch.Tensor


def count_choices(
    config: ModelConfig,
    weights: Weights,
    sparse: SparseModel,
    tokens: Int[Tensor, "b s"],
    progress: Callable[[int], None] = lambda block: None,
) -> Int[Tensor, "l f"]:
    """How many of the tokens choose each neuron, in the dense model's states. `progress` is called with the number of
    blocks done.
    """
    counts = []
    for block in block_activations(config, weights, tokens):
        mlp, rule = block.block.mlp, sparse.rules[block.index]
        assert isinstance(mlp, FeedForward) and isinstance(rule, GateThreshold | PredictedNeurons)
        with torch.inference_mode():
            counts.append(SparseFeedForward(mlp, rule).choose(block.inputs["gate_up"]).sum(0))
        progress(block.index + 1)
    return torch.stack(counts)


def write_profile(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    precision: Precision,
    file: PlacementFile,
    counts: Int[Tensor, "l f"],
) -> None:
    """Write the counts, and all neurons in one file, the most frequent ones of every layer first.

    Raises:
        OSError: the disk is full or fails.
    """
    (folder / FILE).unlink(missing_ok=True)
    with (folder / NEURONS).open("wb") as out:
        for i, order in enumerate(file_order(counts)):
            block = packable_block(config, i, weights, precision)
            assert block.mlp is not None
            write_layer(out, block.mlp, order, float_precision(precision))
            weights.release_pages()
    save_counts(folder, file, counts)


def shares_of_most_frequent(counts: Int[Tensor, "l f"], parts: tuple[float, ...]) -> Iterator[float]:
    """The share of all choices that falls on these shares of the neurons, the most frequent of all layers."""
    ranked = counts.flatten().sort(descending=True).values.double().cumsum(0)
    for part in parts:
        count = round(part * len(ranked))
        yield float(ranked[count - 1] / ranked[-1]) if count else 0.0
