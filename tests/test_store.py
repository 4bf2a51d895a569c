"""What an interruption leaves is whole, and goes on."""

from pathlib import Path

import pytest
from bench_helpers import make_answer, make_result

from foretell.bench.schema import BenchSettings, QuestionResult
from foretell.utils.store import RECORDS_FILE, RunStore, read_records, read_settings

SETTINGS = BenchSettings(
    model="m", tasks="t", digest="d", max_new_tokens=8, temperature=0, seed=0, threads=1, dtypes=("float32",)
)
FIRST = make_result("a", "x/float32", (make_answer(3, 3, (0.1, 0.2, 0.3), (1, 1, 1)),))
SECOND = FIRST.model_copy(update={"question": "b"})


def fill(folder: Path) -> None:
    with RunStore(folder, SETTINGS, QuestionResult) as store:
        store.append(FIRST)
        store.append(SECOND)


def test_records_come_back_in_order(tmp_path: Path) -> None:
    fill(tmp_path)
    assert list(read_records(tmp_path, QuestionResult)) == [FIRST, SECOND]
    assert read_settings(tmp_path, BenchSettings) == SETTINGS
    with RunStore(tmp_path, SETTINGS, QuestionResult) as store:
        assert store.records == [FIRST, SECOND]


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_cut_by_an_interruption_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    fill(tmp_path)
    path = tmp_path / RECORDS_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_records(tmp_path, QuestionResult)) == [FIRST]
    with RunStore(tmp_path, SETTINGS, QuestionResult) as store:
        store.append(SECOND)
    assert list(read_records(tmp_path, QuestionResult)) == [FIRST, SECOND]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / RECORDS_FILE
    path.write_text('{"question": 3}\n' + path.read_text())
    with pytest.raises(ValueError, match="line 1: a damaged record"):
        RunStore(tmp_path, SETTINGS, QuestionResult)


def test_two_runs_into_one_folder_are_refused(tmp_path: Path) -> None:
    with RunStore(tmp_path, SETTINGS, QuestionResult) as store:
        with pytest.raises(ValueError, match="another run is writing into this folder"):
            RunStore(tmp_path, SETTINGS, QuestionResult)
        store.append(FIRST)
    with RunStore(tmp_path, SETTINGS, QuestionResult) as again:
        assert again.records == [FIRST]


def test_a_folder_of_other_settings_is_refused_and_left_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(ValueError, match=r"another max_new_tokens \(8, now 9\)"):
        RunStore(tmp_path, SETTINGS.model_copy(update={"max_new_tokens": 9}), QuestionResult)
    assert list(read_records(tmp_path, QuestionResult)) == [FIRST, SECOND]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        read_settings(tmp_path, BenchSettings)
