"""Layers that read a part of their neurons: in torch, on the kernels, and what they must equal."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.model.decoder import BlockRange, Decoder, FeedForward
from foretell.model.kernels.decoder import NativeDecoder, block_weights
from foretell.model.kernels.structures import Precision
from foretell.model.layout import Layout
from foretell.model.linear import Linear
from foretell.model.network import Network
from foretell.model.sparsity import (
    FirstNeurons,
    GateThreshold,
    InputThresholds,
    NeuronRule,
    PredictedNeurons,
    SparseFeedForward,
    check_sparse,
    first_neurons,
    sparse_decoder,
)
from foretell.model.sparsity_file import SparsityFile, read_sparsity
from foretell.testing import TINY, tiny_decoder

HIDDEN, FFN, TOKENS = 80, 192, 21


@cache
def dense() -> Decoder:
    return tiny_decoder(replace(TINY, hidden=HIDDEN, head_dim=16, vocab=29, layers=2, ffn=FFN), 0, torch.float32)


@cache
def packed(precision: Precision) -> NativeDecoder:
    return NativeDecoder(dense(), precision)


def sparse(rule: NeuronRule, precision: Precision) -> NativeDecoder:
    return packed(precision).with_rules([rule, rule], lambda i: block_weights(dense().block(i)))


def predictor(threshold: float) -> PredictedNeurons:
    generator = torch.Generator().manual_seed(1)
    inputs, outputs = torch.randn(24, HIDDEN, generator=generator), torch.randn(FFN, 24, generator=generator)
    return PredictedNeurons(inputs, outputs, threshold, torch.randn(FFN, generator=generator))


@torch.inference_mode()
def states(network: Network, chunks: Sequence[int] = (TOKENS,)) -> torch.Tensor:
    """The last states of a text that is read in chunks."""
    cache_, out, at = network.new_cache(), list[torch.Tensor](), 0
    cache_.reserve([0], [TOKENS])
    for size in chunks:
        place = torch.arange(at, at + size, dtype=torch.int32)
        layout = Layout(torch.zeros_like(place), place, place, place + 1, torch.zeros(size, 0, dtype=torch.int32))
        x = network.embed(torch.arange(at, at + size) % 29)
        out.append(network.run(x, layout, cache_, BlockRange(0, 2)).hidden_states[-1])
        at += size
    return torch.cat(out)


RULES = (
    GateThreshold(0.05),
    InputThresholds(0.1, 0.02, 0.1, 0.002),
    predictor(0.5),
    FirstNeurons(128),
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


@every_rule
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_numbers_of_a_token_depend_on_nothing_but_its_text(rule: NeuronRule, precision: Precision) -> None:
    network = sparse(rule, precision)
    whole = states(network)
    assert torch.equal(whole, states(network, [1] * TOKENS)) and torch.equal(whole, states(network, [5, 16]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(whole, states(network, [2, 19]))
    finally:
        torch.set_num_threads(threads)


@every_rule
def test_the_kernels_compute_what_torch_computes(rule: NeuronRule) -> None:
    found, wanted = states(sparse(rule, "float32")), states(sparse_decoder(dense(), [rule, rule]))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, states(dense()), atol=1e-2)


@pytest.mark.parametrize("rule", [GateThreshold(-1.0), InputThresholds(0, 0, 0, 0), predictor(-1e9)], ids=str)
def test_reading_all_neurons_is_the_dense_network(rule: NeuronRule) -> None:
    torch.testing.assert_close(states(sparse(rule, "float32")), states(dense()), atol=1e-4, rtol=1e-4)


def test_reading_no_neuron_leaves_the_residual_stream() -> None:
    nothing = states(sparse(GateThreshold(1e9), "float32"))
    without = packed("float32")
    skipped = states(without.without_sublayers(replace(dense().skip, mlp=frozenset({0, 1}))))
    torch.testing.assert_close(nothing, skipped, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_all_first_neurons_are_the_dense_network_bit_for_bit(precision: Precision) -> None:
    assert torch.equal(states(sparse(FirstNeurons(FFN), precision)), states(packed(precision)))


def test_the_oracle_set_of_a_gate_with_exact_zeros_is_the_dense_network() -> None:
    """Of a gate that is zero at half of the neurons, those that are not zero are enough (Deja Vu's second check)."""
    block = dense().block(0)
    assert isinstance(block.mlp, FeedForward)
    gate_up = block.mlp.gate_up.weight.data.clone()
    gate_up[: FFN // 2] = 0
    mlp = FeedForward(Linear(gate_up), block.mlp.down, "silu")
    x = torch.randn(7, HIDDEN)
    chosen = SparseFeedForward(mlp, GateThreshold(0.0))
    assert not chosen.choose(x)[:, : FFN // 2].any() and torch.equal(chosen(x), mlp(x))


def test_first_neurons_are_views_and_equal_the_others_masked() -> None:
    mlp, size = dense().block(0).mlp, 64
    assert isinstance(mlp, FeedForward)
    short = first_neurons(mlp, size)
    storages = {p.untyped_storage().data_ptr() for p in short.parameters()}
    assert storages == {p.untyped_storage().data_ptr() for p in mlp.parameters()}
    masked = FeedForward(Linear(mlp.gate_up.weight.data), Linear(mlp.down.weight.data.clone()), "silu")
    masked.down.weight.data[:, size:] = 0
    x = torch.randn(5, HIDDEN)
    torch.testing.assert_close(short(x), masked(x))


def test_first_neurons_take_no_memory_of_their_own() -> None:
    short, whole = sparse(FirstNeurons(64), "bfloat16"), packed("bfloat16")
    own = {t.data_ptr() for block in short.stack.blocks for t in block.tensors}
    assert own <= {t.data_ptr() for block in whole.stack.blocks for t in block.tensors}


def test_neurons_are_counted_once_per_pass_and_once_per_token() -> None:
    network = sparse(GateThreshold(0.05), "float32")
    assert network.neuron_counts is not None
    states(network, [1] * TOKENS)
    alone = network.neuron_counts.numbers.clone()
    states(network)
    together = network.neuron_counts.numbers - alone
    assert torch.equal(alone[:, :2], together[:, :2]) and (alone[:, 0] == TOKENS).all()
    assert torch.equal(alone[:, 1], alone[:, 2]) and (together[:, 2] <= FFN).all()
    assert (together[:, 2] < together[:, 1]).all() and 0 < network.neuron_counts.chosen_share() < 1


def test_a_number_of_neurons_that_kernels_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="100 of 192 neurons were asked for, and the kernels read multiples of 64"):
        sparse(FirstNeurons(100), "float32")


def test_other_models_are_refused() -> None:
    config = dense().config
    with pytest.raises(ValueError, match=r"has feed-forward networks without a gate; run it dense"):
        check_sparse(replace(config, gated=False), RULES[:1] * 2)
    with pytest.raises(ValueError, match="1 layers are described, and the model has 2"):
        check_sparse(config, RULES[:1])
    with pytest.raises(ValueError, match="layer 0 cannot have 500 neurons: the model has 192"):
        check_sparse(config, [FirstNeurons(500)] * 2)


def test_a_description_is_read_for_its_model_only(tmp_path: Path) -> None:
    config = dense().config
    file = SparsityFile(method="cats", model="a" * 16, layers=2, sparsity=0.5, thresholds=((0.1,), (0.2,)))
    file.save(tmp_path)
    assert read_sparsity(tmp_path, "a" * 16, config).rules == (GateThreshold(0.1), GateThreshold(0.2))
    with pytest.raises(ValueError, match="these neurons were chosen for another model"):
        read_sparsity(tmp_path, "b" * 16, config)
    file.model_copy(update={"thresholds": ((0.1,),)}).save(tmp_path)
    with pytest.raises(ValueError, match="damaged: it does not describe each of 2 layers"):
        read_sparsity(tmp_path, "", config)
    file.model_copy(update={"method": "deja_vu"}).save(tmp_path)
    with pytest.raises(ValueError, match="the predictors cannot be read"):
        read_sparsity(tmp_path, "", config)
    (tmp_path / "sparsity.json").write_text('{"kind": "foretell skip set"}')
    with pytest.raises(ValueError, match="not a description of a sparse model"):
        read_sparsity(tmp_path, "", config)
    with pytest.raises(ValueError, match="make one with `foretell calibrate sparsity`"):
        read_sparsity(tmp_path / "nothing", "", config)


def test_the_share_that_a_pass_reads_follows_the_union_of_its_tokens() -> None:
    """With independent choices of a share p, n tokens read 1 - (1 - p)^n (Deja Vu's and MoE's law)."""
    network = sparse(predictor(1.0), "float32")
    assert network.neuron_counts is not None
    states(network, [1])
    states(network, [4])
    tokens, chosen, read = network.neuron_counts.numbers.sum(0).tolist()
    assert chosen / tokens < read / 2 <= chosen and np.isfinite(read)
