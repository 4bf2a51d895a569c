"""Answers that repeat themselves end at the same token with drafts and without."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foretell.accept import Match
from foretell.core.sampling import SamplingParams
from foretell.draft import PromptLookup
from foretell.engine.method import AnyMethod, Method
from foretell.engine.repetition import RepetitionDetection, RepetitionWatch
from foretell.engine.request import Request
from foretell.shape import Trie
from helpers import engine_for, letters, naive, random_tokens, run, statistics_of, target, tokens_of

METHOD: AnyMethod = Method(PromptLookup(choice="first"), Trie(9), Match())


def repeats(tokens: Sequence[int], detection: RepetitionDetection) -> bool:
    """The definition: the tail is `min_count` times one pattern."""
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        whole = size * detection.min_count
        if whole <= len(tokens) and list(tokens[-whole:]) == list(tokens[-size:]) * detection.min_count:
            return True
    return False


@pytest.mark.parametrize("sizes", [(1, 0, 2), (3, 0, 2), (4, 2, 3), (7, 3, 2), (50, 1, 4), (0, 0, 0)])
@pytest.mark.parametrize("step", [1, 3])
def test_the_watch_finds_the_first_repetition(sizes: tuple[int, int, int], step: int) -> None:
    detection = RepetitionDetection(*sizes)
    for seed in range(40):
        tokens = np.random.default_rng(seed).integers(0, 2, 60).tolist()
        ends = [n for n in range(1, 61) if n >= 5 and repeats(tokens[:n], detection)]
        watch, count = RepetitionWatch(detection, min_tokens=5, max_tokens=60), 0
        while count < 60 and not watch.has_repeated:
            count += watch.until_repetition(tokens[count : count + step])
        assert (count, watch.has_repeated) == ((ends[0], True) if ends else (60, False))


@pytest.mark.parametrize("drafts", [0, 9])
def test_a_repetition_inside_accepted_drafts_cuts_the_answer(drafts: int) -> None:
    bias = SamplingParams(logit_bias={3: 90.0})
    request = Request([*random_tokens(5, seed=2), *[3] * 9], bias, max_new_tokens=24, max_drafts=drafts)
    truth = naive(target(), request)
    assert truth == [3] * 24
    updates = run(engine_for(METHOD), [replace(request, repetition_detection=RepetitionDetection(2, 2, 3))])[0]
    assert tokens_of(updates) == truth[:6] and "".join(u.text for u in updates) == letters(truth[:6])
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("repetition", "repetition_detected")
    assert statistics_of(updates).target_passes == (1 if drafts else 6)
    ended = run(engine_for(METHOD), [replace(request, eos=(3,), repetition_detection=RepetitionDetection(1, 1, 2))])[0]
    assert len(tokens_of(ended)) == 1 and ended[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((-1, 0, 2), "max_pattern_size"), ((2, 3, 2), "min_pattern_size"), ((2, 1, 1), "min_count"), ((2.5, 1, 2), "2.5")],
)
def test_what_cannot_be_looked_for_is_refused(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RepetitionDetection(*sizes)
