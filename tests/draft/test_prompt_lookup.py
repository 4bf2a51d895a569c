"""Prompt lookup against a search at every position."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.draft import PromptLookup
from helpers import context_of

words = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def brute_force(
    text: Sequence[int],
    own: int,
    references: Sequence[Sequence[int]],
    longest: int,
    shortest: int,
    most: int,
    first: bool,
) -> tuple[int, tuple[int, ...]]:
    """Longest match first; the text before the references; the latest or the first place; something must follow it."""
    documents = ([list(text[:own])] if own else []) + [list(r) for r in references if r]
    for size in range(min(longest, len(text)), shortest - 1, -1):
        for document in documents:
            ends = [e for e in range(size, len(document)) if document[e - size : e] == list(text[-size:])]
            if ends:
                end = ends[0 if first else -1]
                return size, tuple(document[end : end + most])
    return 0, ()


@given(
    words,
    st.lists(words, max_size=2),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_lookup_finds_what_brute_force_finds(
    text: list[int], references: list[list[int]], longest: int, shortest: int, most: int, first: bool, whole: bool
) -> None:
    shortest = min(shortest, longest)
    lookup = PromptLookup(longest, shortest, 10, references, choice="first" if first else "latest")
    own = len(text) if whole else len(text) // 2
    expected = brute_force(text, own, references, longest, shortest, most, first)
    assert lookup.find(np.array(text), own, most) == (expected if most else (0, ()))


def test_the_suffix_never_matches_itself() -> None:
    assert PromptLookup().find(np.array([1, 2, 3]), 3, 9) == (0, ())
    assert PromptLookup().find(np.array([7]), 1, 9) == (0, ())
    assert PromptLookup().find(np.array([7, 7]), 2, 9) == (1, (7,))


@pytest.mark.parametrize(("scope", "found"), [("references", (9,)), ("prompt", (6,)), ("text", (7,))])
def test_the_scope_limits_the_search(scope: str, found: tuple[int, ...]) -> None:
    lookup = PromptLookup(1, 1, 1, [[5, 9]], scope=scope)  # type: ignore[arg-type]
    assert lookup.retrieve(context_of([5, 6, 5, 7, 5], prompt=2), 4)[0][0].tokens == found


def test_copies_keep_within_budget_and_room() -> None:
    lookup = PromptLookup(copy=5)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert lookup.retrieve(context_of(text), 9)[0][0].tokens == (2, 3, 4, 5, 6)
    assert lookup.retrieve(context_of(text), 3)[0][0].tokens == (2, 3, 4)
    assert lookup.retrieve(context_of(text, max_depth=2), 9)[0][0].tokens == (2, 3)
    assert lookup.retrieve(context_of(text, max_depth=0), 9)[0] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"longest": 2, "shortest": 3}, "shortest <= longest"),
        ({"copy": 0}, "at least one token"),
        ({"scope": "references"}, "reference document"),
    ],
)
def test_nonsense_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PromptLookup(**values)  # type: ignore[arg-type]
