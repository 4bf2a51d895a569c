"""Decoding as the solution of a triangular system: the target's own previous iterate is the draft."""

from typing import Literal

from foretell.core.context import Context, StepResult
from foretell.distributions.processed import target_distributions
from foretell.draft.acceptance import AcceptanceEstimator
from foretell.draft.base import Continuation, Retriever

InitialGuess = Literal["last", "random"]
_STREAM = 1 << 30
"""Stream of the random numbers that choose fresh guesses."""


class JacobiDrafter(Retriever):
    """Fixed-point iteration on the next `width` tokens, all of them updated in every pass (Song et al., arXiv
    2002.03629).

    Decoding solves `y_i = draw(p(. | text, y_<i))` for all i, where the draw at a position uses that position's own
    random number (argmax at temperature 0): a deterministic triangular system. Its fixed point is the very text of
    plain decoding, and every pass settles one token at least; settled tokens leave the system. `slide`: the window
    moves with the text, `width` guesses are read per pass. Otherwise blocks of `width` tokens are solved one after
    another (Gauss-Seidel over blocks, Jacobi inside; Santilli et al., arXiv 2305.10427). `fresh`: what stands where
    nothing is known yet, the last decided token or a random one of the text.

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
        """Guesses for the positions after the text's end, in order."""
        self._block_end: dict[int, int] = {}
        self._estimators: dict[int, AcceptanceEstimator] = {}

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The present iterate of every text, as far as it is iterated on."""
        out = []
        for i, (row, max_depth) in enumerate(zip(context.rows, context.max_depth.tolist(), strict=True)):
            iterate = self._iterate.setdefault(row, [])
            wanted = min(self._reach(row, context.sequences[i].length), max_depth)
            iterate += [self._guess(context, i, ahead) for ahead in range(len(iterate), wanted)]
            estimator = self._estimators.setdefault(row, AcceptanceEstimator([0.3] * self.width))
            tokens, chance, survival = tuple(iterate[:wanted]), 1.0, []
            for ahead in range(wanted):
                chance *= estimator.rate(ahead)
                survival.append(chance)
            out.append([Continuation(tokens, tuple(survival))] if tokens else [])
        return out

    def _reach(self, row: int, length: int) -> int:
        """Guesses worth reading: those that a token of the system depends on.

        The last token of a block is nobody's condition.
        """
        if self.slide:
            return self.width
        if length >= self._block_end.get(row, 0):
            self._block_end[row] = length + self.width
        return self._block_end[row] - length - 1

    def _guess(self, context: Context, i: int, ahead: int) -> int:
        text = context.sequences[i]
        if self.initial_guess == "last":
            return int(text.tokens[-1])
        return int(text.tokens[int(context.rngs[i].uniform(text.length + ahead, _STREAM) * text.length)])

    def observe(self, step: StepResult) -> None:
        """The next iterate: what the target says after each guess that is not settled yet."""
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
            updated = [distributions.sample(i, node) for node in read[len(decided) :]]
            self._iterate[row] = updated + before[max(len(decided), len(read)) :]

    def release(self, row: int) -> None:
        """Forget a row."""
        for memory in (self._iterate, self._block_end, self._estimators):
            memory.pop(row, None)
