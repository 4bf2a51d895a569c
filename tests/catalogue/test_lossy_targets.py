"""Every target that is lossy: where its setting leaves nothing out, its answers are those of the whole model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from foretell.catalogue import BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model import kernels
from foretell.model.block.decoder import Decoder
from foretell.model.block.modules import to_weights
from foretell.model.block.sparsity import (
    FirstNeurons,
    GateThreshold,
    InputThresholds,
    NeuronRule,
    PredictedNeurons,
    Predictor,
    sparse_decoder,
)
from foretell.model.cache.packed_groups import KIVI_BITS, RESIDUAL
from foretell.model.cache.policy import CachePolicy, target_policies
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.evicting_runner import EvictingRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, interrupted, naive, pause, random_tokens

CONFIG = replace(TINY, hidden=64, vocab=VOCAB, heads=4, kv_heads=2, head_dim=32, ffn=192, context=256)
WHOLE = 256
"""A budget of keys for every text of these tests."""
PROMPTS = [random_tokens(n, seed=n) for n in (40, 3, 17, 60)]
NEW = 16


@cache
def decoder() -> Decoder:
    return tiny_decoder(CONFIG, 0, torch.float32)


def with_config(on_kernels: bool, **values: object) -> Network:
    network = decoder()
    changed = network._sharing(replace(CONFIG, **values), network._block_list(), network.skip)  # type: ignore[arg-type]
    return NativeDecoder(changed, "float32") if on_kernels else changed


def evicting(policy: type[CachePolicy], on_kernels: bool) -> Runner:
    if policy.selects:
        return DecoderRunner(with_config(on_kernels, page_budget=WHOLE))
    return EvictingRunner(with_config(on_kernels), policy(WHOLE))


def packed_in_groups(numbers: str, on_kernels: bool) -> Runner:
    return DecoderRunner(with_config(on_kernels, cache_dtype=numbers))


def sparse(rule: NeuronRule, on_kernels: bool) -> Runner:
    rules = [rule] * CONFIG.layers
    if not on_kernels:
        return DecoderRunner(sparse_decoder(decoder(), rules))
    packed = with_config(True)
    assert isinstance(packed, NativeDecoder)
    return DecoderRunner(packed.with_rules(rules, lambda i: to_weights(decoder().block(i))))


def predicted(units: int) -> Predictor:
    generator = torch.Generator().manual_seed(units)
    inputs, outputs, bias = (torch.randn(*s, generator=generator) for s in ((24, CONFIG.hidden), (units, 24), (units,)))
    return Predictor(inputs, outputs, -1e9, bias)


RUNS_AND_HEADS = PredictedNeurons(**vars(predicted(CONFIG.ffn // 32)), unit=32, heads=predicted(CONFIG.heads))
NEUTRAL: Mapping[str, Callable[[bool], Runner]] = {
    **{policy.name: partial(evicting, policy) for policy in target_policies()},
    **{numbers: partial(packed_in_groups, numbers) for numbers in KIVI_BITS},
    "thresholds of gates": partial(sparse, GateThreshold(-1.0)),
    "thresholds of inputs": partial(sparse, InputThresholds(0, 0, 0, 0)),
    "predicted neurons": partial(sparse, PredictedNeurons(**vars(predicted(CONFIG.ffn)))),
    "predicted runs and heads": partial(sparse, RUNS_AND_HEADS),
    "first neurons": partial(sparse, FirstNeurons(CONFIG.ffn)),
}
"""Targets with a budget for all keys, with all numbers of a short text unpacked, with all neurons or heads chosen."""


def requests_of(temperature: float) -> list[Request]:
    return [Request(p, SamplingParams(temperature, seed=i), max_new_tokens=NEW) for i, p in enumerate(PROMPTS)]


@cache
def whole_model(temperature: float) -> list[list[int]]:
    return [naive(decoder(), r) for r in requests_of(temperature)]


def at_once(engine: Engine, requests: list[Request]) -> list[tuple[int, ...]]:
    return [c.tokens for c in engine.complete(requests)]


WAYS: Mapping[str, Callable[[Runner, str], Engine]] = {
    "alone": lambda runner, method: engine_of(runner, method, 1),
    "in a batch and in chunks": lambda runner, method: engine_of(runner, method, 3, chunk=7),
    "under a budget": lambda runner, method: engine_of(runner, method, 3, budget=Budget()),
    "paused": lambda runner, method: engine_of(runner, method, 3),
}


def engine_of(runner: Runner, method: str, rows: int, chunk: int = 512, budget: Budget | None = None) -> Engine:
    return Engine(runner, build(method, BuildContext(VOCAB, decoder())), rows, chunk, budget=budget)


@pytest.mark.covering(2)
@pytest.mark.parametrize("on_kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("method", ["autoregressive", "recycling"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", NEUTRAL)
def test_a_setting_that_leaves_nothing_out_changes_no_token(kind: str, way: str, method: str, on_kernels: bool) -> None:
    if on_kernels and not kernels.available():
        pytest.skip("the CPU kernels are not available")
    assert max(map(len, PROMPTS)) + NEW < min(RESIDUAL, WHOLE)
    for temperature in (0.0, 1.0):
        engine, requests = WAYS[way](NEUTRAL[kind](on_kernels), method), requests_of(temperature)
        texts = interrupted(engine, requests, pause) if way == "paused" else at_once(engine, requests)
        assert [list(text) for text in texts] == whole_model(temperature)
