"""Drafts from the text that a client predicts (OpenAI's field `prediction`)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from foretell.core.context import TokenBuffer
from foretell.core.tree import TokenTree
from foretell.draft.acceptance import AcceptanceEstimator
from foretell.draft.base import Continuation
from foretell.draft.prompt_lookup import match_ends

_LONGEST = 4
"""Tokens that are compared at most to find the place of an answer in its prediction."""
_PRIOR = (0.25, 0.45, 0.65, 0.8, 0.85, 0.9, 0.92, 0.94)
"""Prior probability that the next predicted token is right after 1, 2, … right ones."""
_FIRST = 3
"""Right tokens that the beginning of a prediction counts as: answers mostly begin as predicted."""
_MIN_PROBABILITY = 0.15
"""Least probability of acceptance of a drafted token."""


class Prediction:
    """Follows the predicted text of one request: drafts what comes next in it, and after a difference finds its place
    again by the longest n-gram of the answer's last tokens, as prompt lookup does.

    Raises:
        ValueError: no tokens.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise ValueError("the prediction is empty: leave it out, or give the text that the answer is like")
        self._tokens: Int[np.ndarray, " t"] = np.asarray(tokens, np.int64)
        self._appeared = np.zeros(len(tokens), bool)
        self._next: int | None = 0
        """Index of the predicted token that may come next; None: the place in the prediction is unknown."""
        self._right = _FIRST
        """Tokens before it that the answer has, too."""
        self._read = 0
        """Tokens of the answer that were compared."""
        self._estimator = AcceptanceEstimator(_PRIOR)

    @property
    def appeared(self) -> int:
        """Tokens of the prediction that appeared in the answer."""
        return int(np.count_nonzero(self._appeared))

    @property
    def missing(self) -> int:
        """Tokens of the prediction that have not appeared in the answer."""
        return len(self._tokens) - self.appeared

    def propose(self, most: int) -> Continuation:
        """The next predicted tokens, at most `most`, while they are likely enough."""
        if self._next is None or most < 1:
            return Continuation((), ())
        tokens = self._tokens[self._next : self._next + most].tolist()
        chances = self._estimator.cumulative(self._right - 1, len(tokens))
        count = sum(chance >= _MIN_PROBABILITY for chance in chances)
        return Continuation(tuple(tokens[:count]), chances[:count])

    def follow(self, sequence: TokenBuffer) -> None:
        """Compare the tokens of the answer that are new."""
        generated = sequence.generated
        for end in range(self._read, len(generated)):
            self._compare(int(generated[end]), generated[max(0, end + 1 - _LONGEST) : end + 1])
        self._read = len(generated)

    def _compare(self, token: int, last: Int[np.ndarray, " n"]) -> None:
        expected = None if self._next is None else int(self._tokens[self._next])
        if expected is not None:
            self._estimator.update(self._right - 1, token == expected)
        if token == expected and self._next is not None:
            self._appeared[self._next] = True
            self._next, self._right = self._next + 1, self._right + 1
        else:
            self._find(last)
        if self._next is not None and self._next >= len(self._tokens):
            self._next = None

    def _find(self, last: Int[np.ndarray, " n"]) -> None:
        """Find the place after the longest n-gram: of several the first that has not appeared yet."""
        levels = match_ends(self._tokens, last, _LONGEST)
        if not levels:
            self._next, self._right = None, 1
            return
        ends = levels[-1]
        new = ends[~self._appeared[ends]]
        end = int(new[0] if len(new) else ends[-1])
        # A single token is in most texts by chance.
        self._appeared[end] |= len(levels) > 1
        self._next, self._right = end + 1, len(levels)


def add_continuations(
    tree: TokenTree, continuations: Sequence[Continuation]
) -> tuple[TokenTree, Float[np.ndarray, "b n"]]:
    """The trees, with a prefix of 1, with one continuation more each, and the probability of acceptance of its nodes,
    0 for the others. Nodes that a tree has already are not added again.
    """
    tokens, parents = [[list[int]() for _ in continuations] for _ in range(2)]
    chances = list[tuple[int, int, float]]()
    for row, continuation in enumerate(continuations):
        children, node, known = tree.children(row), 0, True
        for token, chance in zip(continuation.tokens, continuation.cumulative_acceptance, strict=True):
            below = (c for c in children.get(node, ()) if tree.token[row, c] == token) if known else iter(())
            child = next(below, None)
            if child is None:
                known, child = False, tree.nodes + len(tokens[row])
                tokens[row].append(token)
                parents[row].append(node)
            chances.append((row, child, chance))
            node = child
    out = tree.with_drafts(tokens, parents)
    predicted = np.zeros(out.token.shape)
    for row, node, chance in chances:
        predicted[row, node] = chance
    return out, predicted
