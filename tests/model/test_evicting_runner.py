"""Targets that evict keys and values: what they keep, and that they say so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command import expect_error, run_foretell, tiny_target
from foretell.catalogue import BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.core.tree import root_tree
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.load import load
from foretell.model import kernels
from foretell.model.cache.policy import H2O, CachePolicy, SnapKV, StreamingLLM, parse_target_policy
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.compact_runner import SparseCacheRunner
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.evicting_runner import EVICTION_INTERVAL, EvictingRunner
from foretell.model.run.network import Network
from foretell.model.run.network_runner import NetworkRunner
from helpers import VOCAB, chain_tree, context_of, random_tokens, wide_target

native = pytest.param("native", marks=pytest.mark.skipif(not kernels.available(), reason="no compiler"))
networks = pytest.mark.parametrize("kind", ["torch", native])
TEXT = random_tokens(120, seed=6)


def network_of(kind: str) -> Network:
    return NativeDecoder(wide_target(), "float32") if kind == "native" else wide_target()


def read(runner: NetworkRunner, tokens: list[int]) -> torch.Tensor:
    """Read a prompt and then a token, as decoding does; logits after the token."""
    runner.forward([0], chain_tree(tokens[:-1]))
    runner.commit(0, range(len(tokens) - 1))
    logits: torch.Tensor = runner.forward([0], root_tree(tokens[-1:])).logits
    runner.commit(0, [0])
    return logits


@networks
@pytest.mark.parametrize("policy", [StreamingLLM(16), SnapKV(16), H2O(16)])
def test_what_is_left_is_what_the_policy_selects_and_memory_is_freed(kind: str, policy: CachePolicy) -> None:
    network = network_of(kind)
    whole, evicting = DecoderRunner(network), EvictingRunner(network, policy)
    if policy.accumulates:
        whole.record_attention()
    torch.testing.assert_close(read(evicting, TEXT), read(whole, TEXT), rtol=0, atol=0 if kind == "native" else 1e-5)
    assert (evicting.length(0), evicting.slots(0), evicting.store.blocks.slots(0)) == (120, 16, 64)
    sparse = SparseCacheRunner(network, policy, 8)
    sparse.attach(whole)
    sparse.follow(context_of([*TEXT, 5]))
    found, expected = (r.forward([0], chain_tree([5, 7])).logits for r in (evicting, sparse))
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if kind == "native" else 1e-5)
    assert evicting.restorable(0, 120) == 120 and evicting.restorable(0, 119) == 0
    evicting.truncate(0, 60)
    assert (evicting.length(0), evicting.slots(0)) == (0, 0)
    read(evicting, TEXT[:30])
    evicting.truncate(0, 20)
    assert (evicting.length(0), evicting.slots(0)) == (20, 20)


def generate(
    network: Network, policy: CachePolicy | None, method: str, rows: int = 1, chunk: int = 512
) -> list[list[int]]:
    runner = DecoderRunner(network) if policy is None else EvictingRunner(network, policy)
    engine = Engine(runner, build(method, BuildContext(VOCAB, network)), rows, chunk)
    sampling = SamplingParams(temperature=12.0, seed=3)
    requests = [Request(random_tokens(n, seed=n), sampling, max_new_tokens=50) for n in (90, 3, 40)]
    return [list(done.tokens) for done in engine.complete(requests)]


@networks
def test_answers_differ_but_do_not_depend_on_the_batch(kind: str) -> None:
    network, policy = network_of(kind), StreamingLLM(16)
    alone = generate(network, policy, "autoregressive")
    assert alone != generate(network, None, "autoregressive")
    assert generate(network, policy, "autoregressive", rows=3, chunk=17) == alone
    assert generate(network, StreamingLLM(200), "autoregressive") == generate(network, None, "ngram")
    assert [len(tokens) for tokens in generate(network, policy, "ngram", rows=2)] == [50] * 3


def test_memory_is_bounded_while_an_answer_is_decoded() -> None:
    runner = EvictingRunner(wide_target(), SnapKV(8))
    runner.forward([0], chain_tree(TEXT[:10]))
    runner.commit(0, range(10))
    most = 0
    for token in TEXT[:100] * 2:
        runner.forward([0], root_tree([token]))
        runner.commit(0, [0])
        most = max(most, runner.slots(0))
    assert runner.length(0) == 210 and most == 8 + EVICTION_INTERVAL


def test_the_backend_names_the_policy_and_answers_are_lossy() -> None:
    backend = EvictingRunner(wide_target(), SnapKV(64)).backend
    assert backend.cache_policy == "snapkv@64" and str(backend).endswith("float32 snapkv@64 cache")
    model = load(str(tiny_target()), "float32", kv_cache_policy="streaming_llm@8")
    (answer,) = model.generate("some words to begin with, and more of them to come", max_new_tokens=90)
    (plain,) = load(str(tiny_target()), "float32").generate(
        "some words to begin with, and more of them to come", max_new_tokens=90
    )
    assert not answer.lossless and not answer.exact and plain.lossless


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("snapkw@64", "unknown KV cache policy 'snapkw': did you mean 'snapkv'"),
        ("retrieval@64", "unknown KV cache policy 'retrieval'"),
        ("tova", "needs a budget of keys, as in tova@1024; found 'tova'"),
        ("tova@x", "needs a budget of keys"),
        ("tova@7", "at least 8 keys, found a budget of 7"),
    ],
)
def test_other_policies_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_target_policy(text)
    assert "policy" in expect_error("generate", "hello", "--model", tiny_target(), "--kv-cache-policy", text)


@pytest.mark.parametrize("method", ["layer_skip", "sparse_kv_draft"])
def test_methods_that_draft_in_the_whole_cache_are_refused(method: str) -> None:
    options = ("--model", tiny_target(), "--kv-cache-policy", "tova@64", "--method", method)
    assert "cache" in expect_error("generate", "hello", *options)


@pytest.mark.exhaustive
def test_the_output_says_lossy_and_evaluate_measures_the_price(tmp_path: Path) -> None:
    options = ("--model", tiny_target(), "--dtype", "float32", "--kv-cache-policy", "streaming_llm@8")
    result = run_foretell("generate", "hello", *options, "--max-new-tokens", "90")
    assert result.exit_code == 0 and "LOSSY" in result.stderr and "evicted beyond streaming_llm@8" in result.stderr
    record = json.loads(run_foretell("generate", "hello", *options, "--max-new-tokens", "9", "--json").stdout)
    assert record["lossless"] is False and record["backend"]["cache_policy"] == "streaming_llm@8"
    assert "fidelity_loss" not in record
    file = tmp_path / "text.txt"
    file.write_text("a few words of a text that is compared, again and again. " * 40)
    measured = ("--text", file, "--tokens", "400", "--length", "200", "--json")
    (report,) = json.loads(run_foretell("evaluate", *options, *measured, "--from", "20").stdout)
    assert report["kv_cache_policy"] == "streaming_llm@8" and report["kl"] > 1e-4
    assert report["tokens"] % (200 - 1 - 20) == 0
    generous = (*options[:-1], "streaming_llm@200")
    (report,) = json.loads(run_foretell("evaluate", *generous, *measured).stdout)
    assert report["kl"] < 1e-6 and report["same_top"] == 1
    assert "must be 1 to 198 of 200, found 199" in expect_error("evaluate", *options, *measured, "--from", "199")
    error = expect_error("evaluate", *options[:4], *measured, "--from", "5")
    assert "--from would have no effect: it is read with --kv-cache-policy only" in error


def test_models_with_windows_are_refused() -> None:
    network = wide_target()
    network = network.without_blocks(replace(network.config, window=8, window_layers=(0,)), network.skip)
    with pytest.raises(ValueError, match="has sliding windows"):
        EvictingRunner(network, SnapKV(8))
