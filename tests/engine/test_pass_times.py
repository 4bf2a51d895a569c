"""Times of passes: robust to other programs, kept between starts, and read from damaged files without harm."""

import json
from pathlib import Path

import numpy as np
import pytest

from foretell.engine.pass_times import PassTimes, load_key

ONE, SIXTEEN = load_key(1, 100), load_key(16, 100)


def true(tokens: int, context: int = 100) -> float:
    return 0.01 * (1 + 0.2 * (tokens - 1)) * (1 + context / 10_000)


def learned(times: PassTimes, noise: float = 0.0, steps: int = 400) -> PassTimes:
    random = np.random.default_rng(0)
    for i in range(steps):
        tokens, slow = (1, 4, 8, 12)[i % 4], 2.0 if random.random() < noise else 1.0
        times.observe_pass(ONE, 1, tokens, true(tokens) * slow * float(random.lognormal(0, 0.03)))
        times.observe_draft("eagle", 1, 0.002 * slow, 0.001)
    return times


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_times_of_sizes_are_learned_beside_other_programs_too(noise: float) -> None:
    times = learned(PassTimes(), noise)
    found = np.array(times.seconds(ONE, 1))
    for tokens in (4, 8, 12):
        assert found[tokens - 1] / found[0] == pytest.approx(true(tokens) / true(1), rel=0.12)
    assert times.draft_seconds("eagle", 1, found[0]) / found[0] == pytest.approx(0.2, rel=0.12)
    assert (np.diff(found) >= 0).all()


def test_a_slower_machine_changes_no_quotient() -> None:
    times = learned(PassTimes())
    before = np.array(times.seconds(ONE, 1))[[0, 7]]
    for _ in range(100):
        times.observe_pass(ONE, 1, 8, 3 * true(8))
    after = np.array(times.seconds(ONE, 1))[[0, 7]]
    assert times.speed == pytest.approx(3.0, rel=0.1)
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.1)


@pytest.mark.parametrize("seen", [1, 8], ids=["plain", "drafted"])
@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_wanders_changes_no_quotient_though_only_one_size_is_seen(seen: int, seed: int) -> None:
    """By up to 14 % in some hundred steps, less than another program would make it slower; it ends at its slowest."""
    random = np.random.default_rng(seed)
    times = learned(PassTimes())
    before = np.array(times.seconds(ONE, 1))
    for i in range(472):
        slow = (1 + 0.14 * np.sin(i / 60)) * random.lognormal(0, 0.03)
        times.observe_pass(ONE, 1, seen, float(true(seen) * slow))
    after = np.array(times.seconds(ONE, 1))
    assert after[7] / after[0] == pytest.approx(before[7] / before[0], rel=0.06)


@pytest.mark.parametrize("factor", [0.8, 1.25], ids=["faster", "slower"])
def test_plain_passes_that_become_faster_alone_are_noticed_beside_drafted_ones(factor: float) -> None:
    """As where another program stops reading memory: larger passes are bound by arithmetic. Plain ones are rare."""
    random, times = np.random.default_rng(0), learned(PassTimes())
    before = np.array(times.seconds(ONE, 1))
    for i in range(3000):
        tokens = 1 if i % 256 < 2 else (6, 8, 9)[i % 3]
        slow = (factor if tokens == 1 else 1.0) * float(random.lognormal(0, 0.03))
        times.observe_pass(ONE, 1, tokens, true(tokens) * slow)
    after = np.array(times.seconds(ONE, 1))
    assert after[7] / after[0] == pytest.approx(before[7] / before[0] / factor, rel=0.08)


def test_the_times_of_a_steady_machine_stay_what_they_are() -> None:
    random = np.random.default_rng(0)
    times = learned(PassTimes())
    before = times.seconds(ONE, 1)[0]
    for _ in range(20_000):
        times.observe_pass(ONE, 1, 1, float(true(1) * random.lognormal(0, 0.1)))
    assert times.seconds(ONE, 1)[0] == pytest.approx(before, rel=0.2)


def test_a_new_load_begins_with_the_nearest_one_and_contexts_are_kept_apart() -> None:
    times, long = learned(PassTimes()), load_key(1, 20_000)
    assert times.seconds(SIXTEEN, 16)[0] == pytest.approx(true(16), rel=0.3)
    for _ in range(30):
        times.observe_pass(long, 1, 1, true(1, 20_000))
        times.observe_pass(long, 1, 8, 5 * true(8, 20_000))
    short, deep = (np.array(times.seconds(key, 1)) for key in (ONE, long))
    assert short[7] / short[0] == pytest.approx(true(8) / true(1), rel=0.1)
    assert deep[7] / deep[0] == pytest.approx(5 * true(8) / true(1), rel=0.2)


def test_a_plain_pass_is_measured_where_none_was_for_long() -> None:
    times = PassTimes()
    assert not times.needs_plain(ONE)
    for _ in range(8):
        times.observe_pass(ONE, 1, 5, 0.02)
    assert times.needs_plain(ONE)
    for _ in range(4):
        times.observe_pass(ONE, 1, 1, 0.01)
    for _ in range(255):
        assert not times.needs_plain(ONE)
        times.observe_pass(ONE, 1, 5, 0.02)
    times.observe_pass(ONE, 1, 5, 0.02)
    assert times.needs_plain(ONE)
    fixed = PassTimes({1: 1.0, 2: 2.0})
    fixed.observe_pass(ONE, 1, 5, 0.02)
    assert not fixed.needs_plain(ONE) and fixed.seconds(ONE, 1)[:3] == [1.0, 2.0, 3.0]


def test_plain_passes_are_measured_until_they_count_for_more_than_what_was_expected() -> None:
    """Of the first load nothing is: as many are measured. Of another one it is guessed from the nearest."""
    times, plain = PassTimes(), list[int]()
    for key, requests in ((ONE, 1), (SIXTEEN, 16)):
        for _ in range(8):
            times.observe_pass(key, requests, requests + 8, true(9))
        plain.append(0)
        while times.needs_plain(key):
            times.observe_pass(key, requests, requests, true(1))
            plain[-1] += 1
        seconds = times.seconds(ONE, 1)
        assert seconds[8] / seconds[0] == pytest.approx(true(9) / true(1), rel=0.01)
    assert plain == [4, 2]


@pytest.mark.parametrize("after", [0, 1])
def test_a_pause_of_the_process_counts_for_little(after: int) -> None:
    """Whatever the pass, the first one of all or of its size, and whatever is read from the times."""
    times = PassTimes()
    for tokens in [1] * after + [4, 1, 4, 1, 4, 1, 1]:
        paused = tokens == 4 and times.passes < 2
        times.observe_pass(ONE, 1, tokens, true(tokens) + 100 * paused)
    seconds = times.seconds(ONE, 1)
    assert seconds[3] / seconds[0] < 1.3 * true(4) / true(1)


def test_passes_over_drafts_are_measured_where_none_was_for_long() -> None:
    times = PassTimes()
    for _ in range(256):
        assert not times.needs_drafted(ONE)
        times.observe_pass(ONE, 1, 1, 0.01)
    assert times.needs_drafted(ONE)
    times.observe_pass(ONE, 1, 2, 0.01)
    assert not times.needs_drafted(ONE)


def test_the_next_start_is_told_nothing_of_what_was_measured_a_few_times(tmp_path: Path) -> None:
    """A process beside others has measured three drafts, all of them disturbed."""
    file = tmp_path / "times.json"
    times = PassTimes(file=file)
    for i in range(64):
        times.observe_pass(ONE, 1, 1, true(1))
        if i % 24 == 20:
            times.observe_pass(ONE, 1, 4, 3 * true(4))
            times.observe_draft("eagle", 1, 0.5, 0.001)
    times.close()
    again, fresh = PassTimes(file=file), PassTimes().seconds(ONE, 1)
    seconds = again.seconds(ONE, 1)
    assert seconds[0] == pytest.approx(true(1)) and seconds[3] / seconds[0] == pytest.approx(fresh[3] / fresh[0])
    assert again.draft_seconds("eagle", 1, 0.001) == 0.001


def test_the_next_start_knows_what_this_one_has_learned(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "times.json"
    times = learned(PassTimes(file=file, identity="a model"), steps=256)
    assert file.exists() and [p.name for p in file.parent.iterdir()] == ["times.json"]
    times.save()
    again = PassTimes(file=file, identity="a model")
    assert again.seconds(ONE, 1) == pytest.approx(times.seconds(ONE, 1), rel=0.05)
    assert again.draft_seconds("eagle", 1, 1.0) == times.draft_seconds("eagle", 1, 1.0)
    assert not again.needs_plain(ONE)
    fresh = PassTimes().seconds(ONE, 1)
    assert PassTimes(file=file, identity="another one").seconds(ONE, 1) == fresh


def test_what_a_short_process_learned_is_kept_when_it_ends(tmp_path: Path) -> None:
    file, fresh = tmp_path / "times.json", PassTimes().seconds(ONE, 1)
    learned(PassTimes(file=file), steps=8).close()
    assert not file.exists()
    learned(PassTimes(file=file), steps=80).close()
    found = PassTimes(file=file).seconds(ONE, 1)
    assert found[7] / found[0] == pytest.approx(true(8) / true(1), rel=0.1) != fresh[7] / fresh[0]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', "window", "keys"])
def test_a_damaged_file_is_ignored_and_written_anew(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    learned(PassTimes(file=file, identity="m"), steps=256)
    known = json.loads(file.read_text("utf-8"))
    if damage == "window":
        known["curves"][0][2]["0"] = ["a"]
        damage = json.dumps(known)
    elif damage == "keys":
        known["curves"] = {"0": 1}
        damage = json.dumps(known)
    file.write_text(damage, "utf-8")
    again = PassTimes(file=file, identity="m")
    assert again.seconds(ONE, 1) == PassTimes().seconds(ONE, 1)
    learned(again, steps=256)
    assert PassTimes(file=file, identity="m").seconds(ONE, 1) != PassTimes().seconds(ONE, 1)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    learned(PassTimes(file=tmp_path / "file" / "times.json"), steps=256)


@pytest.mark.parametrize("table", [{}, {0: 1.0}, {1: 0.0}, {1: -1.0}])
def test_tables_without_positive_seconds_are_refused(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="cost table"):
        PassTimes(table)
    with pytest.raises(ValueError, match="cost table"):
        PassTimes(expected=table)


def test_large_passes_cost_in_proportion() -> None:
    times = PassTimes({1: 1.0, 512: 2.0})
    assert times.seconds(load_key(1000, 0), 1000)[24] == pytest.approx(4.0, rel=0.01)
