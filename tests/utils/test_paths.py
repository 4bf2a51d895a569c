"""Folders that are written to."""

from pathlib import Path

import pytest

from command import expect_error
from foretell.utils.paths import require_empty, require_file_place, require_folder_place


def test_only_new_and_empty_folders_are_written_to_and_those_that_an_interrupted_run_began(tmp_path: Path) -> None:
    require_empty(tmp_path / "new")
    require_empty(tmp_path)
    (tmp_path / "data").mkdir()
    require_empty(tmp_path, "data", "checkpoint")
    for besides in ("", "datum"):
        with pytest.raises(ValueError, match="there is something already"):
            require_empty(tmp_path, besides)
    (tmp_path / "README.md").write_text("mine")
    for path in (tmp_path, tmp_path / "README.md"):
        with pytest.raises(ValueError, match="name a directory that is new or empty with --out"):
            require_empty(path, "data")


def test_places_of_files_and_folders_are_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "new", tmp_path / "file"):
        require_file_place(out)
    for out in (tmp_path, tmp_path / "new" / "deep"):
        require_folder_place(out)
    for out, said in ((tmp_path, "a directory is where a file"), (tmp_path / "none" / "x", "there is no directory")):
        with pytest.raises(ValueError, match=said):
            require_file_place(out)
    for out in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(ValueError, match="file: a file is where a folder"):
            require_folder_place(out)


@pytest.mark.parametrize(
    "command",
    [
        ("nat", "data", "--out", "none/x.tsv"),
        ("demo", "--picture", "none/x.png"),
        ("bench", "step", "--json", "none/x.json"),
        ("bench", "soak", "http://127.0.0.1:9", "--output", "none/x.md"),
        ("bench", "serve", "a=http://127.0.0.1:9", "--identity", "--save", "none/x.json"),
        ("tune", "skip", "--prompts", "none.txt", "--out", "none/x.json"),
    ],
    ids=" ".join,
)
def test_commands_check_the_place_of_their_output_first(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no directory none to write x." in expect_error(*command)
