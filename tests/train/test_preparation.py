"""What is made for claims: every kind that the catalogue knows, once per folder, resumed exactly, told on the page."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_helpers import shared, target

from command import expect_error, run_foretell, save_tiny_model, tiny_target
from foretell.lab.reproduce import CLAIMS, Preparation, PreparationSettings
from foretell.lab.reproduce.preparation import texts
from foretell.lab.reproduce.preparation.preparation import need_of
from foretell.lab.reproduce.preparation.texts import Texts
from foretell.lab.reproduce.preparation.training import PLANS
from foretell.load import load
from foretell.train.data.dataset import Dataset
from foretell.train.loop.trainer import TrainingCallback
from foretell.train.recipe import RECIPES
from helpers import unchecked


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with unchecked():
        yield


def asked(*more: str | Path) -> list[str | Path]:
    return ["reproduce", "--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "8", *more]


def test_every_kind_that_a_claim_drafts_with_can_be_made() -> None:
    assert set(PLANS) <= set(RECIPES)
    needed = {need_of(run.method) for claim in CLAIMS for run in claim.runs}
    assert needed == {*PLANS, ""}
    assert need_of("ngram") == need_of("mtp") == ""


def test_a_claim_is_checked_with_what_was_made_and_the_page_says_how(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    methods = "eagle", "medusa"
    plain = asked(*methods, "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "report", "--json")
    without = run_foretell(*plain)
    assert all("--train" in claim["found"] for claim in json.loads(without.stdout)), without.output

    training = ("--train", "--train-data", shared(), "--train-steps", "3")
    first = run_foretell(*plain, *training)
    assert first.exit_code == 0, (first.output, first.exception)
    claims = json.loads(first.stdout)
    assert [c["verdict"] == "not checked" for c in claims] == [False] * 2
    assert "3 steps on" in claims[0]["prepared"][0] and "held-back prompts" in claims[0]["prepared"][0]
    assert "medusa: 3 steps on" in (tmp_path / "report" / "index.html").read_text()
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "report" / "made").rglob("made.json")}
    runs = (tmp_path / "report" / "runs" / "records.jsonl").read_text()
    assert len(made) == 2 and not list((tmp_path / "report" / "made").rglob("checkpoint"))

    again = run_foretell(*plain, *training)
    assert [c["prepared"] for c in json.loads(again.stdout)] == [c["prepared"] for c in claims]
    assert {p: p.stat().st_mtime_ns for p in made} == made
    assert (tmp_path / "report" / "runs" / "records.jsonl").read_text() == runs


@dataclass
class _Stop:
    requested: bool = True


@contextmanager
def _at_once() -> Iterator[_Stop]:
    yield _Stop()


class _Begins(TrainingCallback):
    steps: list[int]

    def on_train_begin(self, step: int, steps: int, processes: int) -> None:
        self.steps.append(step)


@pytest.mark.exhaustive
def test_an_interrupted_training_goes_on_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    model, begins = target(str(tiny_target())), _Begins()
    begins.steps = []

    def preparation(name: str, **changed: object) -> Preparation:
        settings = replace(PreparationSettings(steps=4, callback=lambda: begins), **changed)  # type: ignore[arg-type]
        return Preparation(model, tmp_path / name, shared(), settings)

    with pytest.raises(KeyboardInterrupt):
        preparation("stopped", stoppable=_at_once).prepared("eagle")
    for name in ("stopped", "whole"):
        assert preparation(name).prepared("eagle2") is not None
    assert begins.steps == [0, 1, 0]
    stopped, whole = (load_file(next((tmp_path / n).glob("eagle-*/model.safetensors"))) for n in ("stopped", "whole"))
    assert stopped.keys() == whole.keys() and all(bool((stopped[k] == whole[k]).all()) for k in whole)
    assert preparation("whole", steps=5).label("eagle") != preparation("whole").label("eagle")


def test_the_model_writes_its_own_texts_and_goes_on_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(str(save_tiny_model(tmp_path / "target", hidden=64, ffn=64)), "float32")
    monkeypatch.setattr(texts, "_LONGEST_ANSWER", 40)
    said = list[str]()
    for tokens in (200, 400, 400):
        monkeypatch.setattr(texts, "TOKENS", tokens)
        found = Texts(model, tmp_path / "answers", None, said.append)
        assert found.dataset().num_learned_tokens >= tokens
    assert len(said) == 2 and "that the model wrote" in found.describe()
    assert len(list((tmp_path / "answers" / "features").glob("*.bf16"))) == len(set(found.fused_layers))

    silent = load(str(tmp_path / "target"), "float32")
    silent.codec = replace(silent.codec, chat_template=None)
    with pytest.raises(ValueError, match="--train-data"):
        Texts(silent, tmp_path / "none", None, said.append).folder()


def test_what_does_not_go_together_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--out DIR" in expect_error(*asked("eagle", "--train"))
    assert "one of the two" in expect_error(*asked("eagle", "--train", "--draft-model", "x", "--out", tmp_path))
    assert "add --train" in expect_error(*asked("eagle", "--train-steps", "3"))
    assert "add --train" in expect_error(*asked("eagle", "--train-data", tmp_path))
    training = ("--train", "--train-data", tmp_path, "--out", tmp_path / "report")
    assert "no training set here" in expect_error(*asked("eagle", *training))
    other = save_tiny_model(tmp_path / "other", seed=1)
    command = ("reproduce", "eagle", "--model", other, "--dtype", "float32", "--train", "--train-data", shared())
    told = run_foretell(*command, "--out", tmp_path / "report").stdout
    assert "wrote these answers" in " ".join(told.split())
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 500_000_000}))
    assert "500 MB are free" in expect_error(*asked("eagle", "--train", "--out", tmp_path / "full"))
    assert Dataset.open(shared())
