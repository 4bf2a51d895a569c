"""FlexGen's block schedule: its forecast beside a clock and a running store, its search, and what it decodes."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from command import save_tiny_model
from foretell.model.offload.block_store import BlockStore

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import measure_offload  # type: ignore[import-not-found]
from block_schedule import PassCost, pass_seconds, search  # type: ignore[import-not-found]

COST = PassCost((1, 8), (0.001, 0.002), (0.003, 0.003), 1e4, [10] * 6, 20, 5, 5)


class Part:
    nbytes = 1


@pytest.mark.parametrize("room", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4)), 3, 6])
def test_the_forecast_of_a_pass_is_what_a_store_takes(room: int) -> None:
    read, compute, outer, blocks = 0.03, 0.03, 0.005, 6

    def fetch(i: int) -> Part:
        time.sleep(read)
        return Part()

    store = BlockStore(blocks, fetch, lambda: None, room, 0, [1] * blocks)
    times = list[float]()
    for _ in range(4):
        begun = time.perf_counter()
        for i in range(blocks):
            store.get(i)
            time.sleep(compute)
        time.sleep(outer)
        times.append(time.perf_counter() - begun)
    places = 0 if room >= blocks else min(3, room)
    forecast = pass_seconds(blocks, store.resident_blocks, max(0, places - 1), read, compute, outer)
    # A busy machine sleeps longer than it was asked to, never shorter.
    assert forecast * 0.98 <= min(times[1:]) <= forecast * 1.4


def test_bounds_of_a_pass() -> None:
    for resident in range(9):
        read_bound, compute_bound = (pass_seconds(8, resident, 2, *cost, 0.0) for cost in ((1.0, 1e-6), (1e-6, 1.0)))
        assert read_bound == pytest.approx(8 - resident, abs=1e-4)
        assert compute_bound == pytest.approx(8, abs=1e-4)
    assert pass_seconds(8, 3, 0, 1.0, 1.0, 0.5) == pytest.approx(5 + 8 + 0.5), "nothing overlaps without a place"


def test_policies_fill_the_memory_and_read_the_rest() -> None:
    policies = search(COST, 95, 8)
    assert [p.rows for p in policies] == list(range(1, 9))
    for policy in policies:
        places = 3 if policy.resident_blocks < 6 else 0
        used = 20 + policy.cache_bytes + 10 * (policy.resident_blocks + min(places, 6 - policy.resident_blocks))
        assert used <= 95 and policy.read_bytes == 10 * (6 - policy.resident_blocks)
    # Three passes over four rows read less in all than three over three of ten rows.
    assert policies[3].tokens_per_second(10) > policies[2].tokens_per_second(10)
    assert policies[4].bytes_per_token(10) == policies[4].read_bytes * 2 / 10
    assert [p.rows for p in search(COST, 45, 8)] == [1, 2], "a block, what stays, and the keys and values of two rows"
    assert search(COST, 35, 8) == []


def test_a_faster_device_is_never_slower() -> None:
    slow, fast = (search(replace(COST, bandwidth=b), 60, 4) for b in (1e3, 1e5))
    assert all(a.seconds > b.seconds for a, b in zip(slow, fast, strict=True))


def test_a_limited_bandwidth_is_kept() -> None:
    store = BlockStore(3, lambda i: Part(), lambda: None, 1, 0, [1] * 3)
    store.bandwidth = 50.0
    begun = time.perf_counter()
    for i in range(3):
        store.get(i)
    assert time.perf_counter() - begun >= 0.06 and store.read_bytes == 3 and store.read_seconds >= 0.06


def test_every_schedule_decodes_the_same_and_reads_what_was_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=256, ffn=512, layers=12)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"number {i}: " + "xyz"[i % 3] * 9}) + "\n" for i in range(6)))
    given = ["--model", str(model), "--dtype", "float32", "--tasks", str(questions), "--per-category", "6"]
    measure_offload.main([*given, "--tokens", "4", "--memory", "18", "--json"])
    report = json.loads(capsys.readouterr().out)
    plain, block = report["runs"][0]["run"], report["cost"]["sizes"][0]
    assert [r["policy"]["rows"] for r in report["runs"]] == sorted({1, 2, 4, report["chosen_rows"]})
    for each in report["runs"]:
        policy, run = each["policy"], each["run"]
        assert run["tokens"] == plain["tokens"] and {len(t) for t in run["tokens"]} == {4}
        passes = 4 * -(-6 // policy["rows"])
        assert 0 < policy["resident_blocks"] < 12 and policy["read_bytes"] == block * (12 - policy["resident_blocks"])
        # The first pass fills what stays in memory; the last one reads ahead.
        first = block * policy["resident_blocks"]
        assert passes * policy["read_bytes"] <= run["read_bytes"] <= passes * policy["read_bytes"] + first + 2 * block
        assert 0 < run["cache_bytes"] <= policy["cache_bytes"]
    measure_offload.main([*given, "--tokens", "4", "--memory", "18"])
    assert "(chosen)" in capsys.readouterr().out


@pytest.mark.parametrize(("memory", "expected"), [("400", "not all of its blocks"), ("1", "small"), ("9", "for two")])
def test_a_limit_that_leaves_nothing_to_measure_is_one_sentence(memory: str, expected: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=256, ffn=512, layers=12)
    with pytest.raises(SystemExit, match=expected):
        measure_offload.main(["--model", str(model), "--dtype", "float32", "--memory", memory])
