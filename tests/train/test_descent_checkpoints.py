"""Interrupted trainings of small commands go on as uninterrupted ones: the same weights, bit by bit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import shared

from command import expect_error, run_foretell, tiny_target
from foretell.train.exits.checkpoints import Checkpoints

STEPS, STOP = 6, 3
EXITS = {
    "exits": ("--layers", "1", "--inner", "8"),
    "joint": ("--layers", "1", "--inner", "8", "--joint", "--weight-warmup", "0.5"),
    "blocks": ("--layers", "1", "--blocks", "1"),
}
"""Options of the trainings of `train exits`: of each exit by itself, of all together, of decoder blocks."""
SPARSE = ("--held-back-tokens", "512", "--head-sparsity", "0.5", "--rank", "4")
TEXT = "\n\n".join(f"the sum of {i} and {i} is {2 * i}." for i in range(400))


def command(kind: str, path: Path, out: str) -> list[str | Path]:
    """A training whose steps draw as much as its kind can."""
    text = path / "text.txt"
    text.write_text(TEXT, "utf-8")
    few: list[str | Path] = ["--out", path / out, "--steps", str(STEPS), "--seed", "1"]
    if kind == "free":
        return ["train", "free", tiny_target(), "--layer", "1", "--data", shared(), "--batch-tokens", "64", *few]
    if kind in EXITS:
        return ["train", "exits", tiny_target(), "--data", shared(), *EXITS[kind], *few]
    if kind == "sparsity":
        return ["train", "sparsity", tiny_target(), "--text", text, "--calibration-tokens", "512", *SPARSE, *few]
    if kind == "phrases":
        return ["phrases", "train", "--text", text, "--model", tiny_target(), "--tokens", "3000", *few]
    sizes: list[str | Path] = ["--layers", "2", "--hidden", "64", "--ffn", "128", "--vocab", "300", "--text", text]
    drawn = ["--widths", "0.5,1", "--layer-dropout", "0.4", "--exit-loss", "linear", "--rotate", "2"]
    return ["train", "decoder", *sizes, *drawn, "--sequence", "16", "--batch-tokens", "64", *few]


def interrupt(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str | Path], earlier: int = 0) -> None:
    """Run a training that Ctrl-C ends after some steps of the first descent, or of one that has others before it."""
    after_step, ended = Checkpoints.after_step, list[Path]()

    def stop(self: Checkpoints, optimizer: torch.optim.Optimizer, losses: Sequence[float], finished: bool) -> None:
        self.should_stop = lambda: len(ended) == earlier and len(losses) == STOP
        ended.extend([self.out] * finished)
        after_step(self, optimizer, losses, finished)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "after_step", stop)
        expect_error(*arguments, status=130)


@pytest.mark.parametrize(
    "kind",
    [
        *("decoder", "free", "sparsity"),
        *(pytest.param(kind, marks=pytest.mark.exhaustive if kind == "joint" else ()) for kind in EXITS),
        pytest.param("phrases", marks=pytest.mark.exhaustive),
    ],
)
def test_a_resumed_training_ends_with_the_same_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    earlier = 3 if kind == "sparsity" else 0
    interrupt(monkeypatch, command(kind, tmp_path, "part"), earlier)
    assert [f.name for f in (tmp_path / "part").iterdir()] == ["checkpoint"]
    states = (tmp_path / "part" / "checkpoint").rglob("state.json")
    assert sorted(f.parent.name for f in states) == [f"step-{STOP:09d}", *[f"step-{STEPS:09d}"] * earlier]
    # Random numbers outside of the training do not matter.
    torch.manual_seed(6)
    for out in ("part", "whole"):
        done = run_foretell(*command(kind, tmp_path, out))
        assert done.exit_code == 0, (done.output, done.exception)
        assert not (tmp_path / out / "checkpoint").exists()
    part, whole = (load_file(next((tmp_path / out).glob("*.safetensors"))) for out in ("part", "whole"))
    assert part.keys() == whole.keys()
    for name in part:
        assert torch.equal(part[name], whole[name]), name
    if kind not in ("free", "sparsity"):
        cards = [(tmp_path / out / "README.md").read_text().partition("```")[0] for out in ("part", "whole")]
        assert cards[0].replace("part", "") == cards[1].replace("whole", ""), "losses and quality, too"


def test_another_training_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = command("phrases", tmp_path, "out")
    interrupt(monkeypatch, wanted)
    where = f"{tmp_path / 'out'} holds a checkpoint of another training"
    assert f"{where}: --seed was 1 there and is 2 here; train with the same" in expect_error(*wanted, "--seed", "2")
    (tmp_path / "text.txt").write_text(TEXT.replace("sum", "end"))
    assert f"{where}: the text was " in expect_error(*wanted)
    (tmp_path / "text.txt").write_text(TEXT)
    file = next(tmp_path.glob("out/checkpoint/step-*/tensors-0.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    assert "damaged" in expect_error(*wanted)


def test_a_training_takes_no_place_of_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = command("decoder", tmp_path, "out")
    interrupt(monkeypatch, wanted)
    (tmp_path / "out" / "note").write_text("mine")
    assert "exists already" in expect_error(*wanted)
    (tmp_path / "out" / "note").unlink()
    assert run_foretell(*wanted).exit_code == 0
    assert "exists already" in expect_error(*wanted)
    interrupt(monkeypatch, [*wanted, "--force", "--seed", "2"])
    assert (tmp_path / "out" / "model.safetensors").exists(), "the old model stays until the new one is there"
    assert run_foretell(*wanted, "--force", "--seed", "2").exit_code == 0
    assert not (tmp_path / "out" / "checkpoint").exists()
