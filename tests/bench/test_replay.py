"""Replay says what a real run says; the pinned counts have not moved."""

from pathlib import Path

import numpy as np
import pytest
from miniature import QUESTIONS, bench, draft, model, refused, target

from foretell.bench import record as recording
from foretell.bench.contender import Limits, OwnContender, Spec
from foretell.bench.replay import Baseline, casts, load, replay
from foretell.bench.scripted import Recording, RecordingSettings, Script, ScriptedRunner
from foretell.bench.tasks import Tasks
from foretell.core.tree import root_tree, tree_from_lists
from foretell.load import load as load_model
from foretell.load import resolve_reference
from foretell.utils.store import RECORDS_FILE, RunStore

HERE = Path(__file__).parent
TOKENS = 16


def quiet(_: str) -> None:
    """Nobody watches."""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    setting = recording.describe(model(), Tasks("mine", QUESTIONS), len(QUESTIONS), TOKENS, 16)
    with RunStore(tmp_path / "recording", setting, Recording) as store:
        recording.record(model(), QUESTIONS, setting, store, quiet)
    return tmp_path / "recording"


@pytest.mark.parametrize("method", ["autoregressive", "ngram", "ngram@3", "suffix", "draft_model"])
def test_replay_and_real_runs_agree(recorded: Path, method: str) -> None:
    setting, recordings = load(recorded)
    setting = setting.model_copy(update={"model": str(target())})
    needs = method == "draft_model"
    drafts = [load_model(str(draft()), "float32")] if needs else []
    played = replay(recordings, casts(setting, [method], str(draft()) if needs else None), quiet)
    real = OwnContender(model(), Spec.parse(method), Limits(TOKENS), drafts)
    for question, found in zip(QUESTIONS, played[-len(QUESTIONS) :], strict=True):
        for a, b in zip(found.turns, real.answer(question, None), strict=True):
            assert (a.tokens, a.passes, a.drafted, a.tested, a.accepted) == (
                b.tokens,
                b.passes,
                b.drafted,
                b.tested,
                b.accepted,
            )


def test_methods_that_learn_from_rejected_nodes_come_close(recorded: Path) -> None:
    setting, recordings = load(recorded)
    for method in ("recycling", "lookahead"):
        played = replay(recordings, casts(setting, [method]), quiet)[-len(QUESTIONS) :]
        real = OwnContender(model(), Spec.parse(method), Limits(TOKENS))
        passes = sum(t.passes for q in QUESTIONS for t in real.answer(q, None))
        assert sum(t.passes for r in played for t in r.turns) == pytest.approx(passes, rel=0.35)


@pytest.mark.parametrize(
    ("method", "words"), [("typical_lossy", "lossy"), ("layer_skip", "own decoder"), ("ngrms", "did you mean 'ngram'")]
)
def test_what_cannot_be_replayed_is_refused(recorded: Path, method: str, words: str) -> None:
    setting, _ = load(recorded)
    setting = setting.model_copy(update={"model": str(target())})
    with pytest.raises(ValueError, match=words):
        casts(setting, [method], str(draft()))


def test_an_interrupted_recording_is_finished_not_replayed(recorded: Path) -> None:
    path = recorded / RECORDS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert "interrupted, it holds 1 of 2 questions" in refused("replay", recorded)
    setting = recording.describe(model(), Tasks("mine", QUESTIONS), len(QUESTIONS), TOKENS, 16)
    with RunStore(recorded, setting, Recording) as store:
        recording.record(model(), QUESTIONS, setting, store, quiet)
    assert path.read_bytes() == whole


def test_damaged_distributions_are_refused(recorded: Path) -> None:
    _, recordings = load(recorded)
    script = recordings[0].turns[0]
    for broken in ("!!!", script.best[:-8]):
        with pytest.raises(ValueError, match="damaged"):
            script.model_copy(update={"best": broken}).distributions()


def test_a_script_answers_on_its_path_only() -> None:
    runner = ScriptedRunner(vocab=9, context=64)
    best = np.array([[4, 1], [5, 2], [6, 3]])
    runner.play(Script.of([1, 2], [4, 5, 6], best, np.log([[0.5, 0.25]] * 3)))
    prompt = root_tree([2]).with_prefix([[1, 2]])
    out = runner.forward([0], prompt, scored=np.array([[False, True]]))
    assert out.logits.argmax(-1).tolist() == [4]
    runner.commit(0, [0, 1])
    out = runner.forward([0], tree_from_lists([[4, 5, 7, 6]], [[-1, 0, 0, 1]]))
    assert out.logit_index.tolist() == [[0, 1, -1, 2]] and out.logits[:2].argmax(-1).tolist() == [5, 6]
    with pytest.raises(ValueError, match="hidden states"):
        runner.forward([0], root_tree([4]), hidden_layers=(1,))


def test_the_pinned_counts_have_not_moved() -> None:
    result = bench("replay", HERE / "recording", "--check", HERE / "baseline.json")
    assert result.exit_code == 0, result.stderr


def test_moved_counts_are_told(tmp_path: Path) -> None:
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


def test_the_real_model_still_says_what_was_recorded() -> None:
    try:
        resolve_reference("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    _, recordings = load(HERE / "recording")
    found = load_model("smollm2-135m", "float32")
    script = next(r for r in recordings if r.category == "translation").turns[0]
    engine = found.engine("ngram", rows=1)
    request = found.request("x", max_new_tokens=6)
    engine.submit(type(request)(script.prompt, max_new_tokens=6))
    assert tuple(t for u in engine.run() for t in u.tokens) == script.tokens[:6]


def test_settings_say_what_was_recorded() -> None:
    setting, recordings = load(HERE / "recording")
    assert isinstance(setting, RecordingSettings) and setting.dtype == "float32"
    assert len(recordings) == setting.questions == 6
