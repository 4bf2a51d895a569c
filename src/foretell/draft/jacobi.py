"""Jacobi decoding: the target's previous iterate is the draft."""

import operator
from itertools import accumulate
from typing import Literal

from foretell.core.context import Context, StepResult
from foretell.core.sampling import Stream
from foretell.distributions.processed import target_distributions
from foretell.draft.acceptance import AcceptanceEstimator
from foretell.draft.base import Continuation, Retriever

InitialGuess = Literal["last", "random"]
_PRIOR = 0.3
"""Prior acceptance rate of every position."""


class JacobiDrafter(Retriever):
    """Fixed-point iteration on the next `width` tokens, all updated in every pass (Song et al., arXiv 2002.03629).

    Decoding solves `y_i = sample(p(. | x, y_<i))` for all i, where every position has its own random number (argmax at
    temperature 0): a deterministic triangular system. Its fixed point is the answer of plain decoding, and every pass
    decides at least one token. `slide`: the window of `width` tokens moves with the sequence. Otherwise blocks of
    `width` tokens are solved one after another (Gauss-Seidel over blocks, Jacobi inside; Santilli et al., arXiv
    2305.10427). `initial_guess`: the last token of the sequence, or a random one of its tokens.

    Raises:
        ValueError: `width` below 1.
    """

    label = "its own previous iterate"
    single = True

    def __init__(self, width: int = 8, slide: bool = True, initial_guess: InitialGuess = "last") -> None:
        if width < 1:
            raise ValueError(f"Jacobi decoding iterates on at least 1 token, found a width of {width}")
        self.width, self.slide, self.initial_guess = width, slide, initial_guess
        self._iterate: dict[int, list[int]] = {}
        """Guesses of the next tokens, per row."""
        self._block_end: dict[int, int] = {}
        self._estimators: dict[int, AcceptanceEstimator] = {}

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The current iterate of every request."""
        out = []
        for i, (row, max_depth) in enumerate(zip(context.rows, context.max_depth.tolist(), strict=True)):
            iterate = self._iterate.setdefault(row, [])
            wanted = min(self._reach(row, context.sequences[i].length), max_depth)
            iterate += [self._guess(context, i, ahead) for ahead in range(len(iterate), wanted)]
            estimator = self._estimators.setdefault(row, AcceptanceEstimator([_PRIOR] * self.width))
            tokens, rates = tuple(iterate[:wanted]), map(estimator.rate, range(wanted))
            out.append([Continuation(tokens, tuple(accumulate(rates, operator.mul)))] if tokens else [])
        return out

    def _reach(self, row: int, length: int) -> int:
        """Number of guesses to be read; no token of a block depends on the last one."""
        if self.slide:
            return self.width
        if length >= self._block_end.get(row, 0):
            self._block_end[row] = length + self.width
        return self._block_end[row] - length - 1

    def _guess(self, context: Context, i: int, ahead: int) -> int:
        sequence = context.sequences[i]
        if self.initial_guess == "last":
            return int(sequence.tokens[-1])
        return int(
            sequence.tokens[int(context.rngs[i].uniform(sequence.length + ahead, Stream.JACOBI) * sequence.length)]
        )

    def observe(self, step: StepResult) -> None:
        """Compute the next iterate: the target's tokens after every guess that is not decided yet."""
        distributions = target_distributions(step)
        for i, (row, decided) in enumerate(zip(step.context.rows, step.new_tokens, strict=True)):
            before = self._iterate.get(row)
            if before is None or not decided:
                continue
            for ahead, (guess, truth) in enumerate(zip(before, decided, strict=False)):
                self._estimators[row].update(ahead, guess == truth)
                if guess != truth:
                    break
            read = [int(step.tree.prefix_length[i]) - 1, *step.tree.find_path(i, before)]
            updated = list[int]()
            for node in read[len(decided) :]:
                if not distributions.goes_on(i, node):
                    break
                updated.append(distributions.sample(i, node))
            else:
                updated += before[max(len(decided), len(read)) :]
            self._iterate[row] = updated

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        for memory in (self._iterate, self._block_end, self._estimators):
            memory.pop(row, None)
