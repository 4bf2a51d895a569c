"""A run store keeps every finished record through an interruption."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from foretell.utils.store import RECORDS_FILE, RunStore, read_records, read_settings


class Settings(BaseModel):
    model: str
    max_new_tokens: int


class Record(BaseModel):
    question: str
    answer: str


SETTINGS = Settings(model="m", max_new_tokens=8)
FIRST, SECOND = Record(question="a", answer="x" * 60), Record(question="b", answer="y" * 60)


def fill(folder: Path) -> None:
    with RunStore(folder, SETTINGS, Record) as store:
        store.append(FIRST)
        store.append(SECOND)


def test_records_come_back_in_order(tmp_path: Path) -> None:
    fill(tmp_path)
    assert list(read_records(tmp_path, Record)) == [FIRST, SECOND]
    assert read_settings(tmp_path, Settings) == SETTINGS
    with RunStore(tmp_path, SETTINGS, Record) as store:
        assert store.records == [FIRST, SECOND]


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_cut_by_an_interruption_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    fill(tmp_path)
    path = tmp_path / RECORDS_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_records(tmp_path, Record)) == [FIRST]
    with RunStore(tmp_path, SETTINGS, Record) as store:
        store.append(SECOND)
    assert list(read_records(tmp_path, Record)) == [FIRST, SECOND]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / RECORDS_FILE
    path.write_text('{"question": 3}\n' + path.read_text())
    with pytest.raises(ValueError, match="line 1: a damaged record"):
        RunStore(tmp_path, SETTINGS, Record)


def test_two_runs_into_one_folder_are_refused(tmp_path: Path) -> None:
    with RunStore(tmp_path, SETTINGS, Record) as store:
        with pytest.raises(ValueError, match="another run is writing into this folder"):
            RunStore(tmp_path, SETTINGS, Record)
        store.append(FIRST)
    with RunStore(tmp_path, SETTINGS, Record) as again:
        assert again.records == [FIRST]


def test_a_folder_of_other_settings_is_refused_and_left_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(ValueError, match=r"another max_new_tokens \(8, now 9\)"):
        RunStore(tmp_path, SETTINGS.model_copy(update={"max_new_tokens": 9}), Record)
    assert list(read_records(tmp_path, Record)) == [FIRST, SECOND]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        read_settings(tmp_path, Settings)


def test_a_full_disk_leaves_a_folder_that_a_later_run_continues(tmp_path: Path) -> None:
    """The lock is free even where closing writes in vain, and settings are there whole or not at all."""
    store = RunStore(tmp_path, SETTINGS, Record)
    store.append(FIRST)
    store._file.close()
    store._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 (the store closes it)
    with pytest.raises(OSError, match="No space left"), store:
        store.append(SECOND)
    with RunStore(tmp_path, SETTINGS, Record) as again:
        assert again.records == [FIRST]
    other = tmp_path / "other"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_bytes", lambda path, data: Path("/dev/full").write_text(data.decode()))
        RunStore(other, SETTINGS, Record)
    fill(other)
