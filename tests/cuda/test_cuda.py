"""The engine on a GPU: logits, sequences and distributions are those of the CPU, with and without CUDA graphs.

Every test also runs on the CPU, where the graph's static tensors are used without a graph, so that the suite itself is
checked without a GPU.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from command import run_foretell, tiny_target
from foretell.bench.own_backend import OwnForwardBackend
from foretell.catalogue import BUILT_IN, Entry
from foretell.core.context import ModelOutput
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.linear import quantize_int8
from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.speculator.network.base import TargetInfo
from foretell.testing import TINY, tiny_decoder
from foretell.train.data.batch import Batch
from foretell.train.data.features import compute_hidden_states
from foretell.train.recipe import RECIPES
from foretell.train.recipe.base import RecipeSetup
from helpers import (
    FAMILIES,
    VOCAB,
    chain_tree,
    exact_distribution,
    naive,
    of_catalogue,
    p_value,
    random_tokens,
    run,
    speculator,
    target,
    tokens_of,
    unchecked,
)

WIDE = ModelConfig("llama", vocab=500, hidden=128, layers=4, heads=8, kv_heads=2, head_dim=16, ffn=256, context=1024)
CONFIGS = {
    "grouped heads": WIDE,
    "windows and soft caps": replace(
        WIDE, window=64, window_layers=(0, 2), attention_softcap=50.0, logit_softcap=30.0, qk_norm=True, post_norms=True
    ),
    "mixture of experts": replace(
        WIDE, architecture="mixtral", experts=MoEConfig(count=4, active=2, ffn=64, layers=(0, 1, 2, 3))
    ),
}
PROMPT = 300
"""Tokens before the tree: more than one block of 256 slots, to which captured passes are padded."""
METHODS = {e.name: e for e in BUILT_IN}
SAMPLED = ("autoregressive", "sam_recycling", "draft_model", "block_verification", "specinfer", "spectr", "eagle3")
REHEARSED = ("draft_model", "eagle3")
"""Methods that `make test` also runs on the CPU, where `test_general` has the others."""
SMALL, START, LENGTH = 4, [1, 0, 2], 3
SAMPLES = {"cpu": 400, "cuda": 1200}
FLAT = SamplingParams(temperature=2.5)

exhaustive = pytest.mark.exhaustive
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU")
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def graphed(network: Decoder) -> Network:
    return network if network.config.experts else GraphedDecoder(network)


def logits_after(network: Network, prompt: list[int], nodes: int) -> torch.Tensor:
    """Logits at the nodes of a binary tree below a prompt."""
    runner = DecoderRunner(network)
    runner.forward([0], chain_tree(prompt))
    runner.commit(0, range(len(prompt)))
    tree = tree_from_lists(
        [random_tokens(nodes, network.config.vocab, seed=1)], [[(i - 1) // 2 if i else -1 for i in range(nodes)]]
    )
    logits: torch.Tensor = runner.forward([0], tree).logits.double().cpu()
    return logits


@cache
def exact_logits(name: str, nodes: int) -> torch.Tensor:
    return logits_after(tiny_decoder(CONFIGS[name]), random_tokens(PROMPT, WIDE.vocab), nodes)


def error(name: str, dtype: torch.dtype, device: str) -> float:
    """Largest difference from the logits in float64 on the CPU, as a share of the largest logit."""
    exact = exact_logits(name, 13)
    found = logits_after(
        graphed(tiny_decoder(CONFIGS[name], dtype=dtype, device=device)), random_tokens(PROMPT, WIDE.vocab), 13
    )
    return float((found - exact).abs().max() / exact.abs().max())


@on_every_device
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (n, d)
        for n in CONFIGS
        for d in (torch.float32, torch.bfloat16)
        if (n, d) != ("mixture of experts", torch.bfloat16)
    ],
    ids=str,
)
def test_logits_are_as_exact_as_those_of_the_cpu(device: str, name: str, dtype: torch.dtype) -> None:
    """A mixture in bfloat16 is left out: its rounding changes which experts are chosen."""
    assert 0 < error(name, dtype, device) <= 4 * error(name, dtype, "cpu")


@pytest.mark.parametrize(
    ("device", "nodes"),
    [pytest.param("cuda", n, marks=needs_gpu) for n in (1, 2, 3, 8, 17, 32, 33, 64, 65)]
    + [("cpu", n) for n in (1, 3, 33, 65)],
)
def test_trees_of_any_size_have_the_logits_of_the_cpu(device: str, nodes: int) -> None:
    network = GraphedDecoder(tiny_decoder(CONFIGS["windows and soft caps"], device=device))
    found = logits_after(network, random_tokens(PROMPT, WIDE.vocab), nodes)
    torch.testing.assert_close(found, exact_logits("windows and soft caps", nodes), rtol=0, atol=1e-9)


@on_every_device
def test_eight_bit_weights_lose_on_every_device_the_same(device: str) -> None:
    def logits(place: str) -> torch.Tensor:
        decoder = tiny_decoder(WIDE, dtype=torch.float32, device=place)
        quantize_int8(decoder)
        return logits_after(GraphedDecoder(decoder), random_tokens(PROMPT, WIDE.vocab), 13)

    exact = exact_logits("grouped heads", 13)
    expected = float((logits("cpu") - exact).abs().max())
    loss = float((logits(device) - exact).abs().max())
    assert expected > 1e-3, "the weights were quantised"
    assert abs(loss / expected - 1) <= (0.5 if device == "cuda" else 0), (
        "sums in another order round some numbers apart"
    )


def engine_on(device: str, entry: Entry, vocab: int, rows: int, dtype: torch.dtype = torch.float64) -> Engine:
    """A method of the catalogue over the tiny target of the general tests, all on one device. In float32 a GPU attends
    by the kernels.
    """
    network = tiny_decoder(replace(TINY, vocab=vocab), dtype=dtype, device=device)
    draft = tiny_decoder(replace(TINY, vocab=vocab, layers=1), seed=5, dtype=dtype, device=device)
    trained = speculator(entry.speculator, vocab) if entry.speculator else None
    method = of_catalogue(entry, network, (DecoderRunner(draft), DecoderRunner(network.first_layers(1))), trained)
    return Engine(DecoderRunner(GraphedDecoder(network)), method, rows=rows, chunk=64)


@cache
def requests() -> list[Request]:
    return [Request(random_tokens(n, seed=n), max_new_tokens=12 + n % 5) for n in (3, 17, 40, 9, 25)]


@cache
def naive_sequences() -> list[list[int]]:
    return [naive(target(), r) for r in requests()]


PLACES = [("cuda", torch.float64), ("cuda", torch.float32), ("cpu", torch.float64)]


def on_places(names: Sequence[str]) -> pytest.MarkDecorator:
    """Methods on a GPU, with torch's attention and with the kernels, and some of them on the CPU."""
    cases = [
        pytest.param(d, dtype, n, marks=needs_gpu if d == "cuda" else () if n in REHEARSED else exhaustive)
        for d, dtype in PLACES
        for n in names
    ]
    return pytest.mark.parametrize(("device", "dtype", "name"), cases, ids=str)


@on_places(FAMILIES)
def test_greedy_sequences_are_those_of_naive_decoding_on_the_cpu(device: str, dtype: torch.dtype, name: str) -> None:
    engine = engine_on(device, METHODS[name], VOCAB, rows=3, dtype=dtype)
    attention = "triton" if (device, dtype) == ("cuda", torch.float32) else "torch"
    assert engine.runner.backend.attention == attention
    assert [tokens_of(u) for u in run(engine, requests())] == naive_sequences()
    assert engine.runner.network.device.type == device  # type: ignore[attr-defined]


def distribution_p_value(device: str, name: str, dtype: torch.dtype = torch.float64) -> float:
    """p-value of sampled sequences under the target's distribution; few rows, so that passes are replayed as graphs."""
    requests = [Request(START, replace(FLAT, seed=i), max_new_tokens=LENGTH) for i in range(SAMPLES[device])]
    with unchecked():
        sequences = [tokens_of(u) for u in run(engine_on(device, METHODS[name], SMALL, 16, dtype), requests)]
    outcomes = np.ravel_multi_index(np.array(sequences).T, (SMALL,) * LENGTH)
    expected = exact_distribution(target(SMALL), START, LENGTH, FLAT)
    return p_value(np.bincount(outcomes, minlength=SMALL**LENGTH), expected)


@on_places(SAMPLED)
def test_sampled_sequences_follow_the_distribution_of_the_target(device: str, dtype: torch.dtype, name: str) -> None:
    assert distribution_p_value(device, name, dtype) > 1e-3


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.exhaustive), pytest.param("cuda", marks=needs_gpu)]
)
def test_a_lossy_method_does_not_follow_the_distribution(device: str) -> None:
    assert distribution_p_value(device, "typical_lossy") < 1e-6


@needs_gpu
def test_small_passes_are_replayed_as_graphs_and_large_ones_are_not() -> None:
    network = GraphedDecoder(tiny_decoder(WIDE, device="cuda"))
    logits_after(network, random_tokens(PROMPT, WIDE.vocab), 65)
    assert not network._passes
    logits_after(network, random_tokens(PROMPT, WIDE.vocab), 64)
    assert network._passes and all(p.graph is not None for p in network._passes.values())


@on_every_device
def test_a_graph_is_reused_for_other_tokens_and_a_longer_cache(device: str) -> None:
    """Each pass is compared with one without graphs. The cache grows past 256 slots, while graphs captured before write
    to fewer.
    """
    decoder = tiny_decoder(WIDE, device=device)
    runners = [DecoderRunner(GraphedDecoder(decoder)), DecoderRunner(decoder)]

    def read(tokens: list[int], hidden_layers: tuple[int, ...]) -> list[ModelOutput]:
        outputs = [r.forward([0], chain_tree(tokens), hidden_layers=hidden_layers) for r in runners]
        for r in runners:
            r.commit(0, range(len(tokens)))
        return outputs

    for i in range(12):
        found, expected = read(random_tokens(30, WIDE.vocab, seed=i), hidden_layers=(0, 2, 4) if i % 2 else ())
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-9)
        for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    assert runners[0].length(0) == 360


@on_every_device
def test_replaying_a_graph_changes_no_bit(device: str) -> None:
    network = GraphedDecoder(tiny_decoder(WIDE, dtype=torch.bfloat16, device=device))
    runner = DecoderRunner(network)
    first, second = (runner.forward([0], chain_tree([5, 6, 7, 8])).logits.clone() for _ in range(2))
    assert torch.equal(first, second)


@needs_gpu
def test_a_timed_pass_has_finished() -> None:
    backend = OwnForwardBackend("own", DecoderRunner(tiny_decoder(WIDE, device="cuda")))
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    backend.forward([1, 2, 3])
    assert torch.cuda.current_stream().query(), "the timed pass is still running"


@on_every_device
def test_the_command_line_answers_and_measures_on_the_device(device: str, tmp_path: Path) -> None:
    common = ("--model", tiny_target(), "--device", device, "--dtype", "float32")
    answers = {
        place: run_foretell(
            "generate",
            "abcabc",
            *common[:2],
            "--device",
            place,
            *common[4:],
            "--method",
            method,
            "--max-new-tokens",
            "24",
        ).stdout
        for place, method in (("cpu", "autoregressive"), (device, "sam_recycling"))
    }
    assert len(set(answers.values())) == 1 and all(answers.values())
    checked = run_foretell("verify", "ngram", *common, "--samples", "200", "--max-new-tokens", "12")
    assert checked.exit_code == 0, checked.output
    sizes = ("--tokens", "1,8", "--context", "32", "--repeats", "2", "--rows", "1,4", "--json", tmp_path / "step.json")
    timed = run_foretell("bench", "step", *common, *sizes)
    assert timed.exit_code == 0, timed.output
    report = json.loads((tmp_path / "step.json").read_text())
    competitors = {p["competitor"] for p in report["passes"]}
    assert report["device"] == device and ("foretell float32 without graphs" in competitors) == (device == "cuda")


def trained_once(kind: str, place: str) -> tuple[float, list[float]]:
    """The loss of a new speculator on two texts, and the norms of its gradients."""
    network = tiny_decoder(replace(WIDE, vocab=64), dtype=torch.float32, device=place)
    c = network.config
    card = TargetInfo(name="tiny", hidden=c.hidden, vocab=c.vocab, layers=c.layers)
    ends, options = embedding_and_head_of(network), {"candidates": "0"}
    recipe = RECIPES[kind].build(RecipeSetup(card, c, ends, draft_tokens=torch.arange(0, 64, 2), options=options))
    recipe.network.to(place)
    token = torch.tensor(random_tokens(80, 64)).view(2, 40).to(place)
    features = compute_hidden_states(network, token, recipe.hidden_layers)
    torch.manual_seed(0)
    loss = recipe.loss(recipe.network, Batch(token, torch.ones_like(token, dtype=torch.bool), features)).total
    torch.autograd.backward(loss)
    return float(loss.detach()), [float(p.grad.norm()) for p in recipe.network.parameters() if p.grad is not None]


@on_every_device
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_losses_of_trainings_are_those_of_the_cpu(device: str, kind: str) -> None:
    (loss, norms), (expected, expected_norms) = (trained_once(kind, place) for place in (device, "cpu"))
    assert loss == pytest.approx(expected, rel=1e-3) and norms == pytest.approx(expected_norms, rel=2e-2, abs=1e-4)
