"""Token recycling: drafts from the target's top tokens of earlier passes, kept per token."""

import heapq
from collections import OrderedDict

import numpy as np
from jaxtyping import Int

from foretell.core.context import Context, StepResult
from foretell.draft.acceptance import AcceptanceEstimator
from foretell.draft.base import Continuation, Retriever
from foretell.model.run.topk import top_k

_RANKS = (0.42, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
"""Prior acceptance rate of the successor of each rank."""
_MAX_NODES = 64
"""Nodes of the largest tree."""
_MAX_SALTS = 32
"""Matrices that are kept, those of the most recently used salts; one takes 32 bytes times the vocabulary."""


class TokenRecycling(Retriever):
    """An adjacency matrix from each token to the `width` most probable tokens when the target last read it.

    Luo et al., "Turning Trash into Treasure" (arXiv 2408.08696). The published static tree is replaced by the most
    probable nodes under running acceptance rates per rank. All requests of a cache salt share a matrix, which changes
    the speed but never an answer of the acceptor `Match`.
    """

    label = "successors from earlier passes"

    def __init__(self, vocab: int, width: int = 8) -> None:
        if not 1 <= width <= len(_RANKS):
            raise ValueError(f"token recycling keeps 1 to {len(_RANKS)} successors per token, found {width}")
        self.width, self._vocab = min(width, vocab), vocab
        self._matrices = OrderedDict[str, Int[np.ndarray, "v w"]]()
        """By cache salt, the most recently used one last."""
        self._estimators: dict[int, AcceptanceEstimator] = {}

    def successors(self, salt: str = "") -> Int[np.ndarray, "v w"]:
        """The most probable tokens after each token, best first, of the requests of a cache salt; -1: unknown."""
        if salt not in self._matrices:
            self._matrices[salt] = np.full((self._vocab, self.width), -1, np.int32)
            if len(self._matrices) > _MAX_SALTS:
                self._matrices.popitem(last=False)
        self._matrices.move_to_end(salt)
        return self._matrices[salt]

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The `budget` most probable nodes of the successor tree below each request's last token, as paths."""
        return [
            self._paths(self.successors(salt), root, min(budget, _MAX_NODES), max_depth, self._known_odds(row))
            for row, salt, root, max_depth in zip(
                context.rows, _salts(context), context.last_tokens, context.max_depth.tolist(), strict=True
            )
        ]

    def _paths(
        self,
        successors: Int[np.ndarray, "v w"],
        root: int,
        budget: int,
        max_depth: int,
        estimator: AcceptanceEstimator,
    ) -> list[Continuation]:
        rates = [estimator.rate(r) for r in range(self.width)]
        out = list[Continuation]()
        heap: list[tuple[float, int, tuple[int, ...], tuple[float, ...]]] = [(-1.0, root, (), ())]
        while heap and len(out) <= budget:
            chance, token, path, survival = heapq.heappop(heap)
            if path:
                out.append(Continuation(path, survival))
            if len(path) < max_depth:
                for rank, following in enumerate(successors[token].tolist()):
                    if following >= 0:
                        product = -chance * rates[rank]
                        heapq.heappush(heap, (-product, following, (*path, following), (*survival, product)))
        return out

    def observe(self, step: StepResult) -> None:
        """Store the top successors of every scored token, and update the acceptance rates of the ranks, unless no
        drafts are asked for.
        """
        if not step.drafting:
            return
        salts = _salts(step.context)
        for i, (row, decided) in enumerate(zip(step.context.rows, step.new_tokens, strict=True)):
            if decided:
                successors, odds = self.successors(salts[i]), self._known_odds(row)
                before = [int(step.context.sequences[i].tokens[-len(decided) - 1]), *decided[:-1]]
                for token, following in zip(before, decided, strict=True):
                    known = successors[token].tolist()
                    if known[0] >= 0:
                        right = known.index(following) if following in known else self.width
                        odds.update_each(right)
        # Ids beyond the vocabulary are look-ahead embeddings.
        scored = (step.output.logit_index >= 0) & (step.tree.token < self._vocab)
        if not scored.any():
            return
        following = top_k(step.output.logits, self.width)[1].cpu().numpy()
        for salt in dict.fromkeys(salts):
            own = scored & np.array([s == salt for s in salts])[:, None]
            self.successors(salt)[step.tree.token[own]] = following[step.output.logit_index[own]]

    def _known_odds(self, row: int) -> AcceptanceEstimator:
        if row not in self._estimators:
            self._estimators[row] = AcceptanceEstimator(_RANKS, weight=16.0)
        return self._estimators[row]

    def release(self, row: int) -> None:
        """Forget a row whose request has ended; the matrices stay."""
        self._estimators.pop(row, None)


def _salts(context: Context) -> tuple[str, ...]:
    """The cache salt of every request."""
    return context.cache_salts or ("",) * len(context.rows)
