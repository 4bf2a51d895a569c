"""Every lossy method of the catalogue: its neutral setting is plain decoding, and its meaning depends on no clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from foretell.accept import LenientRejection, TopKAcceptor
from foretell.catalogue import BUILT_IN, BuildContext, Entry
from foretell.catalogue.speculators import read_speculator
from foretell.core.sampling import SamplingParams
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Completion, Request
from foretell.model import kernels
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from helpers import (
    VARIANTS,
    VOCAB,
    Interrupted,
    Variant,
    interrupted,
    methods_by_kind,
    naive,
    pause,
    preempt,
    random_tokens,
    speculator,
    target,
    wide_target,
)

LOSSY = [entry for entry in BUILT_IN if not entry.lossless]
ALL_LAYERS = {"min_layers": 2, "max_layers": 2, "warmup_layers": 1}
NEVER = {"posterior_threshold": 1.0, "posterior_alpha": 1e9}
NEUTRAL: Mapping[str, Sequence[Mapping[str, object]]] = {
    "lenience_lossy": [{"lenience": 1.0}],
    "blockwise_lossy": [{"accept_top_k": 1}, {"accept_distance": 0}],
    "bild_lossy": [{"rollback_threshold": 0.0}],
    "early_exit_lossy": [
        {"exit_threshold": 1.0, "exit_confidence": "softmax", "missing_keys": "recompute"},
        {"exit_threshold": 1.0, "exit_confidence": "probability", "missing_keys": "copy"},
        {"exit_threshold": 1.0, "exit_confidence": "state", "missing_keys": "recompute"},
        {"exit_threshold": 1.0, "exit_confidence": "classifier", "missing_keys": "copy"},
        {"exit_threshold": 0.0, "rollback_threshold": 0.0},
    ],
    "skip_decode_lossy": [ALL_LAYERS],
    "synthetic_lossy": [{"synthetic_acceptance_rates": [0.0, 0.0]}, {"synthetic_acceptance_length": 1.0}],
    "medusa_lossy": [NEVER],
    "typical_lossy": [NEVER],
}
"""Settings in which each method changes no token."""
SAMPLES = ("early_exit_lossy", "skip_decode_lossy", "synthetic_lossy", "medusa_lossy", "typical_lossy")
"""Methods whose neutral setting gives the text of a seed, too; the others are neutral at temperature 0."""
CASES = [(entry, options) for entry in LOSSY for options in NEUTRAL[entry.name]]
ONE_EACH = [
    pytest.param(entry, options, marks=() if options is NEUTRAL[entry.name][0] else pytest.mark.exhaustive)
    for entry, options in CASES
]
PROMPTS = [random_tokens(n, seed=n) for n in (3, 17, 40, 9)]


def test_every_lossy_method_has_a_neutral_setting() -> None:
    assert {entry.name for entry in LOSSY} == set(NEUTRAL)


def requests_of(temperature: float, length: int = 9) -> list[Request]:
    return [Request(p, SamplingParams(temperature, seed=i), max_new_tokens=length + i) for i, p in enumerate(PROMPTS)]


def built(entry: Entry, network: Network, options: Mapping[str, object]) -> AnyMethod:
    wide = network is not target()
    drafter = wide_target(seed=5) if wide else target().first_layers(1)
    context = BuildContext(VOCAB, wide_target() if wide else target(), (DecoderRunner(drafter),))
    if entry.speculator:
        # Read with the embedding and head of the decoder in torch, which the kernels have packed.
        folder = speculator(entry.speculator, wide=wide)
        read_speculator(context, folder)
        context = replace(context, speculators=(folder,))
    return entry.build(replace(context, network=network), dict(options))


@cache
def native() -> NativeDecoder:
    return NativeDecoder(wide_target(), "float32")


@cache
def plain(temperature: float, on_kernels: bool, *new: int) -> list[list[int]]:
    return [naive(wide_target() if on_kernels else target(), r) for r in requests_of(temperature, *new)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("on_kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("entry", "options"), CASES, ids=lambda case: getattr(case, "name", str(case)))
def test_a_neutral_setting_changes_no_token_alone_or_in_a_batch(
    entry: Entry, options: Mapping[str, object], rows: int, on_kernels: bool
) -> None:
    if on_kernels and not kernels.available():
        pytest.skip("the CPU kernels are not available")
    network: Network = native() if on_kernels else target()
    sampled = entry.name in SAMPLES and "rollback_threshold" not in options
    for temperature in (0.0, 1.0) if sampled else (0.0,):
        requests = requests_of(temperature)
        completed = Engine(DecoderRunner(network), built(entry, network, options), rows).complete(requests)
        assert [list(c.tokens) for c in completed] == plain(temperature, on_kernels)
        for request, c in zip(requests, completed, strict=True):
            fidelity = c.statistics.fidelity
            # What copied keys change is not known.
            known = options.get("missing_keys") != "copy"
            assert fidelity.tokens == known * request.max_new_tokens
            assert (fidelity.changed, fidelity.changed_share) == (0, 0)
            assert fidelity.mean_variation == pytest.approx(0, abs=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("interrupt", [pause, preempt])
@pytest.mark.parametrize(("entry", "options"), ONE_EACH, ids=lambda case: getattr(case, "name", str(case)))
def test_a_neutral_setting_changes_no_token_after_an_interruption(
    entry: Entry, options: Mapping[str, object], interrupt: Callable[[Engine, int], None]
) -> None:
    """A request that waits loses its row, and all its tokens are read again."""
    length = 40 if entry.name == "bild_lossy" else 20  # whose drafts are long: an answer must last several steps
    sampled = entry.name in SAMPLES and "rollback_threshold" not in options
    for temperature in (0.0, 1.0) if sampled else (0.0,):
        engine = Engine(Interrupted(target()), built(entry, target(), options), 3)
        requests = requests_of(temperature, length)
        texts = interrupted(engine, requests, interrupt)
        assert [list(text) for text in texts] == plain(temperature, False, length)
        assert (engine.preemptions > 0) is (interrupt is preempt)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_lenience_of_one_deviates_from_no_distribution(rows: int) -> None:
    entry = next(entry for entry in LOSSY if entry.name == "lenience_lossy")
    method = built(entry, target(), {"lenience": 1.0})
    for c in Engine(DecoderRunner(target()), method, rows).complete(requests_of(1.0)):
        assert c.statistics.fidelity.tokens and c.statistics.fidelity.mean_variation == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("rule", [LenientRejection(1.0), TopKAcceptor(1)], ids=str)
def test_of_equal_tokens_a_neutral_rule_accepts_the_one_that_greedy_decoding_gives(rule: Any) -> None:
    for size in (4, 1000):
        p = torch.full((size,), 1 / size, dtype=torch.float64)
        assert rule.acceptable(p).nonzero().flatten().tolist() == [0]
    best_three = TopKAcceptor(3).acceptable(torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]))
    assert best_three.nonzero().flatten().tolist() == [1, 2, 3]


class Clock:
    """A clock that advances by ever other times."""

    def __init__(self, tick: float) -> None:
        self.now, self._tick, self._calls = 0.0, tick, 0

    def __call__(self) -> float:
        self._calls += 1
        self.now += self._tick * (1 + self._calls * 7 % 11)
        return self.now


def decoded(
    variant: Variant, budget: Budget | None, tick: float, company: bool
) -> tuple[list[list[int]], list[tuple[int, int]], list[float]]:
    """Texts and what changed in them; `company`: plain requests decode in the same passes."""
    method = variant.make(VOCAB)
    requests = [replace(r, max_new_tokens=24) for r in (*requests_of(0.0), *requests_of(1.0))]
    others = [replace(r, max_new_tokens=10, max_drafts=0) for r in requests_of(0.0)] if company else []
    engine = Engine(DecoderRunner(target()), method, 12, clock=Clock(tick), budget=budget)
    completed: list[Completion] = engine.complete([*requests, *others])[: len(requests)]
    losses = [c.statistics.fidelity for c in completed]
    counts = [(loss.tokens, loss.changed) for loss in losses]
    return [list(c.tokens) for c in completed], counts, [loss.mean_divergence for loss in losses]


MACHINES: Mapping[str, tuple[Callable[[], Budget], float, bool]] = {
    "even": (Budget, 1e-3, False),
    "fast, in company": (Budget, 1e-6, True),
    "known": (lambda: Budget(PassTimes({1: 1.0, 2: 2.0, 128: 128.0})), 1e-3, False),
    "slow": (Budget, 1.0, False),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "variant",
    methods_by_kind([v for v in VARIANTS if not v.lossless], of=("bild_lossy", "lenience_lossy", "early_exit_lossy")),
)
def test_no_measured_time_changes_what_a_lossy_method_means(variant: Variant, machine: str) -> None:
    texts, counts, divergence = decoded(variant, None, 1e-3, False)
    assert sum(changed for _, changed in counts)
    budget, tick, company = MACHINES[machine]
    found = decoded(variant, budget(), tick, company)
    assert found[:2] == (texts, counts) and found[2] == pytest.approx(divergence, rel=1e-6, abs=1e-9)


@pytest.mark.covering(1)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("entry", "options"), ONE_EACH, ids=lambda case: getattr(case, "name", str(case)))
def test_a_neutral_setting_changes_no_token_under_a_budget(
    entry: Entry, options: Mapping[str, object], machine: str
) -> None:
    sampled = entry.name in SAMPLES and "rollback_threshold" not in options
    budget, tick, _ = MACHINES[machine]
    for temperature in (0.0, 1.0) if sampled else (0.0,):
        method = built(entry, target(), options)
        engine = Engine(DecoderRunner(target()), method, 3, clock=Clock(tick), budget=budget())
        assert [list(c.tokens) for c in engine.complete(requests_of(temperature))] == plain(temperature, False)
