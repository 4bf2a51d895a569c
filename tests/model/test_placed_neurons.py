"""Sparse layers whose neurons are partly in a mapped file: in any placement they compute what they do in memory."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import Int
from test_sparsity import FFN, HIDDEN, dense, packed, predictor, sparse, states

from foretell.model.block.modules import to_weights
from foretell.model.block.sparsity import GateThreshold, NeuronRule, PredictedNeurons
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.linear import float_precision
from foretell.model.kernels.neuron_file import NeuronFile, record_bytes, write_layer
from foretell.model.kernels.placed_neurons import PlacedBlocks
from foretell.model.kernels.rows import row_tensor
from foretell.model.kernels.sparse import input_rows
from foretell.model.kernels.structures import Precision
from foretell.model.offload.neuron_placement import by_frequency, place_neurons
from foretell.model.offload.placement_file import file_order

COUNTS = torch.from_numpy(np.random.default_rng(3).integers(0, 1000, (2, FFN)))


def placed(rule: NeuronRule, precision: Precision, hot: tuple[int, int], folder: Path) -> NativeDecoder:
    """The sparse network with so many hot neurons in each of its two layers."""
    path, order = folder / "neurons.bin", file_order(COUNTS)
    weights = [to_weights(dense().block(i)) for i in range(2)]
    with path.open("wb") as out:
        for block, own in zip(weights, order, strict=True):
            assert block.mlp is not None
            write_layer(out, block.mlp, own, float_precision(precision))
    outer = packed(precision)
    made = PlacedBlocks(outer.stack, NeuronFile(path, 2, FFN, HIDDEN, float_precision(precision)), order)
    assert isinstance(rule, GateThreshold | PredictedNeurons)
    blocks = [made.with_neurons(i, made.without_neurons(i, weights[i], rule), hot[i]) for i in range(2)]
    network = outer.with_blocks(blocks)
    network.neuron_counts, network.file_reads = made.counts, made.reads
    return network


@pytest.mark.parametrize("rule", [GateThreshold(0.05), predictor(0.5)], ids=["gate", "predictor"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("hot", [(0, 0), (100, 7), (FFN, FFN)], ids=str)
def test_numbers_do_not_depend_on_where_neurons_lie(
    rule: NeuronRule, precision: Precision, hot: tuple[int, int], tmp_path: Path
) -> None:
    network = placed(rule, precision, hot, tmp_path)
    wanted = states(sparse(rule, precision))
    assert torch.equal(states(network), wanted) and torch.equal(states(network, [1] * 5 + [16]), wanted)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(states(network), wanted)
    finally:
        torch.set_num_threads(threads)


def test_a_placement_of_all_neurons_that_are_all_chosen_is_the_dense_network(tmp_path: Path) -> None:
    found = states(placed(GateThreshold(-1.0), "float32", (50, 50), tmp_path))
    torch.testing.assert_close(found, states(packed("float32")), atol=1e-4, rtol=1e-4)


def test_reads_of_the_file_are_counted(tmp_path: Path) -> None:
    rule = GateThreshold(0.05)
    everything, some = (placed(rule, "float32", hot, tmp_path) for hot in ((0, 0), (150, 150)))
    for network in (everything, some):
        states(network, [1] * 21)
    assert everything.neuron_counts is not None and everything.file_reads is not None and some.file_reads is not None
    chosen = int(everything.neuron_counts.numbers[:, 1].sum())
    neurons, requests, size = everything.file_reads.total()
    assert neurons == chosen and 0 < requests <= neurons and size >= neurons * record_bytes(HIDDEN, "float32")
    assert 0 < some.file_reads.total()[0] < neurons


def test_nothing_is_read_from_the_file_where_all_neurons_are_in_memory(tmp_path: Path) -> None:
    network = placed(GateThreshold(0.05), "bfloat16", (FFN, FFN), tmp_path)
    (tmp_path / "neurons.bin").write_bytes(b"")  # a read would end the process
    states(network)
    assert network.file_reads is not None and network.file_reads.total() == (0, 0, 0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_order_of_the_file_is_a_permutation_and_its_inverse_gives_the_weights(
    precision: Precision, tmp_path: Path
) -> None:
    placed(GateThreshold(0.1), precision, (3, 4), tmp_path)
    file, order = NeuronFile(tmp_path / "neurons.bin", 2, FFN, HIDDEN, precision), file_order(COUNTS)
    for i in range(2):
        assert torch.equal(order[i].sort().values, torch.arange(FFN))
        assert (COUNTS[i][order[i]].diff() <= 0).all()
        weights = to_weights(dense().block(i))
        assert weights.mlp is not None and weights.mlp.gate is not None
        rows = torch.from_numpy(file.read(i, FFN))[order[i].argsort()][:, : 12 * file.row_words]
        parts = (
            row_tensor(weights.mlp.up, precision),
            input_rows(weights.mlp.down.parts[0], precision),
            row_tensor(weights.mlp.gate, precision),
        )
        for found, wanted in zip(torch.split(rows, 4 * file.row_words, 1), parts, strict=True):
            assert torch.equal(found.contiguous().flatten(), wanted.contiguous().view(torch.uint8).flatten())


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    placed(GateThreshold(0.1), "float32", (3, 4), tmp_path)
    path = tmp_path / "neurons.bin"
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ValueError, match="damaged: 2 layers of neurons take"):
        NeuronFile(path, 2, FFN, HIDDEN, "float32")


def counts_of(seed: int, layers: int = 6, neurons: int = 40) -> Int[np.ndarray, "l f"]:
    return np.random.default_rng(seed).zipf(1.5, (layers, neurons)).clip(0, 10_000)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least", [0, 8, 30])
def test_the_solver_keeps_the_capacity_and_is_no_worse_than_taking_by_frequency(seed: int, least: int) -> None:
    counts, capacity = counts_of(seed), 70
    found = place_neurons(counts, capacity, least)
    assert "integer program" in found.solver and sum(found.hot) <= capacity
    assert all(n == 0 or n >= least for n in found.hot)
    ranked = -np.sort(-counts.astype(float), axis=1)
    mass = [sum(row[:n].sum() for row, n in zip(ranked, hot, strict=True)) for hot in (
        found.hot, by_frequency(ranked, capacity, least)
    )]  # fmt: skip
    assert mass[0] >= mass[1] and found.share == pytest.approx(mass[0] / counts.sum())
    if least == 0:
        assert mass[0] == np.sort(counts.ravel())[-capacity:].sum()


def test_the_solver_finds_what_taking_by_frequency_does_not() -> None:
    """The most frequent neuron is alone in its layer, where at least three must be hot."""
    counts = np.array([[10, 1, 1, 1], [9, 9, 9, 0], [8, 8, 8, 8]])
    assert by_frequency(-np.sort(-counts.astype(float), axis=1), 4, 3).tolist() == [0, 4, 0]
    assert place_neurons(counts, 4, 3).share * counts.sum() == pytest.approx(32)
    assert sorted(place_neurons(counts, 6, 3).hot) == [0, 3, 3]


def test_the_placement_is_greedy_where_the_solver_has_no_time() -> None:
    found = place_neurons(counts_of(1), 70, 8, seconds=0.0)
    assert found.solver.startswith("greedy by frequency") and sum(found.hot) <= 70


@pytest.mark.parametrize(("capacity", "least"), [(-1, 0), (3, 41), (3, -1)])
def test_numbers_outside_their_range_are_refused(capacity: int, least: int) -> None:
    with pytest.raises(ValueError, match="a placement needs a capacity of at least 0"):
        place_neurons(counts_of(0), capacity, least)


def test_moving_a_neuron_to_memory_never_lowers_the_share_of_choices_there() -> None:
    shares = [place_neurons(counts_of(2, 1), capacity).share for capacity in range(41)]
    assert all(a <= b for a, b in pairwise(shares)) and shares[-1] == pytest.approx(1)
