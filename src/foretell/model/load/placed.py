"""A sparse model under a limit of memory: hot neurons in memory, the others in a mapped file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.model.block.sparsity import GateThreshold, PredictedNeurons
from foretell.model.block.spec import BlockWeights
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.placed_neurons import PlacedBlocks
from foretell.model.kernels.structures import Precision
from foretell.model.load.native import pack_outer, packable_block
from foretell.model.load.network import runs_on_kernels
from foretell.model.load.weights import Weights
from foretell.model.offload.block_store import weight_bytes
from foretell.model.offload.neuron_placement import Placement, place_neurons
from foretell.model.offload.placement_file import NeuronProfile, file_order, read_placement
from foretell.model.offload.sparsity_file import SparseModel


@dataclass(frozen=True)
class PlacedNetwork:
    """The network, where its neurons are, and the bytes of weights that are in memory at most."""

    network: NativeDecoder
    placement: Placement


def check_placeable(config: ModelConfig, device: torch.device, sparse: SparseModel) -> None:
    """Refuse sparse models whose tokens do not choose neurons, layers of different sizes, and what the kernels do not
    run.

    Raises:
        ValueError: one of these.
    """
    if not runs_on_kernels(config, device):
        raise ValueError(
            "neurons are placed on the CPU kernels, which do not run this model here; run it without a limit of memory"
        )
    if not all(isinstance(rule, GateThreshold | PredictedNeurons) for rule in sparse.rules):
        raise ValueError(
            f"neurons are placed where every token chooses its own ones (cats, deja_vu), and {sparse.file.method} "
            "does not choose neurons; run it without a limit of memory"
        )
    if any(isinstance(rule, PredictedNeurons) and (rule.unit > 1 or rule.heads) for rule in sparse.rules):
        raise ValueError(
            "neurons are placed where they are chosen one by one and heads are not; train the predictors without "
            "--block and --head-sparsity, or run the model without a limit of memory"
        )
    if any(config.ffn_of(i) != config.ffn for i in range(config.layers)):
        raise ValueError("neurons are placed in models whose layers have equally many, and this one has not")


def place_network(
    outer: NativeDecoder,
    block_weights: Callable[[int], BlockWeights],
    sparse: SparseModel,
    profile: NeuronProfile,
    limit: int,
) -> PlacedNetwork:
    """The decoder whose neurons are in memory as far as `limit` bytes of weights allow. `outer`: the decoder without
    its blocks. What a pass reads from the file takes at most the memory of one layer's neurons, which `limit` includes.

    Raises:
        ValueError: the limit does not hold what is not placed.
        OSError: the file cannot be read.
    """
    made = PlacedBlocks(outer.stack, profile.neurons, file_order(profile.counts))
    blocks = []
    for i, rule in enumerate(sparse.rules):
        assert isinstance(rule, GateThreshold | PredictedNeurons)
        blocks.append(made.without_neurons(i, block_weights(i), rule))
    fixed = weight_bytes(outer) + sum(block.nbytes for block in blocks) + profile.neurons.layer_bytes
    size = profile.neurons.record_bytes
    if fixed > limit:
        raise ValueError(
            f"the memory limit of {limit:,} bytes is too small: embedding, head, attention, what chooses neurons, and "
            f"the neurons of one layer take {fixed:,}"
        )
    placement = place_neurons(profile.counts.numpy(), (limit - fixed) // size, profile.file.least_neurons)
    placed = [made.with_neurons(i, block, n) for i, (block, n) in enumerate(zip(blocks, placement.hot, strict=True))]
    network = outer.with_blocks(placed)
    network.neuron_counts, network.file_reads = made.counts, made.reads
    return PlacedNetwork(network, placement)


def build_placed_network(
    config: ModelConfig,
    weights: Weights,
    precision: Precision,
    device: torch.device,
    sparse: SparseModel,
    folder: Path,
    limit: int,
) -> PlacedNetwork:
    """The sparse model of a directory within a limit of memory; its results are those of the sparse model in memory.

    Raises:
        ValueError: see `place_network` and `read_placement`; or the kernels do not run the model here.
    """
    check_placeable(config, device, sparse)
    profile = read_placement(folder, config, precision, sparse.file.thresholds)
    outer = pack_outer(config, weights, precision)

    def block_weights(i: int) -> BlockWeights:
        weights.release_pages()
        return packable_block(config, i, weights, precision)

    placed = place_network(outer, block_weights, sparse, profile, limit)
    weights.release_pages()
    hot = sum(placed.placement.hot) / profile.counts.numel()
    placed.network.sparsity = (
        f"{sparse.file.label}; {hot:.1%} of the neurons in memory, which are {placed.placement.share:.1%} of those "
        "that tokens of the profile choose"
    )
    return placed
