"""What heads learn: every head its own token, later heads with less weight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.train.objective.candidates import candidates

_MISSED = 1 << 30


@dataclass(frozen=True)
class Targets:
    """Positions whose state the heads see, and the token that each head is to guess there."""

    row: Int[torch.Tensor, " n"]
    place: Int[torch.Tensor, " n"]
    token: Int[torch.Tensor, "n k"]
    """Number among the drafted tokens; -1: not to be learned (no part of an answer, past the end, or not drafted)."""
    known: Bool[torch.Tensor, "n k"]
    """The head is to be judged here: the token belongs to an answer, be it drafted or not."""


def targets(
    token: Int[torch.Tensor, "b s"],
    answer: Bool[torch.Tensor, "b s"],
    heads: int,
    number: Int[torch.Tensor, " v"] | None = None,
    most: int | None = None,
) -> Targets:
    """Positions at which at least one head has something to learn, and what.

    The state at position `t` produced token `t + 1`, so head `i` (from 0) guesses token `t + 2 + i`. `number`: every
    token's place among the drafted ones, -1 for the others (None: all are drafted). `most`: as many of the positions,
    drawn at random, are enough.
    """
    s = token.shape[1]
    padded = F.pad(token, (0, heads + 1))
    wanted = F.pad(answer, (0, heads + 1))
    ahead = torch.arange(2, heads + 2, device=token.device)
    places = torch.arange(s, device=token.device)[:, None] + ahead
    known, guess = wanted[:, places], padded[:, places]
    row, place = known.any(-1).nonzero(as_tuple=True)
    if most is not None and len(row) > most:
        drawn = torch.randperm(len(row))[:most].sort().values.to(row.device)
        row, place = row[drawn], place[drawn]
    known, guess = known[row, place], guess[row, place]
    guess = guess if number is None else number[guess]
    return Targets(row, place, torch.where(known, guess, -1), known)


def weights(heads: int, decay: float = 0.8) -> list[float]:
    """Medusa's weight of every head's loss: decay to the power of the head's number, from 1 on (arXiv 2401.10774,
    2.2.1).
    """
    return [decay ** (i + 1) for i in range(heads)]


def cross_entropies(
    logits: Float[torch.Tensor, "n k w"],
    token: Int[torch.Tensor, "n k"],
) -> Float[torch.Tensor, " k"]:
    """Mean cross-entropy of each head in nats, over the positions where its token is known (0 where none is)."""
    n = torch.clamp_min((token >= 0).sum(0), 1)
    losses = F.cross_entropy(logits.float().flatten(0, 1), token.flatten(), ignore_index=-1, reduction="none")
    return losses.view(token.shape).sum(0) / n


def soft_cross_entropies(
    logits: Float[torch.Tensor, "n k w"], distribution: Float[torch.Tensor, "n k w"], learned: Bool[torch.Tensor, "n k"]
) -> Float[torch.Tensor, " k"]:
    """Mean cross-entropy of each head against the distribution that the target had at its position, over the positions
    to be learned.
    """
    losses = -(distribution * F.log_softmax(logits.float(), -1)).sum(-1)
    return (losses * learned).sum(0) / learned.sum(0).clamp_min(1)


class Told:
    """What the target said of the tokens that heads are to guess: a distribution per place, computed once for all heads
    that look there.

    `head`: scores the drafted tokens. `count`: candidates to look at, with all tokens to be guessed among them; 0: all
    drafted tokens.
    """

    @torch.no_grad()
    def __init__(
        self,
        wanted: Targets,
        state: Float[torch.Tensor, "b s d"],
        head: Callable[[Float[torch.Tensor, "u d"]], Float[torch.Tensor, "u w"]],
        count: int = 0,
    ) -> None:
        s, heads = state.shape[1], wanted.token.shape[1]
        # The state one position before a token gave the target's distribution over it.
        ahead = wanted.place[:, None] + torch.arange(1, heads + 1, device=state.device)
        cell, self._which = torch.unique(wanted.row[:, None] * s + ahead.clamp_max(s - 1), return_inverse=True)
        logits = head(state.flatten(0, 1)[cell])
        self.among = candidates(torch.softmax(logits, -1), count, torch.unique(wanted.token.clamp_min(0)))
        self._laws = torch.softmax(logits if self.among is None else self.among.select(logits), -1)

    @property
    def distributions(self) -> Float[torch.Tensor, "n k c"]:
        """Its distribution for every head."""
        return self._laws[self._which]

    def token(self, number: Int[torch.Tensor, "n k"]) -> Int[torch.Tensor, "n k"]:
        """Drafted tokens by their number among those looked at; -1 stays."""
        if self.among is None:
            return number
        return torch.where(number >= 0, torch.searchsorted(self.among.columns, number.clamp_min(0)), -1)


@torch.no_grad()
def ranks(logits: Float[torch.Tensor, "n k w"], token: Int[torch.Tensor, "n k"]) -> Int[torch.Tensor, "n k"]:
    """How many tokens each head prefers to the right one; more than there are where the right one is not drafted."""
    right = logits.gather(-1, token.clamp_min(0)[..., None])
    return torch.where(token >= 0, (logits > right).sum(-1), _MISSED)
