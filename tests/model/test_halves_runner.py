"""Drafts with the upper halves of an int8 cache: what they read, what they leave behind, and what is refused."""

from dataclasses import replace

import pytest
import torch

from foretell.catalogue.build_context import BuildContext
from foretell.catalogue.registry import build
from foretell.core.sampling import SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.config.model import CacheDtype
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.kv_cache import NativeKVCache
from foretell.model.kernels.structures import Precision
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, chain_tree, random_tokens

pytestmark = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")
CONFIG = replace(TINY, vocab=VOCAB, heads=4, kv_heads=2, head_dim=32)
HALVES = {"cache_policy": "upper_halves", "num_speculative_tokens": 3, "confidence_threshold": 0.01}


def network(cache: CacheDtype, precision: Precision = "bfloat16") -> NativeDecoder:
    return NativeDecoder(tiny_decoder(replace(CONFIG, cache_dtype=cache), dtype=torch.float32), precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_halves_have_the_bits_of_int8_and_int4_those_of_its_numbers(precision: Precision) -> None:
    tokens = chain_tree(random_tokens(90))
    plain, halves = (DecoderRunner(network(kind, precision)) for kind in ("int8", "int8-halves"))
    assert torch.equal(plain.forward([0], tokens).logits, halves.forward([0], tokens).logits)
    for runner in (plain, halves):
        runner.commit([0][0], [*range(40), 41, 43, 60])
        runner.cache.reserve([1], [64])
    assert isinstance(plain.cache, NativeKVCache) and isinstance(halves.cache, NativeKVCache)
    which = torch.tensor([0])
    for layer in range(CONFIG.layers):
        for a, b in zip(plain.cache.read(layer, which, 43), halves.cache.read(layer, which, 43), strict=True):
            assert torch.equal(a, b), "moved slots, too"
    assert halves.cache.nbytes == plain.cache.nbytes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_text_and_most_are_accepted(temperature: float) -> None:
    requests = [
        Request(random_tokens(n, seed=n), SamplingParams(temperature=temperature, seed=n), max_new_tokens=24)
        for n in (5, 33, 64)
    ]
    target = network("int8-halves")
    found, passes = [], []
    for method, options in (("autoregressive", None), ("sparse_kv_draft", HALVES)):
        done = Engine(DecoderRunner(target), build(method, BuildContext(VOCAB, target), options), rows=2).complete(
            requests
        )
        found.append([answer.tokens for answer in done])
        passes.append(sum(answer.statistics.target_passes for answer in done))
    assert found[0] == found[1]
    assert passes[1] < 0.6 * passes[0]


def test_the_upper_halves_are_near_the_whole_numbers_and_a_draft_leaves_nothing() -> None:
    target = network("int8-halves")
    runner, fresh = DecoderRunner(target), DecoderRunner(target)
    prompt, more = random_tokens(50), chain_tree(random_tokens(4, seed=9))
    for each in (runner, fresh):
        each.forward([0], chain_tree(prompt))
        each.commit(0, range(50))
    assert isinstance(runner.cache, NativeKVCache)
    whole, runner.cache = runner.cache, runner.cache.upper_halves
    coarse = runner.forward([0], more).logits
    runner.cache = whole
    after, expected = runner.forward([0], more).logits, fresh.forward([0], more).logits
    assert torch.equal(after, expected), "the pass writes over what the draft has written"
    assert 0 < (coarse - expected).norm() < 0.3 * expected.norm()


def test_other_caches_are_refused_with_a_sentence() -> None:
    for kind in ("auto", "int8", "int4"):
        with pytest.raises(ValueError, match=f"upper halves of an int8 cache .* cache is {kind}; use --kv-cache-dtype"):
            build("sparse_kv_draft", BuildContext(VOCAB, network(kind)), HALVES)
    with pytest.raises(ValueError, match="halves"):
        build("sparse_kv_draft", BuildContext(VOCAB, tiny_decoder(CONFIG)), HALVES)
