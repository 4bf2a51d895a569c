"""Drafting is switched by measured speed, and the text stays what it is."""

from functools import cache

import numpy as np
import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.draft import EagleDrafter
from foretell.draft.cached_states import _HELD_STEPS
from foretell.engine.draft_switch import DraftSwitch
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.eagle import Eagle3, EagleConfig, EagleNetwork
from foretell.testing import TINY
from helpers import VOCAB, random_tokens, target


def simulate(
    switch: DraftSwitch, requests: int, steps: int, tokens: float, ratio: float, speed: float = 1.0, seed: int = 0
) -> tuple[float, float]:
    """Run steps that take `ratio` times as long with drafts and then give `tokens` per request; the share of steps with
    drafts, and the time that plain decoding takes for the tokens over the time taken.
    """
    random, drafted, got, spent = np.random.default_rng(seed), 0, 0, 0.0
    for _ in range(steps):
        drafts = switch.begin(requests)
        mean = tokens - 1 if drafts else 0.0
        new = requests + int(random.poisson(mean * requests))
        seconds = speed * (ratio if drafts else 1.0) * float(random.lognormal(0, 0.1))
        switch.observe(requests, new, seconds)
        drafted, got, spent = drafted + drafts, got + new, spent + seconds
    return drafted / steps, got / requests * speed / spent


def test_drafts_that_pay_stay_on_and_others_are_switched_off_at_a_small_loss() -> None:
    paying, losing = DraftSwitch(), DraftSwitch()
    share, gain = simulate(paying, 1, 2000, 2.4, 1.6)
    assert share > 0.97
    assert gain > 1.42
    simulate(losing, 16, 200, 1.3, 1.5)
    share, gain = simulate(losing, 16, 2000, 1.3, 1.5)
    assert share < 0.05
    assert gain > 0.98
    assert (losing.switched_off, losing.switched_on) == (1, 0)


def test_each_load_has_a_decision_of_its_own_that_follows_the_machine() -> None:
    switch = DraftSwitch()
    simulate(switch, 1, 600, 2.4, 1.5)
    simulate(switch, 32, 600, 1.2, 1.6)
    assert simulate(switch, 1, 100, 2.4, 1.5)[0] > 0.9
    assert simulate(switch, 32, 100, 1.2, 1.6)[0] < 0.1
    # Now drafts pay there too: a trial finds out.
    simulate(switch, 32, 3000, 2.4, 1.5)
    assert simulate(switch, 32, 200, 2.4, 1.5)[0] > 0.9
    assert switch.switched_on == 1


def test_a_slower_machine_is_no_reason_to_switch() -> None:
    switch = DraftSwitch()
    simulate(switch, 4, 500, 2.0, 1.5)
    assert simulate(switch, 4, 500, 2.0, 1.5, speed=3.0)[0] > 0.95


def test_a_larger_load_is_expected_to_gain_less() -> None:
    switch = DraftSwitch()
    simulate(switch, 4, 500, 1.6, 1.5)
    assert switch.begin(4)
    assert not switch.begin(16)


def test_steps_that_read_prompts_are_not_measured() -> None:
    switch = DraftSwitch()
    for _ in range(100):
        assert switch.begin(4, is_measured=False)
        switch.observe(4, 4, 1.0)
    assert not any(load.steps for load in switch._loads.values())


@pytest.mark.parametrize("others", range(40, 70))
def test_a_trial_that_other_loads_interrupt_is_given_up_once_nothing_is_left_to_compare(others: int) -> None:
    switch = DraftSwitch()
    drafts = True
    while drafts:
        drafts = switch.begin(4)
        switch.observe(4, 8, 1.0)
    for requests in [1] * others + [4] * 10:
        switch.begin(requests)
        switch.observe(requests, 2 * requests, 1.0)
    assert switch.begin(4)


class Scripted(DraftSwitch):
    """Drafts in the steps whose bits are set."""

    def __init__(self, bits: str) -> None:
        super().__init__()
        self._bits, self.seen = bits, list[bool]()

    def begin(self, requests: int, is_measured: bool = True) -> bool:
        self.seen.append(self._bits[len(self.seen) % len(self._bits)] == "1")
        return self.seen[-1]


def texts(method: AnyMethod, switch: DraftSwitch | None, temperature: float, new: int = 60) -> list[list[int]]:
    engine = Engine(DecoderRunner(target()), method, rows=3, chunk=8, prefix_caching=True, switch=switch)
    shared = random_tokens(20, seed=1)
    prompts = [shared, random_tokens(9, seed=2), [*shared, 3], random_tokens(30, seed=3), [*shared, 4]]
    requests = [Request(p, SamplingParams(temperature, seed=i), max_new_tokens=new) for i, p in enumerate(prompts)]
    return [list(completion.tokens) for completion in engine.complete(requests)]


@cache
def network() -> EagleNetwork:
    """EAGLE-3 with random weights."""
    config = EagleConfig.model_validate(
        {"kind": "eagle3", "target": TargetInfo(name="tiny", hidden=TINY.hidden, vocab=VOCAB, layers=2), "heads": 4}
        | {"kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256, "fc_norm": True, "hidden_layers": (0, 1, 3)}
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = Eagle3(config, EmbeddingAndHead(target().embedding.detach(), target().head.weight.detach()))
        for parameter in found.parameters():
            parameter.data = parameter.data.double() + 0.3 * torch.randn_like(parameter.data.double())
    return found.double()


def eagle() -> AnyMethod:
    return Method(EagleDrafter(network(), 5), DynamicTree(3, 3, 6), Match())


@cache
def always_drafted(temperature: float) -> list[list[int]]:
    return texts(eagle(), None, temperature)


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bits", ["0", pytest.param("01", marks=pytest.mark.exhaustive), "1110000", "1" * 9 + "0" * (_HELD_STEPS + 8)]
)
def test_the_text_is_the_same_however_drafting_is_switched(bits: str, temperature: float) -> None:
    switch = Scripted(bits)
    assert texts(eagle(), switch, temperature) == always_drafted(temperature)
    assert set(switch.seen) == {bit == "1" for bit in bits}


def test_no_drafts_are_verified_in_a_step_without_drafting() -> None:
    switch = Scripted("0" * 20 + "1" * 20)
    engine = Engine(DecoderRunner(target()), eagle(), rows=1, switch=switch)
    engine.submit(Request(random_tokens(5, seed=1), SamplingParams(0), max_new_tokens=200))
    drafted = list[bool]()
    for _ in range(40):
        engine.step()
        drafted.append(engine.last_step.counts.drafted > 0)
    assert not any(drafted[:20])
    assert sum(drafted[20:]) > 15


def test_a_method_whose_text_depends_on_its_drafts_is_not_switched() -> None:
    method = Method(EagleDrafter(network()), Chain(2, draw=True), Rejection())
    assert Engine(DecoderRunner(target()), method, switch=DraftSwitch()).switch is None


@pytest.mark.parametrize("drafts", [True, False])
def test_a_prefix_that_others_have_read_is_not_read_again(drafts: bool) -> None:
    switch = None if drafts else Scripted("0")
    engine = Engine(DecoderRunner(target()), eagle(), rows=2, prefix_caching=True, switch=switch)
    prompt = random_tokens(50, seed=5)
    [first] = engine.complete([Request(prompt, SamplingParams(0), max_new_tokens=8, max_drafts=0)])
    [second] = engine.complete([Request([*prompt, 1], SamplingParams(0), max_new_tokens=8)])
    assert first.statistics.cached_tokens == 0
    assert second.statistics.cached_tokens == 49
    [alone] = Engine(DecoderRunner(target()), eagle(), rows=2).complete(
        [Request([*prompt, 1], SamplingParams(0), max_new_tokens=8)]
    )
    assert second.tokens == alone.tokens


class Failing(DraftSwitch):
    """Fails once, after the tokens of a step are in the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        self.calls += 1
        if self.calls == 12:
            raise ZeroDivisionError("the fifth wheel")


def test_an_error_after_the_commit_ends_the_requests_and_leaves_no_token_out() -> None:
    requests = [Request(random_tokens(9, seed=i), SamplingParams(0), max_new_tokens=60) for i in range(3)]
    expected = Engine(DecoderRunner(target()), eagle(), rows=2).complete(requests)
    engine = Engine(DecoderRunner(target()), eagle(), rows=2, switch=Failing())
    found = engine.complete(requests, raise_errors=False)
    assert [c.finish_reason for c in found] == ["error", "error", "length"]
    for completion, whole in zip(found, expected, strict=True):
        assert completion.tokens == whole.tokens[: len(completion.tokens)]
    assert found[2].tokens == expected[2].tokens
    assert engine.unowned_rows == 0
