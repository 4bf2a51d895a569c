"""Selections of cached keys: each rule against a plain reading of its paper, and the caches that hold a selection."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.bench.replay import ReplayRunner
from foretell.catalogue import BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.core.tree import root_tree
from foretell.draft import SparseCacheDrafter
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model import kernels
from foretell.model.block.decoder import BlockRange, Decoder
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.cache.policy import POLICIES, SINKS, CachePolicy, Observed, Quest, SnapKV, cache_policy
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.compact_runner import (
    CompactRunner,
    SparseCacheRunner,
    check_compactible,
    observe_queries,
    select_slots,
)
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import ForksRows, RunsLayers, offered
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, chain_tree, context_of, engine_for, random_tokens, target, wide_target

native = pytest.param("native", marks=pytest.mark.skipif(not kernels.available(), reason="no compiler"))
networks = pytest.mark.parametrize("kind", ["torch", native])
every_policy = pytest.mark.parametrize("name", POLICIES)
TEXT = random_tokens(70, seed=4)


def network_of(kind: str, decoder: Decoder | None = None) -> Network:
    decoder = wide_target() if decoder is None else decoder
    return NativeDecoder(decoder, "float32") if kind == "native" else decoder


def read(network: Network, length: int = len(TEXT), row: int = 0) -> DecoderRunner:
    """A runner that has read the text."""
    runner = DecoderRunner(network)
    runner.forward([row], chain_tree(TEXT[:length]))
    runner.commit(row, range(length))
    return runner


def random_inputs(keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of 16 tokens and keys: 3 key-value heads, 2 queries each."""
    generator = torch.Generator().manual_seed(keys)
    return torch.randn(16, 3, 2, 4, generator=generator), torch.randn(3, keys, 4, generator=generator)


@every_policy
@pytest.mark.parametrize("keys", [5, 24, 25, 150])
def test_a_selection_has_the_budget_and_the_first_and_last_keys(name: str, keys: int) -> None:
    queries, found = random_inputs(keys)
    kept = cache_policy(name, 24).select(queries, found)
    assert kept.shape == (3, min(keys, 24)) and (kept.diff() > 0).all() and kept.max() == keys - 1
    for head in kept.tolist():
        assert {*range(min(keys, SINKS)), *range(max(0, keys - 6), keys)} <= set(head)


def best(scores: np.ndarray, budget: int) -> list[int]:
    """The budget's best keys when the first and last ones are taken."""
    scores = scores.copy()
    scores[:SINKS] = scores[-(budget // 4) :] = np.inf
    return sorted(np.argsort(-scores, kind="stable")[:budget].tolist())


def softmax(scores: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights


def bound(query: np.ndarray, page: np.ndarray) -> float:
    """Quest's bound of the scores in a page."""
    return float(np.maximum(query * page.min(0), query * page.max(0)).sum())


def test_rules_select_what_their_papers_say() -> None:
    queries, found = random_inputs(150)
    q, k = queries.double().numpy(), found.double().numpy()
    kept = {
        name: cache_policy(name, 24).select(queries[-max(1, rule.observed) :], found).tolist()
        for name, rule in POLICIES.items()
    }
    assert kept["streaming_llm"] == [[*range(4), *range(130, 150)]] * 3
    last = np.mean([softmax(k[g] @ q[-1, g, i]) for g in range(3) for i in range(2)], 0)
    assert kept["tova"] == [best(last, 24)] * 3
    sums = np.random.default_rng(1).random((3, 150))
    heavy = cache_policy("h2o", 24).select(queries[-1:], found, torch.from_numpy(sums)).tolist()
    for g in range(3):
        assert heavy[g] == sorted({*range(4), *range(138, 150), *(4 + np.argsort(-sums[g, 4:138])[:8]).tolist()})
    for g in range(3):
        votes = np.array([np.mean([softmax(k[g] @ query) for query in token], 0) for token in q[:, g]]).sum(0)
        pooled = [votes[max(0, j - 3) : j + 4].max() for j in range(150)]
        assert kept["snapkv"][g] == best(np.array(pooled), 24)
        pages = [k[g, j : j + 16] for j in range(0, 150, 16)]
        bounds = [max(bound(query, page) for query in q[-1, g]) for page in pages]
        assert all(b >= (p @ q[-1, g].T).max() - 1e-9 for b, p in zip(bounds, pages, strict=True))
        assert kept["quest"][g] == best(np.repeat(bounds, 16)[:150], 24)
        padded = np.concatenate([k[g], k[g, -1:], k[g, -1:]])
        means = [np.mean([x @ padded[j : j + 8].mean(0) for x in q[-1, g]]) for j in range(0, 152, 8)]
        assert kept["retrieval"][g] == best(np.repeat(means, 8)[:150], 24)


def test_unknown_policies_and_small_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown cache policy 'snapvk': did you mean 'snapkv'"):
        cache_policy("snapvk", 64)
    with pytest.raises(ValueError, match="at least 8 keys, found a budget of 7"):
        SnapKV(7)
    with pytest.raises(ValueError, match="after 1 token or more, found 0"):
        SparseCacheRunner(target(), Quest(8), 0)
    with pytest.raises(ValueError, match=r"attend to the whole text, and this model .* has sliding windows"):
        check_compactible(replace(TINY, window=8, window_layers=(1,)))


@networks
@pytest.mark.parametrize("int8", [False, True])
def test_slots_are_copied_head_by_head_from_cache_to_cache(kind: str, int8: bool) -> None:
    decoder = tiny_decoder(replace(wide_target().config, cache_dtype="int8" if int8 else "auto"), dtype=torch.float32)
    source = read(network_of(kind, decoder)).cache
    copied = decoder.new_cache() if kind == "torch" else network_of(kind, decoder).new_cache()
    assert isinstance(source, KVCache) and isinstance(copied, KVCache)
    copied.reserve([2], [60])
    slots = np.array(
        [[np.sort(np.random.default_rng([i, j]).permutation(70)[:40]) for j in range(2)] for i in range(2)]
    )
    copied.copy_slots(source, 0, slots, 2, 17)
    for i in range(2):
        for part, other in zip(
            source.read(i, torch.tensor([0]), 70), copied.read(i, torch.tensor([2]), 57), strict=True
        ):
            assert part.abs().sum() > 0
            for j in range(2):
                assert torch.equal(part[0, j, slots[i, j]], other[0, j, 17:])


@pytest.mark.skipif(not kernels.available(), reason="no compiler")
@pytest.mark.parametrize(("precision", "int8"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_keys_and_values_of_the_kernels_are_those_of_torch(precision: str, int8: bool) -> None:
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    decoder = tiny_decoder(replace(wide_target().config, cache_dtype="int8" if int8 else "auto"), dtype=dtype)
    found, expected = read(NativeDecoder(decoder, precision)).cache, read(decoder).cache  # type: ignore[arg-type]
    assert isinstance(found, KVCache) and isinstance(expected, KVCache)
    for i in range(2):
        for one, other in zip(*(c.read(i, torch.tensor([0]), 70) for c in (found, expected)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0.05)
            assert float((one.float() - other.float()).abs().mean()) < 0.01


@networks
def test_observed_queries_are_those_of_attention_and_leave_the_text_as_it_is(kind: str) -> None:
    runner, which = read(network_of(kind)), torch.tensor([0])
    store = runner.cache
    assert isinstance(store, KVCache)
    before = [store.read(i, which, len(TEXT)) for i in range(2)]
    queries = observe_queries(runner, 0, TEXT[-5:], len(TEXT))
    assert queries.shape == (2, 5, 2, 2, 16)
    for i in range(2):
        torch.testing.assert_close(store.read(i, which, len(TEXT)), before[i], rtol=0, atol=0)
    # The first layer's queries from the weights: a text of one token is at position 0, where nothing is rotated.
    decoder, alone = wide_target(), read(network_of(kind), 1)
    block, c = decoder.block(0), decoder.config
    plain = block.qkv(block.attention_norm(decoder.embed(torch.tensor(TEXT[:1]))))[0, : c.heads * c.head_dim]
    found = observe_queries(alone, 0, TEXT[:1], 1)[0, 0].flatten()
    torch.testing.assert_close(found, plain * c.scale, rtol=1e-5, atol=1e-6)


@networks
@every_policy
def test_a_part_of_the_cache_gives_what_attention_over_these_keys_gives(kind: str, name: str) -> None:
    network = network_of(kind)
    whole, length = read(network), len(TEXT)
    sparse = SparseCacheRunner(network, cache_policy(name, 16), 8)
    sparse.attach(whole)
    sparse.follow(context_of([*TEXT, 5]))
    assert (sparse.length(0), sparse.slots(0), sparse.selections) == (length, 16, 1)
    found = sparse.forward([0], root_tree([5])).logits
    with torch.inference_mode():
        # A cache of the whole text whose keys that were not selected are so negative that nobody attends to them.
        kept = select_slots(whole, 0, sparse.policy, TEXT, length)
        expected = attended(network_of("torch"), kept, 5)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        every = np.broadcast_to(np.arange(length), (2, 2, length))
        assert float((attended(network_of("torch"), every, 5) - expected).abs().max()) > 1e-3


def attended(decoder: Network, kept: np.ndarray, token: int) -> torch.Tensor:
    """Logits of a token after the text, where head `h` of layer `l` sees the slots `kept[l, h]` and the token's own."""
    assert isinstance(decoder, Decoder)
    runner, n = read(decoder), len(TEXT)
    store = runner.cache
    assert isinstance(store, KVCache)
    store.reserve([0], [n + 1])
    x = decoder.embed(torch.tensor([token]))
    for layer in range(2):
        one = torch.tensor([n], dtype=torch.int32)
        layout = Layout(one * 0, one, one, one + 1, torch.zeros(1, 0, dtype=torch.int32))
        queries = torch.zeros(2, 1, 4, 16)
        decoder.run(x, replace(layout, queries=queries), store, BlockRange(layer, layer + 1))
        keys, values = (part[0] for part in store.read(layer, torch.tensor([0]), n + 1))
        heads = []
        for h in range(4):
            seen = [*kept[layer, h // 2].tolist(), n]
            weight = (keys[h // 2, seen] @ queries[layer, 0, h] * decoder.config.scale).softmax(0)
            heads.append(weight @ values[h // 2, seen])
        block = decoder.block(layer)
        x = x + block.output(torch.cat(heads)[None])
        x = block.finish(block.add_mlp(x)[0])
    logits: torch.Tensor = decoder.logits(decoder.final_norm(x))[0]
    return logits


@networks
@every_policy
def test_a_budget_for_the_whole_text_gives_the_numbers_of_the_target(kind: str, name: str) -> None:
    network = network_of(kind)
    whole = read(network)
    sparse = SparseCacheRunner(network, cache_policy(name, 100), 8)
    sparse.attach(whole)
    tree = chain_tree([5, 3, 9])
    for new in ([], [7, 7, 1]):
        if new:
            whole.forward([0], chain_tree(new))
            whole.commit(0, range(3))
        sparse.follow(context_of([*TEXT, *new, 5]))
        assert sparse.slots(0) == sparse.length(0) == whole.length(0)
        found, expected = sparse.forward([0], tree).logits, whole.forward([0], tree).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if kind == "native" else 1e-5)
        sparse.commit(0, range(3))
        assert sparse.length(0) == whole.length(0)


class RandomKeys(CachePolicy):
    """Keys that matter to nobody."""

    name = "random"

    def scores(self, layer: Observed) -> torch.Tensor:
        return torch.rand(layer.sums.shape, generator=torch.Generator().manual_seed(layer.sums.shape[1]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", [RandomKeys(8), *(rule(8) for rule in POLICIES.values())], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_no_selection_of_drafts_changes_the_text(policy: CachePolicy, temperature: float) -> None:
    network, found = wide_target(), []
    for name in ("sparse_kv_draft", "autoregressive"):
        options = {"confidence_threshold": 0, "cache_refresh": 2} if name == "sparse_kv_draft" else None
        method = build(name, BuildContext(VOCAB, network), options)
        if isinstance(method.draft, SparseCacheDrafter):
            assert isinstance(method.draft.runner, SparseCacheRunner)
            method.draft.runner.policy = policy
        engine = Engine(DecoderRunner(network), method, rows=2, chunk=16)
        sampling = SamplingParams(temperature=temperature, seed=1)
        found.append([c.tokens for c in engine.complete([Request(TEXT[:n], sampling, 20) for n in (60, 20, 33)])])
    assert found[0] == found[1]


@every_policy
def test_a_selection_is_the_same_with_any_number_of_threads(name: str) -> None:
    queries, keys = random_inputs(700)
    sums = torch.rand(3, 700, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(cache_policy(name, 96).select(queries, keys, sums))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_the_bound_of_a_page_of_equal_keys_is_their_score() -> None:
    queries, keys = random_inputs(5)
    pages = keys.repeat_interleave(16, 1)  # every page holds one key 16 times
    bounds = Quest(8).scores(Observed(queries, pages, torch.zeros(3, 80)))
    expected = (queries[-1] @ keys.transpose(1, 2)).amax(1).repeat_interleave(16, 1)
    torch.testing.assert_close(bounds, expected)


def test_new_tokens_are_added_until_the_selection_is_made_anew() -> None:
    whole = read(target(), 20)
    sparse = SparseCacheRunner(target(), SnapKV(8), 4)
    sparse.attach(whole)
    states = []
    for token in (1, 2, 3):
        sparse.follow(context_of([*TEXT[:20], 0, 0, 0, 0, 0, 0][: whole.length(0) + 1]))
        states.append((sparse.length(0), sparse.slots(0), sparse.selections))
        whole.forward([0], chain_tree([token, token]))
        whole.commit(0, range(2))
    sparse.follow(context_of([*TEXT[:20], *[0] * 7]))
    assert [*states, (sparse.length(0), sparse.slots(0), sparse.selections)] == [
        (20, 8, 1), (22, 10, 1), (24, 12, 1), (26, 8, 2),
    ]  # fmt: skip
    sparse.truncate(0, 26)
    assert sparse.length(0) == 26 == sparse.restorable(0, 26)
    sparse.truncate(0, 25)
    assert sparse.length(0) == 0 == sparse.restorable(0, 25)


def test_the_target_over_all_of_a_short_text_is_never_wrong() -> None:
    method = build("sparse_kv_draft", BuildContext(VOCAB, target()), {"confidence_threshold": 0})
    (done,) = engine_for(method).complete([Request(TEXT, max_new_tokens=21)])
    s = done.statistics
    # The prompt's pass gives the first token, then every pass five.
    assert (s.new_tokens, s.target_passes, list(s.accepted_per_position)) == (21, 5, [4, 4, 4, 4])


@pytest.mark.covering(1)
@networks
@pytest.mark.parametrize(
    ("name", "policy"),
    [("sparse_kv_draft", {}), ("sparse_kv_draft", {"cache_policy": "h2o"}), ("triforce", {})],
)
def test_selected_drafts_are_lossless_behind_shared_prefixes(kind: str, name: str, policy: dict[str, str]) -> None:
    network = network_of(kind)
    drafts = (DecoderRunner(wide_target(3, 1)),)
    options = {"cache_budget": 8, "cache_refresh": 3} | policy
    method = build(name, BuildContext(VOCAB, network, drafts), options)
    engine = Engine(DecoderRunner(network), method, rows=2, chunk=16, prefix_caching=True)
    plain = Engine(DecoderRunner(network), build("autoregressive", BuildContext(VOCAB, network)), rows=1)
    for prompt in (TEXT, [*TEXT[:50], 3, 4], [*TEXT[:64], 9], TEXT[:20]):
        (found,), (expected,) = (e.complete([Request(prompt, max_new_tokens=25)]) for e in (engine, plain))
        assert found.tokens == expected.tokens
    assert isinstance(method.draft, SparseCacheDrafter)
    assert isinstance(method.draft.runner, SparseCacheRunner) and method.draft.runner.selections > 8


def test_methods_that_need_the_whole_cache_say_so() -> None:
    runner = CompactRunner(target())
    with pytest.raises(ValueError, match="with a KV cache policy the target keeps a part of it only"):
        SparseCacheRunner(target(), Quest(8), 3).attach(runner)
    with pytest.raises(ValueError, match="ReplayRunner is not of the own decoder; use another method"):
        SparseCacheRunner(target(), Quest(8), 3).attach(ReplayRunner(VOCAB, 256))
    with pytest.raises(ValueError, match="works in an engine only"):
        SparseCacheRunner(target(), Quest(8), 3).follow(context_of(TEXT))
    assert offered(runner, RunsLayers) is None and offered(runner, ForksRows) is None
    with pytest.raises(ValueError, match="this method needs a draft model"):
        build("triforce", BuildContext(VOCAB, target()))
    with pytest.raises(ValueError, match=r"cache_budget.*8"):
        build("sparse_kv_draft", BuildContext(VOCAB, target()), {"cache_budget": 7})
