"""Folders that are written to."""

from pathlib import Path

import pytest

from foretell.utils.paths import require_empty


def test_only_new_and_empty_folders_are_written_to_and_those_that_an_interrupted_run_began(tmp_path: Path) -> None:
    require_empty(tmp_path / "new")
    require_empty(tmp_path)
    (tmp_path / "data").mkdir()
    require_empty(tmp_path, besides="data")
    for besides in ("", "datum"):
        with pytest.raises(ValueError, match="there is something already"):
            require_empty(tmp_path, besides)
    (tmp_path / "README.md").write_text("mine")
    for path in (tmp_path, tmp_path / "README.md"):
        with pytest.raises(ValueError, match="name a directory that is new or empty with --out"):
            require_empty(path, "data")
