"""Batch schedule: an epoch shows all tokens to learn once, and a step always has the same batches."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from foretell.train.data.batch_schedule import (
    BatchingConfig,
    BatchSchedule,
    ChunkTable,
    split_document,
    split_documents,
)
from foretell.train.data.dataset import Document

Texts = list[Document]


def texts(count: int, seed: int = 0, longest: int = 90) -> Texts:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, count)
    return [Document(np.arange(n, dtype=np.int32), int(rng.integers(0, n))) for n in lengths]


def rows_of(*sets: Texts, sequence: int = 32) -> ChunkTable:
    return split_documents(sets, [range(len(s)) for s in sets], sequence)


def schedule_of(
    rows: ChunkTable, seed: int = 0, accumulate: int = 1, weight: tuple[float, ...] = (1.0,)
) -> BatchSchedule:
    return BatchSchedule(rows, BatchingConfig(seed, 128, accumulate, weight))


def flat(schedule: BatchSchedule, step: int) -> list[list[int]]:
    return [batch.tolist() for batch in schedule.batches(step)]


@pytest.mark.parametrize("length, start", [(10, 0), (32, 31), (33, 1), (100, 0), (100, 50), (100, 95), (4000, 3000)])
def test_pieces_hold_all_that_is_to_be_learned_and_fit(length: int, start: int) -> None:
    found = split_document(length, start, 32)
    assert all(0 < e - b <= 32 for b, e in found)
    assert found[0][0] <= start and all(a[1] == b[0] for a, b in pairwise(found))
    # Fewer than eight tokens at the end are not worth a piece.
    assert length - found[-1][1] < 8


def test_only_what_is_to_be_learned_is_counted() -> None:
    rows = split_documents(
        [[Document(np.arange(20, dtype=np.int32), 12), Document(np.arange(5, dtype=np.int32), 5)]], [[0, 1]], 32
    )
    assert rows.num_learned_tokens.tolist() == [8]
    assert rows_of([Document(np.arange(20, dtype=np.int32), 0)]).num_learned_tokens.tolist() == [19]


def test_an_epoch_shows_every_piece_once_in_batches_that_fit() -> None:
    rows = rows_of(texts(200))
    schedule = schedule_of(rows)
    steps = schedule.num_steps(1)
    batches = [b for i in range(steps) for b in schedule.batches(i)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(rows)))
    assert all(len(b) * rows.length[b].max() <= 128 for b in batches)
    # Most of a batch is no padding.
    assert rows.length.sum() / sum(len(b) * rows.length[b].max() for b in batches) > 0.9


def test_a_step_is_the_same_in_whatever_order_steps_are_asked_for() -> None:
    rows = rows_of(texts(60))
    forward = schedule_of(rows, accumulate=3)
    steps = forward.num_steps(2.5)
    seen = [flat(forward, i) for i in range(steps)]
    again = schedule_of(rows, accumulate=3)
    assert [flat(again, i) for i in reversed(range(steps))] == seen[::-1]
    assert all(1 <= len(s) <= 3 for s in seen)
    assert seen != [flat(schedule_of(rows, seed=1, accumulate=3), i) for i in range(steps)]


def test_epochs_differ_and_end_where_they_say() -> None:
    schedule = schedule_of(rows_of(texts(60)))
    one, two = schedule.num_steps(1), schedule.num_steps(2)
    assert one < two and one < schedule.num_steps(1.5) < two
    first = Counter(r for i in range(one) for b in flat(schedule, i) for r in b)
    second = Counter(r for i in range(one, two) for b in flat(schedule, i) for r in b)
    assert first == second and flat(schedule, 0) != flat(schedule, one)


def test_weights_say_how_often_a_set_is_shown() -> None:
    rows = rows_of(texts(400, longest=30), texts(400, seed=1, longest=30))
    schedule = schedule_of(rows, weight=(2.0, 0.25))
    shown = np.concatenate([b for i in range(schedule.num_steps(1)) for b in schedule.batches(i)])
    counts = np.bincount(rows.dataset[shown])
    of_first = int((rows.dataset == 0).sum())
    assert counts[0] == 2 * of_first
    assert 0.15 < counts[1] / (len(rows) - of_first) < 0.35
