"""Lookahead: the window equals a naive Jacobi iteration, the pool evicts the oldest, and no answer changes."""

from collections.abc import Collection, Sequence
from functools import cache
from itertools import count

import pytest

from foretell.accept import Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.core.tree import root_tree
from foretell.draft import CombinedRetriever, JacobiDrafter, LookaheadDrafter, SuffixRetriever
from foretell.draft.lookahead import LookaheadWindow, NgramPool
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Trie
from foretell.testing import TINY
from helpers import all_logits, engine_for, generate, naive, random_tokens, run, target

REQUESTS = [
    Request(
        random_tokens(n, seed=n), SamplingParams(temperature=t, seed=n, repetition_penalty=1.1), 16 + n // 2, eos=(3,)
    )
    for n, t in ((3, 0.0), (17, 1.0), (1, 0.7))
]
TEXTS = cache(lambda: [naive(target(), r) for r in REQUESTS])
VARIANTS = {
    "wide": LookaheadDrafter(15, 5, 15),
    "followed": LookaheadDrafter(5, 4, 5, from_text=False, follow=True, eos=(3,)),
    "pairs": LookaheadDrafter(4, 2, 3, from_text=False),
    "one column": LookaheadDrafter(1, 4, 3),
    "one cell": LookaheadDrafter(1, 2, 1),
    "no candidates": LookaheadDrafter(3, 3, 0),
}


def full_window(width: int, height: int) -> LookaheadWindow:
    numbers = count()
    window = LookaheadWindow(width, height, lambda: next(numbers))
    while len(window.rows) < height:
        window.advance([next(numbers) for _ in window.rows[-1]])
    return window


@pytest.mark.parametrize(("width", "height"), [(7, 4), (3, 3), (1, 3), (4, 1)])
def test_cells_see_row_0_up_to_their_column_and_their_own_column(width: int, height: int) -> None:
    window = full_window(width, height)
    assert [len(r) for r in window.rows] == [width] * height
    drafts = root_tree([50]).with_probes([[60, 61]], [[0, 1]])
    tokens, parents, last = window.cells(50, drafts.nodes, 100)
    tree = drafts.with_probes([tokens], [parents])
    assert len(tokens) == width * height - 1
    cells = [(r, i) for r in range(height) for i in range(width)][1:]
    for node, (r, i) in enumerate(cells, drafts.nodes):
        seen = [int(tree.token[0, a]) for a in tree.ancestors(0, node)]
        assert seen == [*window.rows[0][: i + 1], *(window.rows[above][i] for above in range(1, r + 1))]
        assert len(seen) == i + 1 + r and tree.depth[0, node] == i + r
    assert [int(tree.token[0, n]) for n in last] == window.rows[-1]
    assert tree.probe[0, drafts.nodes :].all() and not tree.valid[0, drafts.nodes :].any()


def test_cells_stay_within_the_room() -> None:
    tokens, parents, last = full_window(4, 3).cells(0, 1, 3)
    tree = root_tree([0]).with_probes([tokens], [parents])
    assert tree.depth.max() == 3 and len(last) == 2
    assert full_window(4, 3).cells(0, 1, 0)[::2] == ([], [])


@pytest.mark.parametrize("moves", [[1] * 9, [1, 1, 3, 1, 2, 1, 1, 1, 1, 1], [4, 1, 2, 5, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize(("width", "height"), [(6, 4), (3, 1), (1, 3)])
def test_a_followed_window_keeps_every_guess_at_its_place(width: int, height: int, moves: list[int]) -> None:
    """If the target says the position of every token, whatever is no fresh guess (-1) must be its own position."""
    window, at, ngrams = LookaheadWindow(width, height, lambda: -1), 100, list[tuple[int, ...]]()
    for moved in moves:
        window.cells(at, 1, 100)
        predicted = [at + i + len(window.rows) for i in range(len(window.rows[-1]))]
        ngrams += window.advance(predicted, moved)
        at += moved
        for r, row in enumerate(window.rows):
            assert all(t in (-1, at + i + r) for i, t in enumerate(row[1:], 1))
        assert len(window.rows[-1]) == width + height - len(window.rows)
    whole = [n for n in ngrams if -1 not in n]
    assert whole and all(n == tuple(range(n[0], n[0] + height + 1)) for n in whole)


def test_the_published_window_moves_by_one_and_bans_the_end_of_sequence() -> None:
    window = full_window(3, 2)
    above, below = window.rows
    assert window.advance([70, 80, 90], banned={80}) == [(above[i], below[i], 70 + 10 * i) for i in range(3)]
    assert window.rows[0] == below and window.rows[1][::2] == [70, 90] and window.rows[1][1] != 80


def test_only_the_last_rows_are_scored() -> None:
    rows = list[tuple[int, int, int]]()

    class Counting(DecoderRunner):
        def forward(self, *args, **options):  # type: ignore[no-untyped-def]
            output, tree = super().forward(*args, **options), args[1]
            rows.append(
                (
                    len(output.logits),
                    int(tree.valid.sum() - tree.prefix_length.sum()) + tree.rows,
                    int(tree.probe.sum()),
                )
            )
            return output

    engine = Engine(Counting(target()), Method(LookaheadDrafter(5, 4, 5), Trie(8), Match()), rows=1)
    run(engine, [Request(random_tokens(9, seed=2), max_new_tokens=40)])
    for scored, drafted, probes in rows[4:-10]:
        assert probes == 14 and scored == drafted + 5


def test_the_pool_holds_the_most_recent() -> None:
    pool = NgramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (2, 9, 9), (1, 6, 7)):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(2) == [(9, 9)] and pool.after(3) == []
    empty = NgramPool(0)
    empty.add((1, 2))
    assert empty.after(1) == []


@pytest.mark.parametrize("follow", [False, True])
def test_the_window_is_jacobis_iteration_by_separate_passes(follow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = list[tuple[list[list[int]], list[int]]]()
    advance = LookaheadWindow.advance

    def spy(
        self: LookaheadWindow, predicted: Sequence[int], moved: int = 1, banned: Collection[int] = ()
    ) -> list[tuple[int, ...]]:
        passes.append((list(self.rows), list(predicted)))
        return advance(self, predicted, moved, banned)

    monkeypatch.setattr(LookaheadWindow, "advance", spy)
    text = random_tokens(20, seed=4)
    engine = engine_for(Method(LookaheadDrafter(5, 4, 5, follow=follow), Trie(20), Match()), chunk=7)
    engine.submit(Request(text, max_new_tokens=25))
    while engine.busy:
        before = list(text)
        text += [t for u in engine.step() for t in u.tokens]
        if len(text) == len(before):
            continue
        rows, predicted = passes.pop()
        assert rows[0][0] == before[-1]
        for i, found in enumerate(predicted):
            column = [*before[:-1], *rows[0][: i + 1], *(row[i] for row in rows[1:])]
            assert found == all_logits(target(), column)[-1].argmax()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("accept", [Match(), Rejection()], ids=["match", "rejection"])
def test_answers_are_those_of_naive_decoding(name: str, accept: Match | Rejection) -> None:
    method: AnyMethod = Method(VARIANTS[name], Trie(60), accept)
    assert generate(method, REQUESTS) == TEXTS()


def test_beside_other_retrievers() -> None:
    draft = CombinedRetriever(
        [LookaheadDrafter(3, 3, 3), SuffixRetriever(), LookaheadDrafter(2, 4, 2), JacobiDrafter(4)]
    )
    assert generate(Method(draft, Trie(12), Match()), REQUESTS) == TEXTS()


def test_the_end_of_the_context_is_not_passed() -> None:
    request = Request(random_tokens(TINY.context - 12, seed=1), max_new_tokens=50)
    found = generate(Method(LookaheadDrafter(15, 5, 15), Trie(60), Match()), [request])[0]
    assert found == naive(target(), Request(request.prompt, max_new_tokens=12))


def test_without_candidates_a_pass_decides_one_token_and_with_them_more() -> None:
    for candidates in (0, 7):
        engine = engine_for(Method(LookaheadDrafter(7, 4, candidates, from_text=False), Trie(21), Match()))
        (done,) = engine.complete([Request(random_tokens(9, seed=3), max_new_tokens=80)])
        assert len(done.tokens) == 80
        found = done.statistics.tokens_per_pass
        assert found > 2 if candidates else found == 1


def test_memory_is_bounded_by_the_request() -> None:
    draft = LookaheadDrafter(3, 3, 3)
    generate(Method(draft, Trie(6), Match()), REQUESTS)
    assert not draft._rows


@pytest.mark.parametrize(("width", "ngram", "candidates"), [(0, 5, 5), (5, 1, 5), (5, 5, -1)])
def test_impossible_windows_are_refused(width: int, ngram: int, candidates: int) -> None:
    with pytest.raises(ValueError, match="lookahead needs"):
        LookaheadDrafter(width, ngram, candidates)
