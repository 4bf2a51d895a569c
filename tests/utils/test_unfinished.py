"""Outputs that appear whole or not at all, also when the process is killed; and whose files are removed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretell.utils import unfinished
from foretell.utils.unfinished import part_of, put_in_place, remove, remove_unfinished, unfinished_prefix, whole

DEAD = 2**22 + 1
"""No process has this number."""
CHILD = """
import os, sys
from pathlib import Path
from foretell.utils import unfinished
out, exchanges = Path(sys.argv[1]), sys.argv[2] == "exchange"
if not exchanges:
    unfinished._exchange_call = lambda: None
print("ready", flush=True)
for i in range(10**9):
    part = unfinished.part_of(out)
    part.mkdir()
    (part / "a").write_text(str(i))
    (part / "b").write_text(str(i))
    unfinished.put_in_place(part, out)
"""


def content(out: Path) -> tuple[str, str]:
    return (out / "a").read_text(), (out / "b").read_text()


def replaced_for(out: Path, kind: str, seconds: float) -> int:
    """Let a process replace a folder for some time, and kill it. How often there was no folder meanwhile."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(out), kind], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    missing, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        missing += not os.path.lexists(out)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    return missing


@pytest.mark.skipif(unfinished._exchange_call() is None, reason="the system exchanges no names")
def test_there_is_an_output_at_every_moment(tmp_path: Path) -> None:
    out = tmp_path / "q"
    out.mkdir()
    for name in "ab":
        (out / name).write_text("old")
    for seconds in (0.3, 0.05, 0.11, 0.17):
        assert replaced_for(out, "exchange", seconds) == 0
        first, second = content(out)
        assert first == second
    assert content(out) != ("old", "old")
    assert part_of(out).parent == tmp_path and sorted(p.name for p in tmp_path.iterdir()) == ["q"]


def test_an_output_that_was_set_aside_comes_back(tmp_path: Path) -> None:
    """Where names cannot be exchanged, a killed process may leave the old output under another name."""
    out = tmp_path / "q.v1"
    out.mkdir()
    for name in "ab":
        (out / name).write_text("old")
    for seconds in (0.3, 0.05, 0.11, 0.17):
        replaced_for(out, "rename", seconds)
        part_of(out)
        first, second = content(out)
        assert first == second
        assert [p.name for p in tmp_path.iterdir()] == ["q.v1"]
    old = tmp_path / f".q.v1.{DEAD}.old.v1"
    out.rename(old)
    part_of(out)
    assert out.is_dir() and not old.exists()


def test_a_rename_that_fails_leaves_the_old_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "_exchange_call", lambda: None)
    out = tmp_path / "q"
    out.mkdir()
    (out / "w").write_text("old")
    with pytest.raises(OSError):
        put_in_place(tmp_path / "nothing", out)
    assert (out / "w").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["q"]


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a folder", "a link to a folder"])
def test_a_folder_takes_its_name(tmp_path: Path, there: str) -> None:
    out, other = tmp_path / "q", tmp_path / "other"
    other.mkdir()
    (other / "w").write_text("other")
    if there == "a link to a folder":
        out.symlink_to(other)
    elif there != "nothing":
        out.mkdir()
    if there == "a folder":
        (out / "w").write_text("old")
        (out / "old").write_text("old")
    part = part_of(out)
    part.mkdir()
    (part / "w").write_text("new")
    put_in_place(part, out)
    assert [(p.name, p.read_text()) for p in out.iterdir()] == [("w", "new")]
    assert (other / "w").read_text() == "other" and not part.exists()


def test_a_file_takes_its_name(tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    for text in ("one", "two"):
        part = part_of(out)
        assert part.suffix == ".gguf"
        part.write_text(text)
        put_in_place(part, out)
        assert out.read_text() == text and [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_only_parts_of_ended_processes_of_this_output_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    ours = (f".model.gguf.{DEAD}.part.gguf", f".model.gguf.{DEAD}.part", f".model.gguf.{DEAD}.old.gguf")
    others = (
        f".model.gguf.{os.getpid()}.part.gguf", f".model2.gguf.{DEAD}.part.gguf", ".model.gguf.part",
        f"model.gguf.{DEAD}.part.gguf", f".model.gguf.{DEAD}.part.bak", f".modelxgguf.{DEAD}.part",
        ".model.gguf.x.part", ".model.gguf.compress",
    )  # fmt: skip
    out.write_text("the output")
    for name in (*ours, *others[1:]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_text("x")
    (tmp_path / others[0]).write_text("being written")
    part_of(out)
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", *others} and out.read_text() == "the output"


def test_what_others_left_in_a_shared_folder_stays(tmp_path: Path) -> None:
    ours = (f"tmp-{DEAD}-abcd1234", f"tmp-{DEAD}-ab_d1234.tmp")
    others = (
        "tmpdata", "tmp_results.csv", "tmp", "tmp-", "tmp-5-thesis", f"tmp-{DEAD}", f"tmp-{DEAD}-thesis.tex",
        f"tmp-{DEAD}-abcd1234.csv", "tmp-x-abcd1234", f"{unfinished_prefix()}abcd1234", "tmpabcd1234",
    )  # fmt: skip
    for name in (*ours, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_text("precious")
    young = tmp_path / f"tmp-{DEAD}-young123"
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 7200,) * 2)
    young.mkdir()
    remove_unfinished(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*others, young.name}


def test_a_link_is_removed_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    remove(tmp_path / "b")
    remove(tmp_path / "nothing")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "model"
    with whole(out) as part:
        part.write_text("old")
    with pytest.raises(ValueError, match="failed"), whole(out) as part:
        part.write_text("new")
        raise ValueError("failed")
    assert out.read_text() == "old" and list(out.parent.iterdir()) == [out]
