"""Replay counts what a real run counts; the pinned counts are unchanged."""

from pathlib import Path

import numpy as np
import pytest
from bench_helpers import QUESTIONS, bench, draft, model, refused, target

from foretell.bench.baseline import Baseline
from foretell.bench.competitor import GenerationSettings, MethodCompetitor, MethodSpec
from foretell.bench.questions import QuestionSet
from foretell.bench.recording import (
    RecordedAnswer,
    RecordedQuestion,
    RecordingSettings,
    load_recording,
    record_questions,
    recording_settings,
)
from foretell.bench.replay import ReplayRunner, method_replays, replay_all
from foretell.core.tree import root_tree, tree_from_lists
from foretell.engine.pass_times import PassTimes
from foretell.load import load as load_model
from foretell.model.load.reference import resolve_reference
from foretell.utils.store import RECORDS_FILE, RunStore

HERE = Path(__file__).parent
TOKENS = 16


def ignore(_: str) -> None:
    """No progress is shown."""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    settings = recording_settings(model(), QuestionSet("mine", QUESTIONS), len(QUESTIONS), TOKENS, 16)
    with RunStore(tmp_path / "recording", settings, RecordedQuestion) as store:
        record_questions(model(), QUESTIONS, settings, store, ignore)
    return tmp_path / "recording"


@pytest.mark.parametrize(
    "method",
    [
        "autoregressive",
        "ngram",
        *(pytest.param(m, marks=pytest.mark.exhaustive) for m in ("ngram@3", "suffix")),
        "draft_model",
    ],
)
def test_replay_and_real_runs_agree(recorded: Path, method: str) -> None:
    settings, questions = load_recording(recorded)
    settings = settings.model_copy(update={"model": str(target())})
    needs_draft = method == "draft_model"
    drafts = [load_model(str(draft()), "float32")] if needs_draft else []
    replayed = replay_all(method_replays(settings, [method], str(draft()) if needs_draft else None), questions, ignore)
    real = MethodCompetitor(model(), MethodSpec.parse(method), GenerationSettings(TOKENS), drafts)
    for question, found in zip(QUESTIONS, replayed[-len(QUESTIONS) :], strict=True):
        for a, b in zip(found.answers, real.answer(question, None), strict=True):
            assert (a.tokens, a.passes, a.drafted, a.tested_per_position, a.accepted_per_position) == (
                b.tokens,
                b.passes,
                b.drafted,
                b.tested_per_position,
                b.accepted_per_position,
            )


@pytest.mark.parametrize(("times", "gains"), [({1: 1.0, 257: 1.001}, True), ({1: 1.0, 257: 257.0}, False)])
def test_the_budget_chooses_for_a_machine_with_given_pass_times(
    recorded: Path, times: dict[int, float], gains: bool
) -> None:
    settings, questions = load_recording(recorded)
    replays = method_replays(settings.model_copy(update={"model": str(target())}), ["suffix"], times=PassTimes(times))
    plain, suffix = replays
    replay_all(replays, questions, ignore)
    assert plain.seconds == pytest.approx(plain.tokens * 1.0)
    gain = (plain.seconds / plain.tokens) / (suffix.seconds / suffix.tokens)
    assert gain > 1.15 if gains else 0.97 < gain <= 1  # a further token costs a whole pass


@pytest.mark.parametrize("given", ["1", "0=2", "1=-1", "a=b"])
def test_pass_times_that_are_none_are_refused(recorded: Path, given: str) -> None:
    assert "--pass-times" in refused("replay", recorded, "--pass-times", given)


def test_methods_that_learn_from_rejected_nodes_come_close(recorded: Path) -> None:
    settings, questions = load_recording(recorded)
    for method in ("recycling", "lookahead"):
        replayed = replay_all(method_replays(settings, [method]), questions, ignore)[-len(QUESTIONS) :]
        real = MethodCompetitor(model(), MethodSpec.parse(method), GenerationSettings(TOKENS))
        passes = sum(t.passes for q in QUESTIONS for t in real.answer(q, None))
        assert sum(t.passes for r in replayed for t in r.answers) == pytest.approx(passes, rel=0.35)


@pytest.mark.parametrize(
    ("method", "words"), [("typical_lossy", "lossy"), ("layer_skip", "own decoder"), ("ngrms", "did you mean 'ngram'")]
)
def test_what_cannot_be_replayed_is_refused(recorded: Path, method: str, words: str) -> None:
    settings, _ = load_recording(recorded)
    settings = settings.model_copy(update={"model": str(target())})
    with pytest.raises(ValueError, match=words):
        method_replays(settings, [method], str(draft()))


def test_an_interrupted_recording_is_finished_not_replayed(recorded: Path) -> None:
    path = recorded / RECORDS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert "interrupted, it holds 1 of 2 questions" in refused("replay", recorded)
    settings = recording_settings(model(), QuestionSet("mine", QUESTIONS), len(QUESTIONS), TOKENS, 16)
    with RunStore(recorded, settings, RecordedQuestion) as store:
        record_questions(model(), QUESTIONS, settings, store, ignore)
    assert path.read_bytes() == whole


def test_damaged_distributions_are_refused(recorded: Path) -> None:
    _, questions = load_recording(recorded)
    answer = questions[0].answers[0]
    for broken in ("!!!", answer.top_tokens[:-8]):
        with pytest.raises(ValueError, match="damaged"):
            answer.model_copy(update={"top_tokens": broken}).unpack()


def test_only_nodes_that_agree_with_the_answer_get_logits() -> None:
    runner = ReplayRunner(vocab=9, context=64)
    best = np.array([[4, 1], [5, 2], [6, 3]])
    runner.set_answer(RecordedAnswer.pack([1, 2], [4, 5, 6], best, np.log([[0.5, 0.25]] * 3)))
    prompt = root_tree([2]).with_prefix([[1, 2]])
    out = runner.forward([0], prompt, scored=np.array([[False, True]]))
    assert out.logits.argmax(-1).tolist() == [4]
    runner.commit(0, [0, 1])
    out = runner.forward([0], tree_from_lists([[4, 5, 7, 6]], [[-1, 0, 0, 1]]))
    assert out.logit_index.tolist() == [[0, 1, -1, 2]] and out.logits[:2].argmax(-1).tolist() == [5, 6]
    with pytest.raises(ValueError, match="hidden states"):
        runner.forward([0], root_tree([4]), hidden_layers=(1,))


def test_the_pinned_counts_are_unchanged() -> None:
    result = bench("replay", HERE / "recording", "--check", HERE / "baseline.json")
    assert result.exit_code == 0, result.stderr


def test_changed_counts_are_named(tmp_path: Path) -> None:
    pinned = Baseline(counts={"ngram/float32": {"a": (40, 20), "b": (40, 10), "c": (40, 40)}})
    now = Baseline(counts={"ngram/float32": {"a": (40, 21), "b": (40, 9)}})
    assert [d.split(": ")[1] for d in pinned.differences(now)] == [
        "40 tokens in 21 passes, pinned 40 in 20 (more per token)",
        "40 tokens in 9 passes, pinned 40 in 10 (fewer per token)",
        "pinned, but not measured now",
    ]
    assert pinned.differences(pinned) == []
    (tmp_path / "b.json").write_text(pinned.model_dump_json())
    assert Baseline.read(tmp_path / "b.json") == pinned
    (tmp_path / "c.json").write_text("[]")
    assert "not a baseline" in refused("replay", HERE / "recording", "--check", tmp_path / "c.json")


@pytest.mark.exhaustive
def test_the_real_model_still_gives_the_recorded_answers() -> None:
    try:
        resolve_reference("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    _, questions = load_recording(HERE / "recording")
    found = load_model("smollm2-135m", "float32")
    answer = next(r for r in questions if r.category == "translation").answers[0]
    engine = found.engine("ngram", rows=1)
    request = found.request("x", max_new_tokens=6)
    engine.submit(type(request)(answer.prompt, max_new_tokens=6))
    assert tuple(t for u in engine.run() for t in u.tokens) == answer.tokens[:6]


def test_the_recording_of_the_repository_is_complete() -> None:
    settings, questions = load_recording(HERE / "recording")
    assert isinstance(settings, RecordingSettings) and settings.dtype == "float32"
    assert len(questions) == settings.questions == 6
