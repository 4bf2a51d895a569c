"""`foretell train` on the command line: output files, errors, and training with two processes."""

import csv
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console
from training_helpers import PROCESSES, answers, shared, target

from command import ENVIRONMENT, expect_error, run_foretell, save_tiny_model, tiny_target
from foretell.cli.train import TrainingProgress
from foretell.speculator.config_file import read_config
from foretell.train.loop import job
from foretell.train.loop.curve import StepMetrics
from foretell.train.loop.measure import Measurement
from foretell.train.recipe.mlp_speculator import MLPSpeculatorRecipe

SMALL = (
    "--steps", "4", "--batch-tokens", "256", "--sequence", "64", "--measure-every", "2", "--measure-prompts", "3",
    "--measure-tokens", "8",
    "--precision", "no", "--draft-vocab", "64", "--set", "inner=32", "--warmup", "2",
)  # fmt: skip


def arguments(out: Path, *more: str | Path, name: str = "mlp_speculator", data: Path | None = None) -> list[str | Path]:
    return ["train", name, "--model", tiny_target(), "--data", data or shared(), "--out", out, *SMALL, *more]


def asked(out: Path, *more: str | Path, name: str = "mlp_speculator", data: Path | None = None) -> str:
    return expect_error(*arguments(out, *more, name=name, data=data))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained speculator."""
    out = tmp_path_factory.mktemp("made") / "speculator"
    result = run_foretell(*arguments(out))
    assert result.exit_code == 0, (result.output, result.exception)
    assert re.search(r"\d\.\d+ tokens per pass at step \d of 4", result.stderr)
    return out


def test_everything_is_written(made: Path) -> None:
    assert {p.name for p in made.iterdir()} == {
        "README.md", "checkpoint", "config.json", "curve.csv", "curve.png", "model.safetensors"
    }  # fmt: skip
    assert read_config(made)["target"]["fingerprint"]
    assert (made / "curve.png").read_bytes().startswith(b"\x89PNG")
    text = (made / "README.md").read_text()
    assert "documents, " in text and "tokens to learn" in text and "Seed | 0" in text


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("mlp_speculator", "inner=99999999999", "inner"), ("mlp_speculator", "inner=" + "9" * 30, "inner"), ("medusa",
        "heads=99999999", "heads"),
        ("blockwise", "inner=99999999999", "inner"), ("eagle3", "ffn=99999999999", "ffn"), ("eagle3", "layers=99999999",
        "layers"),
    ],
)  # fmt: skip
def test_sizes_that_no_machine_has_room_for_are_refused(tmp_path: Path, name: str, option: str, words: str) -> None:
    out = tmp_path / "out"
    plain = [a for a in arguments(out, name=name) if a not in ("--set", "inner=32")]
    assert words in expect_error(*plain, "--set", option)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "option"), [("dflash", "block_size=64"), ("p_eagle", "depth=64"), ("pard", "depth=64")]
)
def test_drafts_longer_than_the_texts_are_refused(tmp_path: Path, name: str, option: str) -> None:
    plain = [a for a in arguments(tmp_path / "out", name=name) if a not in ("--set", "inner=32")]
    said = expect_error(*plain, "--set", option, "--set", "layers=1")
    assert re.search(f"{name} learns drafts of 6[34] tokens, and the longest text has .*; raise --sequence", said)
    assert not (tmp_path / "out").exists()


def test_a_lack_of_memory_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried 9"
        )

    monkeypatch.setattr(MLPSpeculatorRecipe, "build", fail)
    assert "--set inner=32: not enough memory" in asked(tmp_path / "out")


def test_what_was_trained_decodes(made: Path) -> None:
    result = run_foretell("generate", "hello", "--model", tiny_target(), "--method", "mlp_speculator", "--draft-model",
    made,
    "--max-new-tokens", "8",
                      "--dtype", "float32")  # fmt: skip
    plain = run_foretell("generate", "hello", "--model", tiny_target(), "--max-new-tokens", "8", "--dtype", "float32")
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stdout == plain.stdout


def test_the_same_command_again_has_nothing_to_do(made: Path) -> None:
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert run_foretell(*arguments(made)).exit_code == 0
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert "--lr was 0.001 there and is 0.01 here" in asked(made, "--lr", "0.01")


def test_names_and_values(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "did you mean 'mlp_speculator'" in asked(out, name="mlp_speculater")
    assert "did you mean 'cosine'" in asked(out, "--schedule", "cosin")
    assert "unknown precision 'fp16'" in asked(out, "--precision", "fp16")
    assert "did you mean 'cache'" in asked(out, "--features", "cach")
    assert "did you mean 'inner'" in asked(out, "--set", "iner=3")
    assert "NAME=VALUE was expected" in asked(out, "--set", "inner")
    assert "--lr: input should be greater than 0, found 0.0" in asked(out, "--lr", "0")
    assert "reads at most 512 tokens" in asked(out, "--sequence", "513")
    assert "--sequence: " in asked(out, "--sequence", "2")
    assert "how often an epoch shows" in expect_error(
        "train", "medusa", "--data", "answers=often", "--out", out, "--model", tiny_target()
    )
    assert "no training set here" in asked(out, data=tmp_path)
    assert not out.exists()


def test_data_of_another_model(tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=4)
    foreign = answers(tmp_path / "foreign", target(str(other)))
    assert "wrote these answers, and the target is" in asked(tmp_path / "out", data=foreign)
    larger = save_tiny_model(tmp_path / "larger", vocab=300)
    strange = answers(tmp_path / "strange", target(str(larger)))
    assert "its tokens are of another tokenizer" in asked(tmp_path / "out", data=strange)


def test_too_little_data(tmp_path: Path) -> None:
    few = answers(tmp_path / "few", target(str(tiny_target())), texts=7)
    assert "too little data: 4 chunks" in asked(tmp_path / "out", data=few)
    assert "too few to hold out 16" in asked(tmp_path / "out", "--measure-prompts", "16", data=few)


def test_an_installed_one_may_be_begun_with(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "find_installed", lambda kind, mark: made if kind == "mlp_speculator" else None)
    assert run_foretell(*arguments(tmp_path / "out", "--from", "mlp_speculator")).exit_code == 0
    assert f"## Started from `{made.name}`" in (tmp_path / "out" / "README.md").read_text()


def test_a_speculator_is_no_target(made: Path) -> None:
    text = expect_error("generate", "Hi", "--model", made)
    assert "a model was asked for, and this is a speculator, which drafts for one; name it with --draft-model" in text


def test_a_beginning_that_does_not_fit(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "a speculator of kind 'mlp_speculator', and medusa trains 'medusa'" in expect_error(
        "train", "medusa", "--model", tiny_target(), "--data", shared(), "--out", out, *SMALL[:-4], "--from", made
    )
    assert "give the --set it was trained with" in asked(out, "--from", made, "--set", "inner=16")
    assert "no config.json here" in asked(out, "--from", tmp_path)
    assert "no mlp_speculator speculator is installed for this target" in asked(out, "--from", "mlp_speculator")
    assert "no such folder, and no kind of speculator" in asked(out, "--from", tmp_path / "nowhere")
    own = ("--set", "own_head=true")
    assert run_foretell(*arguments(tmp_path / "own", *own)).exit_code == 0
    assert "leave --draft-vocab away" in asked(out, *own, "--from", tmp_path / "own", "--draft-vocab", "40")
    other = save_tiny_model(tmp_path / "other", seed=4)
    foreign = answers(tmp_path / "foreign", target(str(other)))
    assert "(fingerprint" in expect_error(
        "train", "mlp_speculator", "--model", other, "--data", foreign, "--out", out, *SMALL, "--from", made
    )


def test_a_terminal_shows_a_bar_and_a_log_shows_lines() -> None:
    row = StepMetrics(step=3, tokens=3000, loss=1.25, lr=1e-3, seconds=2.0, tokens_per_pass=2.5)
    for terminal in (True, False):
        text = StringIO()
        with TrainingProgress(Console(file=text, force_terminal=terminal, width=120), terminal) as shown:
            shown.on_train_begin(2, 3, processes=1)
            shown.on_measure(Measurement(2.5, (0.5,), 3, 24), 2.75)
            shown.on_step_end(row.model_copy(update={"step": 2}), 2 / 3)
            shown.on_step_end(row, 1.0)
        assert "loss 1.2500" in text.getvalue() and "2.500 tokens/pass (best 2.750)" in text.getvalue()


FSDP = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n"


def launched(command: Sequence[str], sharded: bool, port: int, folder: Path) -> str:
    """Run a command line in two processes that a launcher starts; returns what they told."""
    (folder / "launch.yaml").write_text(FSDP)
    # Without MPI, accelerate's own launcher starts several processes on a CPU for FSDP only; torchrun is what it calls
    # then.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "launch.yaml"),
    "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port",
              str(port)]  # fmt: skip
    if not sharded:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    result = subprocess.run(
        [*launch, "-m", "foretell", *command],
        env=os.environ | dict(ENVIRONMENT),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def forked(command: Sequence[str], sharded: bool, port: int, folder: Path) -> str:
    """The same in copies of this process, which have imported everything, with the environment of a launcher."""
    processes = [PROCESSES.Process(target=one_of_two, args=(rank, command, sharded, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    told = "".join((folder / f"told-{rank}").read_text() for rank in range(2))
    assert [process.exitcode for process in processes] == [0, 0], told
    return told


def one_of_two(rank: int, command: Sequence[str], sharded: bool, port: int, folder: Path) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if sharded else {}
    AcceleratorState._reset_state(reset_partial_state=True)
    warnings.simplefilter("ignore")
    result = run_foretell(*command)
    (folder / f"told-{rank}").write_text(f"{result.stderr}{result.exception or ''}")
    os._exit(result.exit_code)


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["copies", "shards"])
def test_two_copies_of_a_process_learn_as_one(made: Path, tmp_path: Path, sharded: bool) -> None:
    check_two(forked, made, tmp_path, sharded)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharded", [False, True], ids=["copies", "shards"])
def test_two_processes_learn_as_one(made: Path, tmp_path: Path, sharded: bool) -> None:
    """Under `torchrun` and `accelerate launch`."""
    check_two(launched, made, tmp_path, sharded)


def check_two(
    start: Callable[[Sequence[str], bool, int, Path], str], made: Path, tmp_path: Path, sharded: bool
) -> None:
    """Copies that exchange gradients, or shards (FSDP), train as one process does."""
    data = tmp_path / "answers"
    shutil.copytree(shared(), data)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = start([str(a) for a in arguments(tmp_path / "out", data=data)], sharded, port, tmp_path)
    assert told.count("2 processes") == 1, told
    one, two = (list(csv.DictReader((p / "curve.csv").read_text().splitlines())) for p in (made, tmp_path / "out"))
    for name, exactly in (("tokens", 0.0), ("loss", 1e-3), ("top-1 1", 2e-2)):
        assert [float(r[name]) for r in two] == pytest.approx([float(r[name]) for r in one], rel=exactly)
    assert two[-1]["tokens_per_pass"] == one[-1]["tokens_per_pass"]
    parts = {p.name for p in (tmp_path / "out" / "checkpoint" / "step-000000004").glob("tensors-*")}
    assert parts == ({"tensors-0.safetensors", "tensors-1.safetensors"} if sharded else {"tensors-0.safetensors"})
    if not sharded:
        again = run_foretell(*arguments(tmp_path / "out", data=data))
        assert again.exit_code == 0, "one process reads the checkpoint of two copies"
