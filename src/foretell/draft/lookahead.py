"""Lookahead decoding: n-grams read off the target's own Jacobi trajectories, which run beside the text in every
pass.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.draft.acceptance import AcceptanceEstimator
from foretell.draft.base import Continuation, Retriever

_STREAM = (1 << 30) + 1
"""Stream of the random numbers that choose the window's first guesses."""


class NgramPool:
    """n-grams by their first token: at most `capacity` continuations each, the least recently seen evicted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._after: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Store an n-gram; one that is known becomes the most recent of its first token."""
        kept, rest = self._after.setdefault(ngram[0], {}), tuple(ngram[1:])
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self._capacity:
            del kept[next(iter(kept))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What has followed a token, most recent first."""
        return list(self._after.get(token, ()))[::-1]


class LookaheadWindow:
    """The last `height` iterates of Jacobi's method on `width` future positions.

    Column `i` of row `r` guesses the token `i + r` places after the last decided one, for which cell (0, 0) stands.
    Cell (r, i) sees row 0 up to column i and its own column from row 1 down to itself: as a tree, its parent is the
    cell above it, and row 0 is a chain. Worked example, width 3, height 3, with the places after the last decided token
    `a`::

        row 0    a ─ . ─ .         0  1  2
                 │   │   │
        row 1    .   .   .         1  2  3
                 │   │   │
        row 2    .   .   .         2  3  4      and its predictions, the next iterate:  3  4  5

    Rows come into being one per pass, each a column narrower than the row it was predicted from; the first one is wide
    enough for `width` to be left.
    """

    def __init__(self, width: int, height: int, guess: Callable[[], int]) -> None:
        self._height, self._guess = height, guess
        self.rows: list[list[int]] = [[guess() for _ in range(width + height - 1)]]

    def cells(self, last: int, first: int, max_depth: int) -> tuple[list[int], list[int], list[int]]:
        """The cells no deeper than `max_depth` as nodes `first, first + 1, …` of a tree whose node 0 holds the `last`
        decided token.

        Gives their tokens and parents, and the nodes of the last row, node 0 for cell (0, 0) included.
        """
        self.rows[0][0] = last
        tokens, parents, above = list[int](), list[int](), list[int]()
        for r, cells in enumerate(self.rows):
            row = list[int]()
            for i, token in enumerate(cells[: max(max_depth + 1 - r, 0)]):
                if r == i == 0:
                    row.append(0)
                    continue
                row.append(first + len(tokens))
                tokens.append(token)
                parents.append(above[i] if r else row[-2])
            above = row
        return tokens, parents, above

    def advance(self, predicted: Sequence[int], moved: int = 1, banned: Collection[int] = ()) -> list[tuple[int, ...]]:
        """Take in what the target predicted below the last row; the n-grams that this completes, once the window is
        full.

        The window then stands one place further on, or `moved` places, with guesses at its end. Predictions in `banned`
        (end of sequence: whatever is predicted after it is junk) are replaced by guesses.
        """
        ngrams = [(*above, new) for *above, new in zip(*self.rows, predicted, strict=False)]
        full = len(self.rows) == self._height
        row = [self._guess() if t in banned else t for t in predicted]
        row += [self._guess() for _ in range(len(self.rows[0]) - len(row))]
        self.rows = [*self.rows[1:], row] if full else [r[1:] for r in (*self.rows, row)]
        if moved > 1:
            self.rows = [(r + [self._guess() for _ in range(moved - 1)])[-len(r) :] for r in self.rows]
        return ngrams if full else []


class _Row:
    """What is known about one text."""

    def __init__(self, window: LookaheadWindow, pool: NgramPool, ranks: int) -> None:
        self.window, self.pool = window, pool
        self.estimator = AcceptanceEstimator([max(0.35 - 0.03 * r, 0.1) for r in range(max(ranks, 1))])
        self.pooled = 0
        """Where the first n-gram of the text begins that is not in the pool."""
        self.offered: list[tuple[int, ...]] = []
        self.asked: list[int] = []
        """Nodes of the window's last row in the tree of this step, as it was before the trunk grew."""


class LookaheadDrafter(Retriever):
    """A window of `width` positions, n-grams of `ngram` tokens, at most `candidates` of them verified per pass (Fu et
    al., arXiv 2402.02057).

    Every pass reads the window beside the drafts, in nodes that are never accepted; the target's argmax below its last
    row completes one n-gram per column. `from_text` pools the n-grams of prompt and answer too. `follow` moves the
    window by as many places as tokens were decided, not by one as published. `eos`: tokens after which predictions are
    worthless. Per text; sampled decoding is exact because the n-grams are picked, not drawn.

    Raises:
        ValueError: a width below 1, n-grams below 2 tokens, a negative number of candidates.
    """

    label = "n-grams of its own Jacobi iterates"

    def __init__(
        self,
        width: int = 7,
        ngram: int = 5,
        candidates: int = 7,
        from_text: bool = True,
        follow: bool = False,
        eos: Sequence[int] = (),
    ) -> None:
        if width < 1 or ngram < 2 or candidates < 0:
            raise ValueError(
                "lookahead needs a window of at least 1, n-grams of at least 2 and no fewer than 0 candidates, "
                f"found {width}, {ngram} and {candidates}"
            )
        self.width, self.ngram, self.candidates = width, ngram, candidates
        self.from_text, self.follow, self.eos = from_text, follow, frozenset(eos)
        self._rows: dict[int, _Row] = {}

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The pooled n-grams that begin with the last decided token, most recent first."""
        out = []
        for i, (row, last) in enumerate(zip(context.rows, context.last_tokens, strict=True)):
            if row not in self._rows:
                self._rows[row] = self._start(context, i)
            mine = self._rows[row]
            if self.from_text:
                self._pool_text(mine, context.sequences[i])
            mine.offered = mine.pool.after(last)[: self.candidates]
            out.append(
                [Continuation(t, mine.estimator.cumulative(rank, len(t))) for rank, t in enumerate(mine.offered)]
            )
        return out

    def _start(self, context: Context, i: int) -> _Row:
        text, noise, drawn = context.sequences[i], context.rngs[i], iter(range(1 << 62))
        start = text.length

        def guess() -> int:
            return int(text.tokens[int(noise.uniform(start + next(drawn), _STREAM) * start)])

        return _Row(LookaheadWindow(self.width, self.ngram - 1, guess), NgramPool(self.candidates), self.candidates)

    def _pool_text(self, mine: _Row, text: TokenBuffer) -> None:
        tokens = text.tokens[mine.pooled :].tolist()
        for at in range(len(tokens) - self.ngram + 1):
            mine.pool.add(tokens[at : at + self.ngram])
        mine.pooled += max(len(tokens) - self.ngram + 1, 0)

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Add the windows to be read in this pass; nothing but what stands below their last rows is scored."""
        tokens, parents = [], []
        for row, last, max_depth in zip(context.rows, context.last_tokens, context.max_depth.tolist(), strict=True):
            token, parent, self._rows[row].asked = self._rows[row].window.cells(last, tree.nodes, max_depth)
            tokens.append(token)
            parents.append(parent)
        return tree.with_probes(tokens, parents, scored=[set(self._rows[row].asked) for row in context.rows])

    def observe(self, step: StepResult) -> None:
        """Move the windows on, pool the n-grams they completed, and learn how good candidates were."""
        rows = [(i, self._rows[r]) for i, r in enumerate(step.context.rows) if step.new_tokens[i] and r in self._rows]
        if not rows:
            return
        at = np.concatenate(
            [
                step.output.logit_index[i, np.array(mine.asked, np.int64) + step.tree.prefix_length[i] - 1]
                for i, mine in rows
            ]
        )
        best = step.output.logits[torch.from_numpy(at)].argmax(-1).tolist()
        for i, mine in rows:
            predicted, best = best[: len(mine.asked)], best[len(mine.asked) :]
            for rank, tokens in enumerate(mine.offered):
                mine.estimator.update_run(rank, tokens, step.new_tokens[i])
            for ngram in mine.window.advance(predicted, len(step.new_tokens[i]) if self.follow else 1, self.eos):
                mine.pool.add(ngram)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)
