"""Quest as a target: which pages a token selects, that its numbers depend on nothing else, and what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from command import expect_error, run_foretell, tiny_target
from foretell.catalogue import BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.load import load
from foretell.model import kernels
from foretell.model.cache.layout import Layout, PaddedLayout
from foretell.model.cache.pages import LEAST_BUDGET, PAGE, RECENT, page_bounds, selected_mask
from foretell.model.cache.policy import Quest
from foretell.model.config.model import CacheDtype
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.compact_runner import SparseCacheRunner
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from helpers import VOCAB, chain_tree, random_tokens, wide_target

native = pytest.param("native", marks=pytest.mark.skipif(not kernels.available(), reason="no compiler"))
networks = pytest.mark.parametrize("kind", ["torch", native])
TEXT = random_tokens(330, seed=7)
PROMPT = 290


def network_of(kind: str, budget: int, numbers: CacheDtype = "auto") -> Network:
    decoder = wide_target()
    config = replace(decoder.config, page_budget=budget, cache_dtype=numbers, context=512)
    decoder = decoder._sharing(config, decoder._block_list(), decoder.skip)
    return NativeDecoder(decoder, "float32") if kind == "native" else decoder


def prompted(network: Network, tokens: list[int], row: int = 0) -> DecoderRunner:
    runner = DecoderRunner(network)
    runner.forward([row], chain_tree(tokens))
    runner.commit(row, range(len(tokens)))
    return runner


def decode(runner: DecoderRunner, tokens: list[int], row: int = 0) -> torch.Tensor:
    """Logits after each of these tokens, read one by one."""
    found = []
    for token in tokens:
        found.append(runner.forward([row], chain_tree([token])).logits[0])
        runner.commit(row, [0])
    return torch.stack(found)


def drafted(tokens: list[int], parents: list[int]) -> TokenTree:
    return tree_from_lists([tokens], [parents])


def close(kind: str) -> float:
    return 0 if kind == "native" else 1e-4


def test_the_mask_is_what_the_paper_selects() -> None:
    generator = torch.Generator().manual_seed(0)
    count, budget = 320, LEAST_BUDGET + PAGE
    keys = torch.randn(1, 2, count, 16, generator=generator)
    queries = torch.randn(1, 2, 3, 2, 16, generator=generator)
    one = torch.tensor([count - 9, count - 1], dtype=torch.int32)
    layout = Layout(one * 0, one, one, one + 1, torch.zeros(2, 0, dtype=torch.int32), in_pages=one * 0 + 1)
    mask = selected_mask(queries, keys, PaddedLayout.from_layout(layout, torch.device("cpu")), budget)
    for head in range(2):
        for token, position in enumerate(one.tolist()):
            k, optional = keys[0, head].numpy(), (position + 1 - RECENT) // PAGE
            pages = k[: optional * PAGE].reshape(optional, PAGE, 16)
            q = queries[0, head, :, token].numpy()
            bounds = np.maximum(q[:, None] * pages.min(1), q[:, None] * pages.max(1)).sum(2).max(0)
            assert (bounds[:, None] >= (pages @ q.T).max(2) - 1e-5).all()
            kept = budget // PAGE - (position // PAGE + 1 - optional)
            best = {0, *(1 + np.argsort(-bounds[1:], kind="stable")[: kept - 1]).tolist()}
            seen = mask[0, head, token, : position + 1]
            assert {p for p in range(optional) if seen[p * PAGE : (p + 1) * PAGE].all()} == best
            assert seen[optional * PAGE :].all() and int(seen.sum()) == budget - (-(position + 1) % PAGE)


def test_the_bound_of_a_page_of_equal_keys_is_their_score() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys = torch.randn(4, 16, generator=generator), torch.randn(5, 16, generator=generator)
    bounds = page_bounds(queries, keys.repeat_interleave(PAGE, 0))
    torch.testing.assert_close(bounds, queries @ keys.T)


@pytest.mark.skipif(not kernels.available(), reason="no compiler")
@pytest.mark.parametrize("numbers", ["auto", "int8"])
def test_the_kernels_and_torch_select_the_same(numbers: CacheDtype) -> None:
    both = [decode(prompted(network_of(k, 128, numbers), TEXT[:PROMPT]), TEXT[PROMPT:]) for k in ("native", "torch")]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
    dense = decode(prompted(network_of("native", 0, numbers), TEXT[:PROMPT]), TEXT[PROMPT:])
    assert float((both[0] - dense).abs().max()) > 1e-3


@networks
def test_a_budget_for_the_whole_text_changes_nothing(kind: str) -> None:
    found, dense = (decode(prompted(network_of(kind, b), TEXT[:PROMPT]), TEXT[PROMPT:]) for b in (400, 0))
    torch.testing.assert_close(found, dense, rtol=0, atol=close(kind))


@networks
def test_tokens_of_trees_have_the_numbers_of_plain_decoding(kind: str) -> None:
    network = network_of(kind, 128)
    expected = decode(prompted(network, TEXT[:PROMPT]), TEXT[PROMPT:])
    runner = prompted(network, TEXT[:PROMPT])
    for at in range(PROMPT, len(TEXT) - 2, 2):
        tree = drafted([TEXT[at], 3, 4, TEXT[at + 1], 5], [-1, 0, 1, 0, 3])
        logits = runner.forward([0], tree).logits
        runner.commit(0, [0, 3])
        torch.testing.assert_close(logits[[0, 3]], expected[at - PROMPT :][:2], rtol=0, atol=close(kind))


@networks
def test_rows_that_go_back_or_are_copied_have_the_same_numbers(kind: str) -> None:
    network = network_of(kind, 128)
    expected = decode(prompted(network, TEXT[:PROMPT]), TEXT[PROMPT:])
    runner = prompted(network, TEXT[:PROMPT])
    assert runner.copy_row(0, 2, PROMPT)
    decode(runner, TEXT[:30])  # another continuation
    runner.truncate(0, PROMPT)
    for row in (0, 2):
        found = decode(runner, TEXT[PROMPT:], row)
        torch.testing.assert_close(found, expected, rtol=0, atol=close(kind))


@pytest.mark.skipif(not kernels.available(), reason="no compiler")
def test_the_number_of_threads_changes_nothing() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(decode(prompted(network_of("native", 256), TEXT[:PROMPT]), TEXT[PROMPT:]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.covering(1)
@networks
@pytest.mark.parametrize("method", ["ngram", "sam_recycling", "jacobi"])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_lossless_methods_keep_the_text_of_the_target_with_pages(kind: str, method: str, temperature: float) -> None:
    network, found = network_of(kind, 128), []
    sampling = SamplingParams(temperature=temperature, seed=2)
    for name in ("autoregressive", method):
        engine = Engine(DecoderRunner(network), build(name, BuildContext(VOCAB, network)), rows=2, chunk=64)
        requests = [Request(TEXT[:n], sampling, 40) for n in (PROMPT, 250)]
        found.append([list(done.tokens) for done in engine.complete(requests)])
    assert found[0] == found[1]


def test_the_output_says_lossy_and_the_cache_is_kept() -> None:
    options = ("--model", tiny_target(), "--dtype", "float32", "--kv-cache-policy", "quest@128")
    result = run_foretell("generate", "hello", *options, "--max-new-tokens", "9")
    assert result.exit_code == 0 and "LOSSY" in result.stderr and "quest@128" in result.stderr
    record = json.loads(run_foretell("generate", "hello", *options, "--max-new-tokens", "9", "--json").stdout)
    assert record["lossless"] is False and record["backend"]["cache_policy"] == "quest@128"
    model = load(str(tiny_target()), "float32", kv_cache_policy="quest@128")
    assert model.config.page_budget == 128 and model.network.backend.lossy


def test_what_does_not_go_with_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens read selected pages"):
        SparseCacheRunner(network_of("torch", 128), Quest(8), 3)
    small = expect_error("generate", "hello", "--model", tiny_target(), "--kv-cache-policy", "quest@64")
    assert "quest reads at least 128 keys" in small
    kivi = ("--kv-cache-policy", "quest@128", "--kv-cache-dtype", "int4-kivi")
    assert "int4-kivi" in expect_error("generate", "hello", "--model", tiny_target(), *kivi)
