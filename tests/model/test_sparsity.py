"""Layers that read a part of their neurons: in torch, on the kernels, and what they must equal."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from command import save_tiny_model
from foretell.bench.random_file import random_model_file
from foretell.load import load
from foretell.model.block.decoder import BlockRange, Decoder
from foretell.model.block.layer import FeedForward
from foretell.model.block.linear import Linear
from foretell.model.block.modules import to_weights
from foretell.model.block.sparsity import (
    FirstNeurons,
    GateThreshold,
    InputThresholds,
    NeuronRule,
    PredictedNeurons,
    Predictor,
    SparseFeedForward,
    check_sparse,
    first_neurons,
    sparse_decoder,
)
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import load_native
from foretell.model.offload.sparsity_file import SparsityFile, read_sparsity
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.testing import TINY, tiny_decoder
from helpers import all_logits, chain_tree, random_tokens

HIDDEN, FFN, TOKENS, HEADS = 80, 192, 21, TINY.heads


@cache
def dense() -> Decoder:
    return tiny_decoder(replace(TINY, hidden=HIDDEN, head_dim=16, vocab=29, layers=2, ffn=FFN), 0, torch.float32)


@cache
def packed(precision: Precision) -> NativeDecoder:
    return NativeDecoder(dense(), precision)


def sparse(rule: NeuronRule, precision: Precision) -> NativeDecoder:
    return packed(precision).with_rules([rule, rule], lambda i: to_weights(dense().block(i)))


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


def unit_predictor(units: int, threshold: float, seed: int = 1, ahead: bool = False) -> Predictor:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(*shape, generator=generator) for shape in ((24, HIDDEN), (units, 24), (units,))]
    return Predictor(parts[0], parts[1], threshold, parts[2], ahead)


def in_runs(threshold: float, heads: float | None, ahead: bool = False) -> PredictedNeurons:
    """Runs of 32 neurons, and heads where they have a threshold."""
    chosen = None if heads is None else unit_predictor(HEADS, heads, 2, ahead)
    return PredictedNeurons(**vars(unit_predictor(FFN // 32, threshold, 1, ahead)), unit=32, heads=chosen)


RULES = (
    GateThreshold(0.05),
    InputThresholds(0.1, 0.02, 0.1, 0.002),
    predictor(0.5),
    FirstNeurons(128),
    in_runs(0.5, 0.2),
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


@pytest.mark.parametrize(
    "rule", [GateThreshold(-1.0), InputThresholds(0, 0, 0, 0), predictor(-1e9), in_runs(-1e9, -1e9)], ids=str
)
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


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_relu_model_that_reads_what_is_not_zero_is_that_of_transformers(
    native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_NATIVE", native)
    folder = save_tiny_model(tmp_path / "relu", hidden=64, ffn=128)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    tokens, model = random_tokens(40, 257), load(str(folder), "float32")
    assert isinstance(model.network, NativeDecoder) == (native == "1")
    with torch.inference_mode():
        expected = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0].float().numpy()
    layers = model.config.layers
    SparsityFile(method="cats", model="", layers=layers, sparsity=0, thresholds=((0.0,),) * layers).save(tmp_path)
    network = load(str(folder), "float32", sparsity=tmp_path).network
    for logits in (all_logits(model.network, tokens), all_logits(network, tokens)):
        np.testing.assert_allclose(logits, expected, atol=2e-4)
    if isinstance(network, NativeDecoder):
        assert network.neuron_counts is not None and 0.3 < network.neuron_counts.chosen_share() < 0.7


def test_heads_that_a_token_does_not_choose_keep_its_keys_for_later_ones() -> None:
    text, kept = random_tokens(TOKENS, 29), []
    for network in (sparse(in_runs(0.5, 0.2), "float32"), packed("float32")):
        runner = DecoderRunner(network)
        runner.forward([0], chain_tree(text))
        runner.commit(0, range(TOKENS))
        assert isinstance(runner.cache, KVCache)
        kept.append([runner.cache.read(layer, torch.tensor([0]), TOKENS) for layer in range(2)])
    chosen, dense_ = kept
    assert all(torch.equal(one, other) for one, other in zip(chosen[0], dense_[0], strict=True))
    assert not torch.equal(chosen[1][0], dense_[1][0]) and bool(chosen[1][0].flatten(-1).ne(0).all())


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


def fixed(units: int, chosen: Sequence[int], ahead: bool = False) -> Predictor:
    """Chooses the same units for every token."""
    bias = torch.full((units,), -1.0)
    bias[list(chosen)] = 1.0
    return Predictor(torch.zeros(8, HIDDEN), torch.zeros(units, 8), 0.0, bias, ahead)


@cache
def wide_heads() -> Decoder:
    """Heads of whole panels."""
    return tiny_decoder(replace(TINY, hidden=HIDDEN, head_dim=32, vocab=29, layers=2, ffn=FFN), 0, torch.float32)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [[0], [1, 2], [0, 3], []], ids=str)
def test_chosen_heads_are_the_columns_of_the_output_that_are_read(heads: list[int], precision: Precision) -> None:
    """Keys and values of all heads are there whatever was chosen (Deja Vu's fourth check): only the output differs."""
    rule = PredictedNeurons(**vars(fixed(FFN // 32, range(FFN // 32))), unit=32, heads=fixed(HEADS, heads))
    found = states(NativeDecoder(wide_heads(), precision).with_rules([rule, rule]))
    masked = tiny_decoder(wide_heads().config, 0, torch.float32)
    for block in masked.blocks:
        without = [h for h in range(HEADS) if h not in heads]
        block.output.weight.data.unflatten(1, (HEADS, 32))[:, without] = 0  # type: ignore[union-attr,operator]
    assert torch.equal(found, states(NativeDecoder(masked, precision)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_heads_of_whole_panels_are_chosen_by_every_token_for_itself(precision: Precision) -> None:
    rule = in_runs(0.5, 0.2)
    network = NativeDecoder(wide_heads(), precision).with_rules([rule, rule])
    whole = states(network)
    assert torch.equal(whole, states(network, [1] * TOKENS)) and torch.equal(whole, states(network, [3, 18]))
    assert network.head_counts is not None and 0.1 < network.head_counts.chosen_share() < 0.9
    if precision == "float32":
        wanted = states(sparse_decoder(wide_heads(), [rule, rule]))
        torch.testing.assert_close(whole, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "kind", ["Q4_K", "bf16", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("Q4_0", "Q4_1", "Q8_0"))]
)
def test_runs_of_neurons_are_read_in_every_storage_type(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first runs for all tokens are the first neurons, bit for bit, and all runs are the dense network."""
    config = replace(TINY, vocab=49152, hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=256, tied=True)
    monkeypatch.setattr("foretell.bench.random_file.find_model", lambda shape: (shape, config))
    weights = GGUFWeights(GGUF(random_model_file("runs", kind, tmp_path)), config)
    dense_ = load_native(config, weights, "bfloat16" if kind == "bf16" else "int8-activations")
    size = 256 if kind == "Q4_K" else 128

    def outputs(network: NativeDecoder, chunks: Sequence[int] = (5,)) -> torch.Tensor:
        runner, found, at = DecoderRunner(network), list[torch.Tensor](), 0
        for count in chunks:
            found.append(runner.forward([0], chain_tree(list(range(at, at + count)))).logits)
            runner.commit(0, range(count))
            at += count
        return torch.cat(found)

    def runs(chosen: Sequence[int]) -> PredictedNeurons:
        part = fixed(8, chosen)
        return PredictedNeurons(torch.zeros(8, 256), part.outputs, 0.0, part.bias, unit=32)

    assert torch.equal(outputs(dense_.with_rules([runs(range(8))] * 2)), outputs(dense_))
    first = outputs(dense_.with_rules([FirstNeurons(size)] * 2))
    assert torch.equal(outputs(dense_.with_rules([runs(range(size // 32))] * 2)), first)
    generator = torch.Generator().manual_seed(0)
    own = PredictedNeurons(
        torch.randn(8, 256, generator=generator), torch.randn(8, 8, generator=generator), 0.0, torch.zeros(8), unit=32
    )
    network = dense_.with_rules([own, own])
    assert torch.equal(outputs(network), outputs(network, [1, 1, 3]))
    assert not torch.equal(outputs(network), outputs(dense_))


def test_looking_ahead_chooses_by_what_the_layer_before_reads() -> None:
    first, second = in_runs(0.5, 0.2), in_runs(0.5, 0.2, ahead=True)
    network = NativeDecoder(wide_heads(), "float32").with_rules([first, second])
    found = states(network)
    assert torch.equal(found, states(network, [1] * TOKENS)), "a token's choice is its own"
    expected = sparse_decoder(wide_heads(), [first, first])
    before, later = expected.block(0), expected.block(1)
    assert isinstance(later.mlp, SparseFeedForward) and isinstance(before.mlp, SparseFeedForward)
    for module, following in ((before.mlp.gate_up, later.mlp.gate_up), (before.qkv, later.qkv)):
        seen = list[torch.Tensor]()
        module.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        following.seen = seen  # type: ignore[assignment]
    runs, heads = unit_predictor(FFN // 32, 0.5), unit_predictor(HEADS, 0.2, 2)
    later.mlp.choose = lambda x: runs.choose(later.mlp.gate_up.seen[-1]).repeat_interleave(32, -1)  # type: ignore
    later.qkv.register_forward_hook(
        lambda module, inputs, out: setattr(module, "chosen", heads.choose(module.seen[-1]))
    )
    torch.testing.assert_close(found, states(expected), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="look ahead by a layer run on the CPU kernels only"):
        sparse_decoder(dense(), [first, second])


def test_a_run_that_begins_between_layers_reads_all_of_what_it_cannot_foresee() -> None:
    """No state of the layer before is at hand, so that the first layer is dense."""
    ahead = in_runs(1e9, 1e9, ahead=True)
    network = NativeDecoder(wide_heads(), "float32").with_rules([ahead, ahead])
    place = torch.arange(3, dtype=torch.int32)
    layout = Layout(torch.zeros_like(place), place, place, place + 1, torch.zeros(3, 0, dtype=torch.int32))
    found = list[torch.Tensor]()
    for each in (network, NativeDecoder(wide_heads(), "float32")):
        cache_ = each.new_cache()
        cache_.reserve([0], [3])
        found.append(each.run(each.embed(torch.arange(3)), layout, cache_, BlockRange(1, 2)).hidden_states[-1])
    assert torch.equal(*found)
