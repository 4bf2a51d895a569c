"""Plans without a trained model: a run is driven by hand, or by the engine with a tiny model."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import save_tiny_model
from foretell.api import Model
from foretell.core.sampling import SamplingParams
from foretell.engine.request import Request, Update
from foretell.engine.statistics import RequestStatistics
from foretell.load import load
from foretell.plan import PlanFieldError, PlanRun, SkeletonPlan, parse_plan
from foretell.plan.base import PlanStep
from foretell.plan.ordered_text import OrderedText
from foretell.plan.router import TrainedRouter

TOOLS = Path(__file__).parents[2] / "tools"
QUESTIONS = TOOLS / "plan_questions.jsonl"
QUESTION = "What helps?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(str(save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)), dtype="float32")


def update(text: str = "", reason: str | None = None, **fields: Any) -> Update:
    """An update with a token per character."""
    statistics = None if reason is None else RequestStatistics(prompt_tokens=2, new_tokens=3, target_passes=3)
    tokens = tuple(map(ord, text))
    return replace(Update(0, tokens, text, 0, finish_reason=reason, statistics=statistics), **fields)


def make(step: PlanStep) -> list[Request]:
    assert step.make_requests is not None
    return step.make_requests()


def shown(step: PlanStep) -> str:
    return "" if step.update is None else step.update.text


def run_with_points(model: Model, skeleton: str = " Sleep\n2. Walk", **options: Any) -> tuple[PlanRun, list[Request]]:
    """A run whose skeleton was written, and the requests that follow."""
    run = model.plan_run(QUESTION, {"type": "skeleton", "router": "off"}, **options)
    (request,) = make(run.start())
    assert "2. Avoid late coffee" in model.codec.decode(request.prompt) and request.max_new_tokens <= 128
    return run, make(run.observe([(0, update(skeleton, "stop"))]))


def test_points_are_continued_side_by_side_and_shown_in_order(model: Model) -> None:
    run, requests = run_with_points(model, max_new_tokens=200)
    prompts = [model.codec.decode(r.prompt) for r in requests]
    assert [p.rsplit("a:", 1)[1] for p in prompts] == ["1. Sleep:", "2. Walk:"]
    assert all("1. Sleep\n2. Walk" in p and QUESTION in p for p in prompts)
    assert len({p.rsplit("a:", 1)[0] for p in prompts}) == 1
    assert len({r.sampling_params.seed for r in requests}) == 2 and all(r.stop == ("\n",) for r in requests)
    assert shown(run.observe([(2, update(" Late."))])) == "1. Sleep: "
    assert shown(run.observe([(1, update(" ")), (2, update(" Far.", "stop"))])) == ""
    assert shown(run.observe([(1, update(" Long"))])) == "Long"
    last = run.observe([(1, update(".", "stop"))]).update
    assert last is not None and last.text == ".\n2. Walk: Late. Far."
    assert last.finish_reason == "stop" and last.statistics is not None
    assert last.statistics.new_tokens == 9 and last.statistics.prompt_tokens == 6
    report = run.report
    assert (report.outcome, report.parts, report.requests, report.passes) == ("expanded", 2, 3, 5)


def test_a_point_that_was_cut_says_so(model: Model) -> None:
    run, _ = run_with_points(model)
    last = run.observe([(1, update("x", "length")), (2, update("y", "stop"))]).update
    assert last is not None and last.finish_reason == "length"


@pytest.mark.parametrize(
    ("skeleton", "tokens", "reason"),
    [
        (" Only one", 200, "no points"),
        (" Same\n2. Same\n3. Other", 200, "no points"),
        (" Sleep\n2. Walk", 24, "too few tokens"),
        (" " + "a" * 900 + "\n2. " + "b" * 900, 1900, "no room"),
    ],
)
def test_without_points_or_room_the_answer_is_plain(model: Model, skeleton: str, tokens: int, reason: str) -> None:
    run, requests = run_with_points(model, skeleton, max_new_tokens=tokens, stop=("END",))
    assert requests == [run.task.request] and reason in run.report.reason and run.report.outcome == "plain"
    assert shown(run.observe([(1, update("  plain"))])) == "  plain"
    last = run.observe([(1, update("", "stop", stop_reason="END"))]).update
    assert last is not None and (last.finish_reason, last.stop_reason) == ("stop", "END")


def test_the_skeleton_ends_where_it_repeats_itself(model: Model) -> None:
    run = model.plan_run(QUESTION, SkeletonPlan(router="off"))
    make(run.start())
    step = run.observe([(0, update(" Sleep\n2. Walk\n3. Walk\n"))])
    assert step.cancel == (0,) and step.make_requests is None
    step = run.observe([(0, update("4. More\n", "cancelled"))])
    assert len(make(step)) == 2


@pytest.mark.parametrize(
    ("asked", "prior", "takes"), [((-1, -2, -3), (-1, -2, -2), True), ((-1, -2, -3), (0, -2, -3), False)]
)
def test_the_router_weighs_letters_against_no_question(
    model: Model, asked: Sequence[float], prior: Sequence[float], takes: bool
) -> None:
    run = model.plan_run(QUESTION, {"type": "skeleton", "router": "prompt"})
    first, second = make(run.start())
    assert QUESTION in model.codec.decode(first.prompt) and "N/A" in model.codec.decode(second.prompt)
    letters = [model.codec.encode(letter)[0] for letter in "ABC"]

    def answer(scores: Sequence[float]) -> Update:
        return update("A", "length", top_logprobs=(tuple(zip(letters, scores, strict=True)),))

    assert run.observe([(1, answer(prior))]).make_requests is None
    (request,) = make(run.observe([(0, answer(asked))]))
    assert (request is run.task.request) is not takes and (run.report.reason == "") is takes


def test_the_trained_router_knows_points_by_the_question_alone(model: Model) -> None:
    """Questions that it was not trained on, as a person judged them (`tools/plan_questions.jsonl`)."""
    rows = [json.loads(line) for line in QUESTIONS.read_text("utf-8").splitlines()]
    router = TrainedRouter.load()
    judged = {kind: [router.takes_skeleton(r["prompt"]) for r in rows if r["list"] is kind] for kind in (True, False)}
    assert judged[True].count(True) >= 21 and judged[False].count(False) >= 23
    run = model.plan_run("What is 125 divided by 5?", "skeleton")
    assert make(run.start()) == [run.task.request] and "router" in run.report.reason


@pytest.mark.parametrize("question", ["Was sind die Vorteile von regelmäßigem Schlaf?", "经常锻炼有什么好处？"])
def test_the_model_is_asked_where_the_trained_router_knows_few_words(model: Model, question: str) -> None:
    run = model.plan_run(question, "skeleton")
    assert [model.codec.decode(r.prompt).count(question) for r in make(run.start())] == [1, 0]


def test_the_weights_of_the_router_are_those_of_its_questions() -> None:
    spec = importlib.util.spec_from_file_location("fit_router", TOOLS / "fit_router.py")
    assert spec is not None and spec.loader is not None
    fit_router = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fit_router)
    wordings, subjects = fit_router.read_wordings()
    router, shipped = fit_router.fit(wordings, subjects, 0, fit_router.RIDGE), TrainedRouter.load()
    assert router.weights.keys() == shipped.weights.keys()
    assert router.weights == pytest.approx(shipped.weights, abs=0.002)


def test_stop_strings_are_found_across_points(model: Model) -> None:
    run, _ = run_with_points(model, stop=("b\n2",))
    step = run.observe([(1, update("ab", "stop")), (2, update("never"))])
    assert shown(step) == "1. Sleep: a" and step.cancel == (2,)
    last = run.observe([(2, update("seen", "cancelled"))]).update
    assert last is not None and (last.text, last.finish_reason, last.stop_reason) == ("", "stop", "b\n2")


def test_a_request_that_fails_ends_the_answer(model: Model) -> None:
    run, _ = run_with_points(model)
    run.observe([(1, update("some"))])
    step = run.observe([(2, update("", "error", error=RuntimeError("broken")))])
    assert step.cancel == (1,)
    last = run.observe([(1, update("", "cancelled"))]).update
    assert last is not None and last.finish_reason == "error" and isinstance(last.error, RuntimeError)


def test_points_of_a_batch_are_as_alone(model: Model) -> None:
    """Also with a temperature, and with drafts: every request has a seed of its own."""
    for sampling, method in ((SamplingParams(), "autoregressive"), (SamplingParams(temperature=1, seed=3), "suffix")):
        _, requests = run_with_points(model, " Sleep\n2. Walk\n3. Eat", sampling=sampling, max_new_tokens=120)
        together = model.engine(method, 4, prefix_caching=True).complete(requests)
        alone = [model.engine().complete([request])[0] for request in requests]
        assert [a.tokens for a in together] == [a.tokens for a in alone]
        # The head is read once; of each point the target reads what its reply begins with, after the last common token.
        read = sum(a.statistics.prompt_tokens - a.statistics.cached_tokens for a in together)
        own = [len(model.codec.encode(reply)) for reply in ("1. Sleep:", "2. Walk:", "3. Eat:")]
        assert read <= len(requests[0].prompt) + sum(own[1:]) + len(own) - 1


def test_a_plan_on_the_engine_is_lossy_and_counts_all_requests(model: Model) -> None:
    (plain,) = model.generate(QUESTION, max_new_tokens=12)
    (answer,) = model.generate(QUESTION, "suffix", max_new_tokens=12, plan="skeleton")
    assert answer.plan is not None and answer.plan.outcome == "plain" and not answer.lossless and not answer.exact
    assert answer.text == plain.text and answer.finish_reason == plain.finish_reason
    assert answer.statistics.new_tokens == len(answer.tokens) > plain.statistics.new_tokens
    assert "".join(u.text for u in model.stream(QUESTION, max_new_tokens=12, plan="skeleton")) == plain.text


def test_a_cancelled_plan_leaves_nothing_in_the_engine(model: Model) -> None:
    engine = model.plan_engine()
    number = engine.submit(model.plan_run(QUESTION, SkeletonPlan(router="off"), max_new_tokens=100))
    for _ in range(4):
        engine.step()
    last = engine.cancel(number)
    assert last is not None and last.finish_reason == "cancelled" and not engine.busy and not engine.engine.busy
    assert engine.cancel(number) is None


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("logprobs", {"logprobs": 0}), ("prompt_logprobs", {"prompt_logprobs": 1}), ("prediction", {"prediction": "x"}),
        ("stop_token_ids", {"stop_token_ids": [3]}), ("ignore_eos", {"ignore_eos": True}),
        ("min_tokens", {"sampling": SamplingParams(min_tokens=3)}),
        ("allowed_token_ids", {"sampling": SamplingParams(allowed_token_ids=(3,))}),
        ("messages", {"prompt": [{"role": "assistant", "content": "x"}]}),
    ],
)  # fmt: skip
def test_fields_that_do_not_go_with_a_plan_are_refused(model: Model, field: str, options: Mapping[str, Any]) -> None:
    with pytest.raises(PlanFieldError) as caught:
        model.plan_run(**{"prompt": QUESTION, "plan": "skeleton", **options})
    assert caught.value.name == field


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("skelton", "did you mean 'skeleton'"), ("{", "JSON"), ({"max_points": 3}, "type"), (7, "found 7"),
        ({"type": "skeleton", "max_points": 1}, "max_points"), ('{"type": "skeleton", "points": 3}', "points"),
        ({"type": "skeleton", "max_points": "3"}, "max_points"), ({"type": "skeleton", "router": "ask"}, "router"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_explained(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_plan(value)


def test_text_is_released_in_order() -> None:
    text = OrderedText()
    first, second = text.append(), text.append()
    second.write("b", (2,))
    assert text.release() == ("", ())
    first.write("a", (1,))
    assert text.release() == ("a", (1,))
    first.closed = True
    assert text.release() == ("b", (2,))
    text.append("c", closed=True)
    assert text.release() == ("", ())
    text.close()
    assert text.release() == ("c", ())
