"""Trees that follow the rules of their requests."""

from dataclasses import replace

import numpy as np
import pytest

from foretell.core.context import Context
from foretell.core.sampling import SamplingParams
from foretell.core.token_rules import TokenRules
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.shape.constrained import fit_to_rules
from helpers import Choice, Phrases, context_of


def constrained(max_depth: int = 20, **sampling: object) -> Context:
    """A request without an answer yet, whose constraint allows 3, 5, 8, 13 or 21, then 7, 12 and an even token."""
    rules = TokenRules(SamplingParams(**sampling), (), Phrases())  # type: ignore[arg-type]
    return replace(context_of([1, 2], max_depth=max_depth), rules=(rules,))


def fitted(tree: TokenTree, context: Context, sampled: bool = True, added: bool = True) -> set[tuple[int, ...]]:
    """The paths of the tree that is left."""
    out = fit_to_rules(tree, context, sampled, added)
    nodes = np.flatnonzero(out.valid[0]).tolist()[1:]
    return {tuple(int(out.token[0, n]) for n in out.ancestors(0, node)[1:]) for node in nodes}


DRAFTS = tree_from_lists([[2, 5, 4, 7, 1, 8, 0]], [[-1, 0, 0, 1, 2, 0, 3]])


def test_forbidden_drafts_and_all_below_them_are_left_out() -> None:
    assert fitted(DRAFTS, constrained(), added=False) == {(5,), (5, 7), (8,)}
    assert fitted(DRAFTS, constrained(bad_words=((5,), (8, 7))), added=False) == {(8,)}
    assert fitted(DRAFTS, replace(constrained(), rules=(None,))) >= {(4, 1), (5, 7, 0)}


def test_forced_tokens_follow_the_leaves_that_are_left() -> None:
    kept = {(5,), (5, 7), (8,)}
    two_ways = {(8, 7), (8, 7, 12), (8, 7, 12, 2), (8, 7, 12, 4), (8, 7, 12, 4, 8)}
    assert fitted(DRAFTS, constrained()) == kept | {(5, 7, 12), (5, 7, 12, 2)} | two_ways
    assert fitted(DRAFTS, constrained(max_depth=2)) == kept | {(8, 7)}
    assert fitted(DRAFTS, constrained(bad_words=((7, 12),))) == kept | {(8, 7)}


def test_forbidden_drafts_that_were_sampled_stay_where_the_acceptor_needs_them() -> None:
    sampled = replace(DRAFTS, q_index=np.where(DRAFTS.token == 4, 0, -1))
    assert fitted(sampled, constrained(), sampled=False, added=False) == {(5,), (5, 7), (8,), (4,)}


@pytest.mark.parametrize("score", [None, np.array([[1.0, 0.5, 0.4, 0.3, 0.2, 0.2, 0.1]])])
def test_new_nodes_come_after_the_others_with_the_scores_of_their_parents(score: np.ndarray | None) -> None:
    out = fit_to_rules(replace(DRAFTS, score=score), constrained(), True, True)
    assert out.token[0, :7].tolist() == DRAFTS.token[0].tolist() and out.nodes == 14
    assert (out.parent[0] < np.arange(out.nodes)).all()
    assert score is None or (out.score is not None and out.score[0, 7:].tolist() == [0.3] * 2 + [0.2] * 5)


def test_nothing_lies_below_the_end_of_an_answer() -> None:
    """Neither drafts that were chosen or sampled nor forced ones; the end itself stays."""
    for sampled in (-1, 0):
        tree = replace(DRAFTS, q_index=np.full_like(DRAFTS.token, sampled))
        for eos, texts in (((8,), [(5, 7, 12), (8, 7, 0)]), ((99,), [(5, 7), (8,)])):
            rules = TokenRules(SamplingParams(), eos, Choice(texts, eos))
            context = replace(context_of([1, 2], max_depth=20), rules=(rules,))
            kept = fitted(tree, context, sampled=False, added=False)
            assert (8,) in kept and not any(path[:1] == (8,) and len(path) > 1 for path in kept)
            assert (5, 7) in kept and ((5, 7, 12) in fitted(tree, context)) is (eos == (8,))
            assert not any(path[:1] == (8,) and len(path) > 1 for path in fitted(tree, context))


def test_what_may_follow_stops_at_the_end_of_an_answer() -> None:
    nothing = np.zeros(0, np.int64)
    rules = TokenRules(SamplingParams(), (9,), Choice([(5, 7), (5, 7, 1)], (9,)))
    assert rules.allowed_prefix(nothing, (), (5, 7, 9, 9)) == [5, 7, 9]
    assert rules.allowed_prefix(nothing, (5,), (7, 1, 9)) == [7, 1]
    assert rules.allowed_prefix(nothing, (5, 7, 1), (9,)) == [] == rules.allowed_prefix(nothing, (5, 9), (7,))
    assert rules.ends(nothing, (5, 7, 9)) and rules.ends(nothing, (5, 7, 1))
    assert not rules.ends(nothing, (5, 7)) and not rules.ends(nothing, ())
