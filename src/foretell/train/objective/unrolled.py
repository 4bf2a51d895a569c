"""EAGLE-3's objective: the target's distribution at every step of a draft, from what the drafter itself made before
(arXiv 2503.01840).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import TokenSubset
from foretell.train.objective.candidates import candidates
from foretell.train.objective.teacher import TargetHead

Pair = tuple[Float[torch.Tensor, "_ w"], Float[torch.Tensor, "_ w"]]
"""Guessed and the target's logits at the same places, over the drafted tokens."""


def soft_cross_entropy(
    guess: Float[torch.Tensor, "k w"], target: Float[torch.Tensor, "k w"], hard: float = 0.0
) -> Float[torch.Tensor, ""]:
    """Cross-entropy of guessed logits against the target's distribution, mean over places; 0 where there are none.

    A share `hard` of the label is the target's best token, which is all that greedy decoding asks for.
    """
    log_q = torch.log_softmax(guess.float(), -1)
    loss = -(torch.softmax(target.float(), -1) * log_q).sum(-1) if hard < 1 else log_q.new_zeros(len(log_q))
    if hard:
        best = F.nll_loss(log_q, target.argmax(-1), reduction="none")
        loss = (1 - hard) * loss + hard * best
    return loss.sum() / max(1, len(loss))


def unrolled(steps: Sequence[Pair], decay: float = 0.8, hard: float = 0.0) -> Float[torch.Tensor, ""]:
    """Sum over steps of `decay ** i` times the cross-entropy of step `i`."""
    losses = [decay**i * soft_cross_entropy(guess, target, hard) for i, (guess, target) in enumerate(steps)]
    return torch.stack(losses).sum()


def agreement(guess: Float[torch.Tensor, "k w"], target: Float[torch.Tensor, "k w"]) -> float:
    """Share of places where both have the same best token; 0 where there are none."""
    if not len(guess):
        return 0.0
    return float((guess.argmax(-1) == target.argmax(-1)).float().mean())


@dataclass(frozen=True)
class Labels:
    """The target's opinion wherever one is asked for.

    `row[b, p]` is the row of `logits` that holds it after token `p` of a text (what it says about token `p + 1`), -1
    where there is none: token `p + 1` is not to be learned, or is not among the drafted ones.
    """

    row: Int[torch.Tensor, "b t"]
    logits: Float[torch.Tensor, "k w"]
    covered: float
    """Share of the tokens to be learned that can be drafted."""
    among: TokenSubset | None = None
    """Which of the drafted tokens `logits` are of; None: all."""

    def after(self, shift: int) -> tuple[Bool[torch.Tensor, "b t"], Float[torch.Tensor, "l w"]]:
        """The positions `j` that have a label `shift` positions later, and these labels in the order of the
        positions.
        """
        row = F.pad(self.row[:, shift:], (0, min(shift, self.row.shape[1])), value=-1)
        where = row >= 0
        return where, self.logits[row[where]]

    def narrowed(self, count: int) -> "Labels":
        """The same over `count` candidates; 0: over all."""
        among = candidates(torch.softmax(self.logits, -1), count)
        return self if among is None else replace(self, logits=among.select(self.logits), among=among)


@torch.no_grad()
def labels(
    state: Float[torch.Tensor, "b s d"],
    token: Int[torch.Tensor, "b s"],
    answer: Bool[torch.Tensor, "b s"],
    ends: EmbeddingAndHead,
    drafted: Int[torch.Tensor, " w"] | None,
) -> Labels:
    """The target's logits over the drafted tokens (None: all), from the states that its head sees, wherever the text
    goes on with such a token.

    The paper asks whether the target's best token can be drafted; for texts of the target's own that is nearly the
    same, and spares an output over the whole vocabulary that would cost more than the drafter.
    """
    wanted = answer[:, 1:].clone()
    if drafted is not None:
        known = torch.zeros(ends.vocab, dtype=torch.bool, device=token.device)
        known[drafted] = True
        wanted &= known[token[:, 1:]]
    logits = TargetHead(ends, drafted)(state[:, :-1][wanted])
    row = torch.full(wanted.shape, -1, device=state.device)
    row[wanted] = torch.arange(len(logits), device=state.device)
    asked = int(answer[:, 1:].sum())
    return Labels(row, logits, len(logits) / asked if asked else 0.0)
