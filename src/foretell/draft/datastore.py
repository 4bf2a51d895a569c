"""Retrieval from a datastore: continuations of the longest suffix of the sequence."""

import heapq
from itertools import count

import numpy as np
from jaxtyping import Int

from foretell.core.context import Context, StepResult, StepState
from foretell.draft.acceptance import AcceptanceEstimator
from foretell.draft.base import Continuation, Retriever
from foretell.retrieval.datastore import Datastore

_COUNT_LEVELS = 8
"""Kinds of matches by their number of occurrences (1, 2..3, 4..7, …), for each of three ranges of match length."""
_LENGTH_BOUNDS = (3, 6)
"""Longest matches of the first and the second range of match length."""
_PRIOR = (
    0.45,
    0.55,
    0.6,
    0.65,
    0.7,
    0.75,
    0.8,
    0.85,
    0.6,
    0.7,
    0.75,
    0.8,
    0.84,
    0.87,
    0.9,
    0.92,
    0.8,
    0.85,
    0.88,
    0.9,
    0.92,
    0.93,
    0.94,
    0.95,
)

"""Prior acceptance rates, by range of match length and number of occurrences."""

PrefixCounts = dict[tuple[int, ...], int]


class DatastoreRetriever(Retriever):
    """Trie of the most frequent continuations in a datastore (He et al., REST, arXiv 2311.08252).

    Suffixes of `longest` down to `shortest` tokens are searched; the first length with at least `least_hits`
    occurrences gives up to `hits` of them, and the prefixes of their next `copy` tokens are counted. The probability of
    a prefix is its share of the occurrences times the measured rate at which any of them is right. Drafts are
    deterministic, so that every acceptor stays exact.

    Raises:
        ValueError: a size out of range, or longer than the datastore is sorted for.
    """

    label = "frequent continuations in a datastore"

    def __init__(
        self,
        store: Datastore,
        longest: int = 16,
        shortest: int = 2,
        copy: int = 10,
        hits: int = 1000,
        least_hits: int = 1,
    ) -> None:
        if not 1 <= shortest <= longest <= store.depth:
            raise ValueError(
                f"matches need 1 <= shortest <= longest <= {store.depth} (the datastore's depth), found {shortest} and "
                f"{longest}"
            )
        if min(copy, hits, least_hits) < 1:
            raise ValueError(f"copy, hits and least_hits must be at least 1, found {copy}, {hits} and {least_hits}")
        self.store, self.longest, self.shortest = store, longest, shortest
        self.copy, self.hits, self.least_hits = copy, hits, least_hits
        self._estimators: dict[int, AcceptanceEstimator] = {}
        self._offered = StepState[dict[int, tuple[int, PrefixCounts]]]()

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The `budget` most frequent prefixes of the continuations, as paths."""
        out, offered = [], dict[int, tuple[int, PrefixCounts]]()
        for row, sequence, max_depth in zip(context.rows, context.sequences, context.max_depth.tolist(), strict=True):
            copy = min(self.copy, budget, max_depth)
            ending = sequence.tokens[-self.longest :].tolist()
            size, first, last = (
                self.store.longest_suffix(ending, self.longest, self.shortest, self.least_hits)
                if copy > 0
                else (0, 0, 0)
            )
            continuations = (
                self.store.continuations(first, last, size, copy, self.hits) if size else np.zeros((0, 0), np.int64)
            )
            counts = most_frequent_prefixes(continuations, budget)
            kind = _COUNT_LEVELS * sum(size > bound for bound in _LENGTH_BOUNDS) + min(
                len(continuations).bit_length() - 1, _COUNT_LEVELS - 1
            )
            estimator = self._estimators.setdefault(row, AcceptanceEstimator(_PRIOR))
            offered[row] = kind, counts
            out.append(_paths(counts, len(continuations), estimator.rate(kind) if counts else 0.0))
        self._offered.put(context, offered)
        return out

    def observe(self, step: StepResult) -> None:
        """Update the acceptance rates."""
        offered = self._offered.of(step.context, {})
        for row, decided in zip(step.context.rows, step.new_tokens, strict=True):
            kind, counts = offered.get(row, (0, {}))
            inner, prefix = {p[:-1] for p in counts}, tuple[int, ...]()
            for token in decided:
                if prefix not in inner:
                    break
                prefix = (*prefix, token)
                self._estimators[row].update(kind, prefix in counts)

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._estimators.pop(row, None)


def most_frequent_prefixes(continuations: Int[np.ndarray, "h c"], most: int) -> PrefixCounts:
    """The `most` most frequent prefixes of the rows, with their counts; rows end at -1.

    Of equally frequent prefixes the shorter one comes first, so that every prefix comes after its own prefixes.
    """
    out, order = PrefixCounts(), count()
    heap: list[tuple[int, int, int, tuple[int, ...], Int[np.ndarray, " g"]]] = [
        (0, 0, 0, (), np.arange(len(continuations)))
    ]
    while heap and len(out) < most:
        times, depth, _, prefix, rows = heapq.heappop(heap)
        if prefix:
            out[prefix] = -times
        if depth < continuations.shape[1]:
            for token, group in _group_by_token(continuations[rows, depth], rows, most):
                heapq.heappush(heap, (-len(group), depth + 1, next(order), (*prefix, token), group))
    return out


def _group_by_token(
    column: Int[np.ndarray, " g"], rows: Int[np.ndarray, " g"], most: int
) -> list[tuple[int, Int[np.ndarray, " _"]]]:
    """Rows grouped by token, the `most` largest groups; rows that have ended are left out."""
    if len(rows) == 1:
        return [(int(column[0]), rows)] if column[0] >= 0 else []
    by = np.argsort(column, kind="stable")
    tokens, starts, sizes = np.unique(column[by], return_index=True, return_counts=True)
    largest = np.argsort(-sizes, kind="stable")[: most + 1].tolist()
    return [(int(tokens[g]), rows[by[starts[g] : starts[g] + sizes[g]]]) for g in largest if tokens[g] >= 0]


def _paths(counts: PrefixCounts, hits: int, rate: float) -> list[Continuation]:
    """The prefixes that are not part of a longer one, with the probabilities of all their prefixes."""
    inner = {p[:-1] for p in counts}
    return [
        Continuation(p, tuple(counts[p[: i + 1]] / hits * rate ** (i + 1) for i in range(len(p))))
        for p in counts
        if p not in inner
    ]
