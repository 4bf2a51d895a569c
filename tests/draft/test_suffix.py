"""The suffix automaton and its retriever against plain searches."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.draft import SuffixRetriever
from foretell.draft.suffix import SuffixAutomaton
from helpers import context_of, random_tokens

words = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def longest_repeat(text: Sequence[int]) -> tuple[int, int]:
    """Length of the longest ending that occurs before, and where its first occurrence ends."""
    for size in range(len(text) - 1, 0, -1):
        for end in range(size, len(text)):
            if list(text[end - size : end]) == list(text[-size:]):
                return size, end
    return 0, 0


def occurs(part: Sequence[int], text: Sequence[int]) -> bool:
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


@given(words)
@settings(max_examples=60, deadline=None)
def test_the_automaton_is_small_and_knows_exactly_the_substrings(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    assert len(automaton.transitions) <= max(2, 2 * len(text))
    for part in [text[i:j] for i in range(len(text)) for j in range(i + 1, min(i + 4, len(text) + 1))] + [
        [0, 1, 0, 1],
        [2, 2],
    ]:
        state, size = 0, 0
        for token in part:
            state, size = automaton.advance(state, size, token)
        assert (size == len(part)) == occurs(part, text)
        if size == len(part):
            assert automaton.tokens[automaton.first_end[state] + 1 - size : automaton.first_end[state] + 1] == part


@given(words)
@settings(max_examples=100, deadline=None)
def test_the_match_while_growing_is_the_longest_ending_seen_before(text: list[int]) -> None:
    automaton, state, size = SuffixAutomaton(), 0, 0
    for end, token in enumerate(text, 1):
        state, size = automaton.advance(state, size, token)
        automaton.extend(token)
        assert size == longest_repeat(text[:end])[0]


@given(words, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_what_followed_the_longest_match_is_proposed(text: list[int], step: int) -> None:
    suffix = SuffixRetriever()
    for end in range(1, len(text) + 1, step):
        found = suffix.retrieve(context_of(text[:end]), 5)[0]
        size, after = longest_repeat(text[:end])
        assert (found[0].tokens if found else ()) == (tuple(text[after : min(after + 5, end)]) if size else ())


def test_references_are_searched_and_copies_end_with_their_document() -> None:
    suffix = SuffixRetriever([(1, 2, 3, 4), (5, 6, 7)], bias=0)
    assert suffix.retrieve(context_of([9, 1, 2]), 8)[0][0].tokens == (3, 4)
    assert suffix.retrieve(context_of([9, 1, 2, 8, 3, 4]), 8)[0] == []
    suffix.release(0)
    assert suffix.retrieve(context_of([6]), 1)[0][0].tokens == (7,)


def test_a_released_row_forgets_its_sequence() -> None:
    suffix = SuffixRetriever()
    assert suffix.retrieve(context_of([1, 2, 1]), 4)[0]
    suffix.release(0)
    assert suffix.retrieve(context_of([1, 3]), 4)[0] == []


def test_time_does_not_depend_on_the_length_of_the_match() -> None:
    automaton = SuffixAutomaton(random_tokens(4000, 5))
    assert len(automaton.transitions) <= 8000


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SuffixRetriever(copy=0)
