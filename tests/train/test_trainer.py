"""The trainer: loss and tokens per pass, resuming, early stopping, and checkpoints after failures."""

import csv
import errno
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_helpers import PROCESSES, answers, losses, settings, shared, target, task, trained, trainer

from command import ENVIRONMENT, save_tiny_model
from foretell.cli.train import run
from foretell.model.kernels import instruction_sets
from foretell.speculator.checkpoint import load_own
from foretell.train.loop import checkpoint
from foretell.train.loop import trainer as loop
from foretell.train.loop.job import dtype_of
from foretell.train.loop.measure import Measurement
from foretell.train.loop.model_card import render_card, write_card
from foretell.train.loop.settings import TrainingSettings
from foretell.train.loop.trainer import Trainer
from foretell.train.recipe.base import Loss
from foretell.train.recipe.mlp_speculator import MLPSpeculatorRecipe
from foretell.utils.paths import require_empty
from foretell.utils.store import write_synced
from helpers import unchecked


def test_tokens_per_pass_rise_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    done = trainer(settings(tmp_path, steps=45, measure_every=15, lr=1e-2, draft_vocab=0))
    done.run()
    assert losses(done)[-1] < 0.8 * losses(done)[0]
    assert done.best > 1.2 and done.last_measurement is not None and done.last_measurement.accepted[0] > 0.1
    found = load_own(tmp_path, done.job.model.checkpoint.embedding_and_head(torch.float32))
    assert type(found) is type(done.job.recipe.network)
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [int(r["step"]) for r in rows] == list(range(1, 46))
    assert sum(r["tokens_per_pass"] != "" for r in rows) == 3 and float(rows[-1]["top-1 1"]) > 0
    text = render_card(done, "foretell train …")
    assert "foretell train …" in text and done.job.fingerprint in text and f"**{done.best:.3f}**" in text


@pytest.mark.parametrize("accumulate, ema", [(1, 0.0), (2, 0.9)])
def test_a_training_resumed_from_a_checkpoint_has_the_curve_of_one_that_never_stopped(
    tmp_path: Path, accumulate: int, ema: float
) -> None:
    def wanted(name: str) -> TrainingSettings:
        return settings(tmp_path / name, features="stream", accumulate=accumulate, ema=ema, batch_tokens=128)

    whole = trained(wanted("whole"))
    part = trainer(wanted("part"))
    with pytest.raises(KeyboardInterrupt):
        part.run(lambda: part.step == 5)
    rest = trained(wanted("part"))
    assert losses(rest) == losses(whole)
    assert [r.tokens_per_pass for r in rest.curve] == [r.tokens_per_pass for r in whole.curve]
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(load_file(tmp_path / "part" / "model.safetensors")[name], tensor, rtol=0, atol=0)


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose final norm is 100 times larger than usual, and its answers."""
    folder = tmp_path_factory.mktemp("loud")
    model = save_tiny_model(folder / "model")
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.norm.weight": 100 * tensors["model.norm.weight"]}, model / "model.safetensors")
    return model, answers(folder / "answers", target(str(model)))


@pytest.mark.parametrize("recipe", ["eagle3", "p_eagle", "dflash"])
def test_a_new_network_is_certain_of_nothing_however_large_the_targets_final_norm_is(
    loud: tuple[Path, Path], tmp_path: Path, recipe: str
) -> None:
    """The first loss is near that of a network that gives all tokens the same probability; trained weights stay."""
    model, data = loud

    def made(name: str, **changed: object) -> Trainer:
        given = {"model": str(model), "recipe": recipe, "options": {}, "steps": 1, "measure_every": 0}
        return trainer(settings(tmp_path / name, data, **given, **changed))

    def first_loss(of: Trainer) -> float:
        with unchecked():
            of.run()
        return losses(of)[0]

    new, uniform = made("new"), made("uniform")
    norm = uniform.job.recipe.output_norm
    assert norm is not None
    norm.data.zero_()
    assert first_loss(new) < 1.15 * first_loss(uniform)
    weights = load_file(tmp_path / "new" / "model.safetensors")
    weights["norm.weight"] *= 100
    save_file(weights, tmp_path / "new" / "model.safetensors")
    kept = made("further", init_from=str(tmp_path / "new")).job.recipe.output_norm
    assert kept is not None and torch.equal(kept, weights["norm.weight"])


def test_a_measurement_that_is_interrupted_leaves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not their moving average, which a checkpoint would keep as the weights."""
    part = trainer(settings(tmp_path, ema=0.9, measure_every=0))
    with pytest.raises(KeyboardInterrupt):
        part.run(lambda: part.step == 3)
    before = {name: p.detach().clone() for name, p in part.job.recipe.module.named_parameters()}

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(part._strategy, "full_state_dict", interrupt)
    with pytest.raises(KeyboardInterrupt):
        part._measure()
    assert all(torch.equal(p, before[name]) for name, p in part.job.recipe.module.named_parameters())


def test_a_budget_of_processor_time_ends_a_training_and_its_learning_rate(tmp_path: Path) -> None:
    def wanted(minutes: float) -> TrainingSettings:
        return settings(tmp_path, steps=100_000, cpu_minutes=minutes, measure_every=0)

    done = trained(wanted(0.005))
    assert 2 < done.step < 100_000 and done.progress.cpu_seconds >= 0.3 and done.best > 0
    assert done.curve[-1].lr < 0.2 * max(row.lr for row in done.curve)
    steps = done.step
    again = trained(wanted(0.005))
    assert again.step == steps and again.progress.cpu_seconds == done.progress.cpu_seconds
    with pytest.raises(ValueError, match=r"--cpu-minutes was 0\.005 there and is 0\.01 here"):
        trained(wanted(0.01))


def test_minutes_end_a_training_by_the_clock(tmp_path: Path) -> None:
    wanted = settings(tmp_path, steps=100_000, minutes=0.01, measure_every=0)
    done = trained(wanted)
    assert 2 < done.step < 100_000 and done.best > 0
    assert done.curve[-2].seconds < 0.6 <= done.progress.seconds
    assert done.curve[-1].lr < 0.2 * max(row.lr for row in done.curve)
    assert trained(wanted).step == done.step


def train_without_kernels(wanted: TrainingSettings) -> None:
    os.environ |= ENVIRONMENT
    run(wanted, "")


def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "killed", steps=200, measure_every=0, features="stream", save_minutes=1e-6, seed=3)
    process = PROCESSES.Process(target=train_without_kernels, args=(wanted,))
    process.start()
    store = checkpoint.CheckpointStore(tmp_path / "killed", checkpoint.TrainState)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.is_alive():
        newest = store.latest()
        if newest is not None and checkpoint.step_of(newest) >= 8:
            break
        time.sleep(0.01)
    process.kill()
    process.join()
    stand = store.load_state()
    assert process.exitcode == -signal.SIGKILL and stand is not None and 8 <= stand.step < 200
    # The rest of two hundred steps is not needed to see whether it goes on alike: some steps of both are.
    resumed, whole = trainer(wanted), trainer(wanted.model_copy(update={"out": str(tmp_path / "whole")}))
    for one in (resumed, whole):
        with pytest.raises(KeyboardInterrupt):
            one.run(lambda one=one: one.step >= stand.step + 5)  # type: ignore[misc]
    assert losses(resumed) == losses(whole)


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Measurements with these results."""
    told = iter(values)
    monkeypatch.setattr(loop, "measure", lambda *_, **__: Measurement(next(told), (0.5,), 3, 36))


def test_training_stops_by_what_is_measured_and_not_by_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [1.5, 1.9, 1.8, 1.7, 2.5])
    done = trained(settings(tmp_path / "a", steps=40, measure_every=2, patience=2))
    assert (done.step, done.best, done.best_step, done.stopped) == (8, 1.9, 4, True)
    assert losses(done)[-1] < losses(done)[3]
    assert trained(done.job.settings).step == 8, "run again, it is still over"


def test_the_result_is_the_best_and_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [2.0, 1.0])
    trained(settings(tmp_path / "a", steps=8, measure_every=4, schedule="constant"))
    scripted(monkeypatch, [2.0])
    trained(settings(tmp_path / "b", steps=4, measure_every=4, schedule="constant"))
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in "ab")
    assert all(torch.equal(a[n], b[n]) for n in b)


def test_a_loss_that_is_no_number_ends_training_and_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = trainer(settings(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        good.run(lambda: good.step == 4)
    before, real = good._store.latest(), MLPSpeculatorRecipe.loss

    def broken(self: MLPSpeculatorRecipe, network: torch.nn.Module, batch: object) -> Loss:
        found = real(self, network, batch)  # type: ignore[arg-type]
        return Loss(found.total * float("nan"), found.metrics)

    monkeypatch.setattr(MLPSpeculatorRecipe, "loss", broken)
    with pytest.raises(
        ValueError,
        match=r"loss is nan at step 5 \(documents [\d, ]+.* of .*\): the checkpoint of step 4 stays; try a lower --lr",
    ):
        trained(settings(tmp_path))
    monkeypatch.undo()
    assert good._store.latest() == before
    assert losses(trained(settings(tmp_path))) == losses(trained(settings(tmp_path / "other")))


def test_no_space_for_a_checkpoint_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(settings(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        one.run(lambda: one.step == 4)
    real = write_synced

    def full(path: Path, data: bytes) -> None:
        real(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(ValueError, match=r"no space left for a checkpoint in .*: that of step 4 stays"):
        trained(settings(tmp_path))
    monkeypatch.undo()
    stand = checkpoint.CheckpointStore(tmp_path, checkpoint.TrainState).load_state()
    assert stand is not None and stand.step == 4
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["step-000000004"]
    assert losses(trained(settings(tmp_path))) == losses(trained(settings(tmp_path / "other")))


def test_a_checkpoint_of_another_training_is_not_touched(tmp_path: Path) -> None:
    data = answers(tmp_path / "answers", target(task(settings(tmp_path)).settings.model))
    wanted = settings(tmp_path / "out", data, steps=2)
    trained(wanted)
    for changed, sentence in (
        ({"lr": 1e-2}, "--lr was 0.003 there and is 0.01 here"),
        ({"options": {"inner": "16"}}, "--set was inner=32 there"),
        ({"steps": 3}, "--steps was 2 there and is 3 here"),
    ):
        with pytest.raises(ValueError, match=sentence):
            trained(wanted.model_copy(update=changed))
    answers(data / "more", target(wanted.model), texts=30)
    for file in ("00000.safetensors", "settings.json"):
        (data / "more" / file).rename(data / file)
    with pytest.raises(ValueError, match="trained on 21 documents, and the data has 27 now"):
        trained(wanted)
    newest = checkpoint.CheckpointStore(tmp_path / "out", checkpoint.TrainState).latest()
    assert newest is not None
    (newest / "tensors-0.safetensors").write_bytes(b"damaged")
    answers(tmp_path / "again", target(wanted.model))
    for file in ("00000.safetensors", "settings.json"):
        (tmp_path / "again" / file).rename(data / file)
    with pytest.raises(ValueError, match=r"tensors-0.safetensors: damaged .*; delete"):
        trained(wanted)


def test_a_training_overwrites_nothing_that_it_cannot_resume(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ValueError, match="there is something already; name a directory that is new or empty"):
        trained(settings(tmp_path, steps=2))
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]
    wanted = settings(tmp_path / "out", steps=2, measure_every=0)
    begun = checkpoint.CheckpointStore(tmp_path / "out", checkpoint.TrainState)
    assert begun.load_state() is None
    (tmp_path / "out" / "config.json").write_text("of the best weights so far")
    assert trained(wanted).step == 2, "killed before its first checkpoint, it begins again"
    shutil.rmtree(tmp_path / "out" / "checkpoint")
    with pytest.raises(ValueError, match="there is something already"):
        trained(wanted)


def test_processes_of_a_training_may_begin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_is_faster(out: Path) -> None:
        (out / "checkpoint").mkdir(parents=True)
        require_empty(out)

    monkeypatch.setattr(checkpoint, "require_empty", other_is_faster)
    assert checkpoint.CheckpointStore(tmp_path / "out", checkpoint.TrainState).load_state() is None


def test_keeping_states_changes_rounding_only(tmp_path: Path) -> None:
    kept = trained(settings(tmp_path / "a", features="cache"))
    read = trained(settings(tmp_path / "b", features="stream"))
    assert losses(kept) == pytest.approx(losses(read), rel=1e-2)
    assert any((shared() / "features").glob("*.bf16"))
    with pytest.raises(ValueError, match="more than --cache-gib 0"):
        trainer(settings(tmp_path / "c", features="cache", cache_gib=0))


def test_training_begins_with_the_weights_of_an_earlier_speculator(tmp_path: Path) -> None:
    first = trained(settings(tmp_path / "a", steps=24, measure_every=0, lr=1e-2))
    second = trained(settings(tmp_path / "b", steps=2, init_from=str(tmp_path / "a"), lr=1e-5, draft_vocab=None))
    assert losses(second)[0] < 0.95 * losses(first)[0]
    assert second.best >= first.best - 0.1


def test_a_later_training_may_choose_other_tokens(tmp_path: Path) -> None:
    def drafted(name: str) -> list[int]:
        tokens = load_own(
            tmp_path / name, trainer(settings(tmp_path / "x")).job.model.checkpoint.embedding_and_head(torch.float32)
        ).token_of
        assert tokens is not None
        return list(tokens.tolist())

    first = trained(settings(tmp_path / "a", steps=24, measure_every=0, lr=1e-2, draft_vocab=48))
    trained(settings(tmp_path / "b", steps=1, init_from=str(tmp_path / "a"), draft_vocab=None))
    again = trained(settings(tmp_path / "c", steps=1, init_from=str(tmp_path / "a"), draft_vocab=60))
    assert drafted("a") == drafted("b") and len(drafted("a")) == 48
    assert len(drafted("c")) == 60 and set(drafted("a")) < set(drafted("c"))
    assert losses(again)[0] < 0.95 * losses(first)[0]


def test_a_later_training_may_read_more_of_the_target(tmp_path: Path) -> None:
    first = trained(settings(tmp_path / "a", steps=24, measure_every=0, lr=1e-2))
    narrow = settings(tmp_path / "b", steps=1, init_from=str(tmp_path / "a"), lr=1e-9, draft_vocab=None)
    more = {"options": {"inner": "32", "more_hidden_layers": "1,0"}, "out": str(tmp_path / "c")}
    before, begun = losses(trained(narrow))[0], losses(trained(narrow.model_copy(update=more)))[0]
    # What it did not see weighs nothing at first.
    assert begun == pytest.approx(before, rel=1e-6)
    assert begun < 0.95 * losses(first)[0]
    other = {
        "options": {"inner": "32", "more_hidden_layers": "0,1"},
        "out": str(tmp_path / "d"),
        "init_from": str(tmp_path / "c"),
    }
    with pytest.raises(
        ValueError, match=r"reads layers \[3, 1, 0\] of the target, and \[3, 0, 1\] with these settings"
    ):
        trained(narrow.model_copy(update=other))


def test_a_card_tells_of_the_trainings_that_it_began_from(tmp_path: Path) -> None:
    for name, begin in ("a", ""), ("b", "a"), ("c", "b"):
        done = trained(
            settings(tmp_path / name, steps=2, init_from=str(tmp_path / begin) if begin else "", draft_vocab=32)
        )
        write_card(done, f"foretell train to {name}")
    lines = (tmp_path / "c" / "README.md").read_text().splitlines()
    assert [line for line in lines if "# Started" in line] == ["## Started from `b`", "### Started from `a`"]
    assert [line for line in lines if "foretell train" in line] == [f"foretell train to {name}" for name in "cba"]
    curves = ["## Training curve", "### Training curve", "#### Training curve"]
    assert [line for line in lines if line.endswith(" curve")] == curves
    assert sum("curve.png" in line for line in lines) == 1


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    narrow = trained(settings(tmp_path / "a", precision="bf16"))
    wide = trained(settings(tmp_path / "b"))
    assert losses(narrow) == pytest.approx(losses(wide), rel=0.03)
    weights = narrow.job.recipe.network.state_dict().values()
    assert all(w.dtype != torch.bfloat16 for w in weights)


@pytest.mark.parametrize(
    ("features", "expected"),
    [("avx2 fma", torch.float32), ("avx512f avx512_bf16", torch.bfloat16), ("asimd bf16", torch.bfloat16)],
)
def test_auto_trains_in_what_the_processor_multiplies_fast(
    features: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(instruction_sets, "processor_features", lambda: frozenset(features.split()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dtype_of(settings(tmp_path, precision="auto")) == expected
    assert dtype_of(settings(tmp_path, precision="bf16")) == torch.bfloat16
    assert dtype_of(settings(tmp_path, precision="no")) == torch.float32
