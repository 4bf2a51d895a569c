"""APAR with a tiny model whose tokenizer has the control tokens; a bias makes it fork."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import save_tiny_model, tiny_target
from foretell.api import Model
from foretell.core.sampling import SamplingParams
from foretell.engine.request import Update
from foretell.engine.statistics import RequestStatistics
from foretell.load import load
from foretell.plan import AparPlan, PlanFieldError, PlanRun
from foretell.plan.control_tokens import CHILD, FORK, ControlTokens, ForkRules, ForkState

FORK_ID, CHILD_ID = 257, 258


def save_forking_model(path: Path) -> Path:
    """A tiny model that has the control tokens."""
    save_tiny_model(path, vocab=259)
    tokenizer = (path / "tokenizer.json").read_text("utf-8")
    state = json.loads(tokenizer.replace("<filler 257>", FORK).replace("<filler 258>", CHILD))
    like = state["added_tokens"][0]
    state["added_tokens"] += [like | {"id": FORK_ID, "content": FORK}, like | {"id": CHILD_ID, "content": CHILD}]
    (path / "tokenizer.json").write_text(json.dumps(state))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(str(save_forking_model(tmp_path_factory.mktemp("model"))), dtype="float32")


def run_of(model: Model, **options: Any) -> PlanRun:
    return model.plan_run("hello", options.pop("plan", AparPlan()), **options)


def update(*tokens: int, reason: str | None = None) -> Update:
    statistics = None if reason is None else RequestStatistics(new_tokens=len(tokens))
    return Update(0, tokens, "", 0, finish_reason=reason, statistics=statistics)


def test_a_detail_comes_before_what_follows_the_fork(model: Model) -> None:
    a, b, c, d, e = model.codec.encode("abcde")
    run = run_of(model, max_new_tokens=20)
    step = run.start()
    assert step.make_requests is not None
    (root,) = step.make_requests()
    step = run.observe([(0, update(a, FORK_ID, b))])
    assert step.update is not None and step.update.text == "a" and step.make_requests is not None
    (detail,) = step.make_requests()
    assert list(detail.prompt) == [*root.prompt, a, FORK_ID, CHILD_ID] and detail.max_new_tokens == 17
    step = run.observe([(0, update(FORK_ID, e, reason="length")), (1, update(c))])
    assert step.update is not None and step.update.text == "c" and step.make_requests is not None
    (second,) = step.make_requests()
    assert list(second.prompt) == [*root.prompt, a, FORK_ID, b, FORK_ID, CHILD_ID]
    step = run.observe([(2, update(d, 256, reason="stop"))])
    assert step.update is None
    last = run.observe([(1, update(256, reason="stop"))]).update
    assert last is not None and last.text == "bde" and last.finish_reason == "length"


@pytest.mark.parametrize(
    ("method", "temperature"),
    [("autoregressive", 0.0), pytest.param("suffix", 0.0, marks=pytest.mark.exhaustive), ("suffix", 1.0)],
)
def test_every_stream_is_plain_decoding_of_its_own_context(model: Model, method: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5, logit_bias={FORK_ID: 6.0, 256: -100.0})
    runs = [run_of(model, sampling=sampling, max_new_tokens=14, plan=AparPlan(max_forks=3)) for _ in range(2)]
    engine = model.plan_engine(method, rows=6)
    answers = engine.complete(runs)
    (plain,) = model.plan_engine(rows=2).complete(
        [run_of(model, sampling=sampling, max_new_tokens=14, plan=AparPlan(max_forks=3))]
    )
    assert answers[0].text == answers[1].text == plain.text and answers[0].tokens == answers[1].tokens == plain.tokens
    assert runs[0].report.parts > 3
    depths = {len([t for t in r.request.prompt if t == CHILD_ID]) for r in runs[0].requests}
    assert depths == {0, 1, 2}
    for request in runs[0].requests:
        (alone,) = model.engine().complete([request.request])
        tokens = list(alone.tokens)
        assert CHILD_ID not in tokens and tokens.count(FORK_ID) <= 3
        assert alone.statistics.new_tokens == request.tokens
        prompt = list(request.request.prompt)
        assert tokens[0] != FORK_ID or prompt[-1] != CHILD_ID
        assert all(pair != (FORK_ID, FORK_ID) for pair in pairwise(tokens))
    assert FORK not in answers[0].text and CHILD not in answers[0].text


def test_passes_are_those_of_the_longest_path(model: Model) -> None:
    sampling = SamplingParams(logit_bias={FORK_ID: 4.0, 256: -100.0})
    run = run_of(model, sampling=sampling, max_new_tokens=14, plan=AparPlan(max_forks=4))
    (answer,) = model.plan_engine(rows=64).complete([run])
    assert run.report.passes == 14 < answer.statistics.new_tokens == len(answer.tokens)


def test_a_model_without_control_tokens_is_refused() -> None:
    with pytest.raises(PlanFieldError, match="foretell train apar"):
        run_of(load(str(tiny_target()), dtype="float32"))


def test_rules() -> None:
    rules = ForkRules(ControlTokens(5, 6), 9, 2, after_child=True)
    allowed = np.unpackbits(rules.mask(rules.start()), count=9, bitorder="little")
    assert allowed.tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 1]
    state: ForkState | None = rules.start()
    for token in (1, 5, 2, 5, 2):
        assert state is not None
        state = rules.advance(state, token)
    assert state == ForkState(False, 2) and rules.advance(ForkState(False, 2), 5) is None
    assert rules.advance(ForkState(False), 6) is None and rules.advance(ForkState(True), 5) is None
    assert replace(ForkState(False), forks=2) == state
