"""Lookahead decoding: n-grams from Jacobi trajectories that every pass of the target computes beside the drafts."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from foretell.core.context import Context, StepResult, StepState, TokenBuffer
from foretell.core.sampling import Stream
from foretell.core.tree import TokenTree
from foretell.draft.acceptance import Candidate, EstimatingRetriever


class NgramPool:
    """n-grams by their first token: at most `capacity` each, with eviction of the least recently added one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._after: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram as the most recent one of its first token."""
        kept, rest = self._after.setdefault(ngram[0], {}), tuple(ngram[1:])
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self._capacity:
            del kept[next(iter(kept))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams of a first token, without it, most recent first."""
        return list(self._after.get(token, ()))[::-1]


class LookaheadWindow:
    """The last `height` iterates of Jacobi's method on `width` future positions.

    Cell (0, 0) is the last decided token; cell (r, i) of row `r` and column `i` guesses the token `i + r` positions
    after it. Cell (r, i) attends to row 0 up to column i and to its own column down to itself: in the tree its parent
    is the cell above it, and row 0 is a chain. Worked example, width 3, height 3, with the positions after the last
    decided token `a`::

        row 0    a ─ . ─ .         0  1  2
                 │   │   │
        row 1    .   .   .         1  2  3
                 │   │   │
        row 2    .   .   .         2  3  4      and its predictions, the next iterate:  3  4  5

    Every pass adds a row, one column narrower than the row that predicted it; the first row has `width + height - 1`
    columns.
    """

    def __init__(self, width: int, height: int, guess: Callable[[], int]) -> None:
        self._height, self._guess = height, guess
        self.rows: list[list[int]] = [[guess() for _ in range(width + height - 1)]]

    def cells(self, last: int, first: int, max_depth: int) -> tuple[list[int], list[int], list[int]]:
        """The cells of at most `max_depth` as nodes `first, first + 1, …` of a tree whose node 0 is the `last` decided
        token.

        Returns their tokens and parents, and the nodes of the last row, node 0 for cell (0, 0) included.
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
        """Add the predictions after the last row; returns the n-grams that they complete, if the window is full.

        The window moves by one position, or by `moved`, with guesses at its end. Guesses replace predictions in
        `banned` (end of sequence: the predictions after it are not used).
        """
        ngrams = [(*above, new) for *above, new in zip(*self.rows, predicted, strict=False)]
        full = len(self.rows) == self._height
        row = [self._guess() if t in banned else t for t in predicted]
        row += [self._guess() for _ in range(len(self.rows[0]) - len(row))]
        self.rows = [*self.rows[1:], row] if full else [r[1:] for r in (*self.rows, row)]
        if moved > 1:
            self.rows = [(r + [self._guess() for _ in range(moved - 1)])[-len(r) :] for r in self.rows]
        return ngrams if full else []


class _RequestState:
    """State of one request."""

    def __init__(self, window: LookaheadWindow, pool: NgramPool) -> None:
        self.window, self.pool = window, pool
        self.pooled = 0
        """Start of the sequence's first n-gram that is not in the pool."""


class LookaheadDrafter(EstimatingRetriever):
    """A window of `width` positions, n-grams of `ngram` tokens, at most `candidates` of them verified per pass (Fu et
    al., arXiv 2402.02057).

    Every pass reads the window as probe nodes; the target's argmax after its last row completes one n-gram per column.
    `from_text` adds the n-grams of prompt and answer to the pool. `follow` moves the window by the number of new
    tokens, not by one as published. `eos`: tokens after which predictions are not used. Sampling is exact because
    drafts are deterministic.

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
        super().__init__([max(0.35 - 0.03 * rank, 0.1) for rank in range(max(candidates, 1))])
        self.width, self.ngram, self.candidates = width, ngram, candidates
        self.from_text, self.follow, self.eos = from_text, follow, frozenset(eos)
        self._rows: dict[int, _RequestState] = {}
        self._probes = StepState[dict[int, list[int]]]()
        """Nodes of the last row of each window in the step's tree, before the prefix was added."""

    def _candidates(self, context: Context, i: int, budget: int) -> list[Candidate]:
        """The pool's n-grams that begin with the last token, most recent first."""
        row, sequence = context.rows[i], context.sequences[i]
        if row not in self._rows:
            self._rows[row] = self._start(context, i)
        if self.from_text:
            self._pool_text(self._rows[row], sequence)
        return list(enumerate(self._rows[row].pool.after(sequence.last_token)[: self.candidates]))

    def _start(self, context: Context, i: int) -> _RequestState:
        sequence, rng, draws = context.sequences[i], context.rngs[i], iter(range(1 << 62))
        start = sequence.length

        def guess() -> int:
            return int(sequence.tokens[int(rng.uniform(start + next(draws), Stream.LOOKAHEAD) * start)])

        return _RequestState(LookaheadWindow(self.width, self.ngram - 1, guess), NgramPool(self.candidates))

    def _pool_text(self, state: _RequestState, sequence: TokenBuffer) -> None:
        tokens = sequence.tokens[state.pooled :].tolist()
        for at in range(len(tokens) - self.ngram + 1):
            state.pool.add(tokens[at : at + self.ngram])
        state.pooled += max(len(tokens) - self.ngram + 1, 0)

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Add the windows as probes; only their last rows are scored."""
        tokens, parents, scored, last_rows = [], [], [], dict[int, list[int]]()
        for row, last, max_depth in zip(context.rows, context.last_tokens, context.max_depth.tolist(), strict=True):
            token, parent, probes = self._rows[row].window.cells(last, tree.nodes, max_depth)
            last_rows[row] = probes
            tokens.append(token)
            parents.append(parent)
            scored.append(set(probes))
        self._probes.put(context, last_rows)
        return tree.with_probes(tokens, parents, scored=scored)

    def observe(self, step: StepResult) -> None:
        """Advance the windows, add the completed n-grams to the pools, and update the acceptance rates."""
        super().observe(step)
        probes_of = self._probes.of(step.context, {})
        rows = [
            (i, row, probes_of[row])
            for i, row in enumerate(step.context.rows)
            if step.new_tokens[i] and row in probes_of
        ]
        if not rows:
            return
        at = np.concatenate(
            [
                step.output.logit_index[i, np.array(probes, np.int64) + step.tree.prefix_length[i] - 1]
                for i, _, probes in rows
            ]
        )
        best = step.output.logits[torch.from_numpy(at)].argmax(-1).tolist()
        for i, row, probes in rows:
            state, predicted, best = self._rows[row], best[: len(probes)], best[len(probes) :]
            for ngram in state.window.advance(predicted, len(step.new_tokens[i]) if self.follow else 1, self.eos):
                state.pool.add(ngram)

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        super().release(row)
        self._rows.pop(row, None)
