"""Distributions over exits, and what they are trained towards: oracles (Depth-Adaptive Transformer, arXiv 1910.10073)
and rewards (ConsistentEE, arXiv 2312.11882).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

Oracle = Literal["likelihood", "correctness"]
"""What an exit is worth at a token: the log-probability that it gives the target's token, or 1 if that is its own."""
ROLLOUTS = 8
"""Exits that the policy samples per token, whose mean reward is the baseline."""
_MIN_PROBABILITY = 1e-6
"""Lower bound of the policy's probabilities in logarithms."""


@dataclass(frozen=True)
class ExitOutcomes:
    """What every exit, and behind them the whole model, gives at `t` tokens.

    `likelihood`: natural logarithm of the probability of the target's most probable token. `correct`: that token is the
    most probable one of the exit. `depth`: share of the layers that run, ascending; 1 for the whole model.
    """

    likelihood: Float[torch.Tensor, "t m"]
    correct: Bool[torch.Tensor, "t m"]
    depth: Float[torch.Tensor, " m"]


def geometric_distribution(score: Float[torch.Tensor, "t e"]) -> Float[torch.Tensor, "t m"]:
    """Log-probability that a token leaves at each exit, or behind them: at every exit it stays or leaves with the
    probability sigmoid(score), and the whole model takes the rest.
    """
    stay = F.logsigmoid(-score).cumsum(-1)
    before = F.pad(stay, (1, 0))
    return torch.cat([before[:, :-1] + F.logsigmoid(score), before[:, -1:]], -1)


def multinomial_distribution(score: Float[torch.Tensor, "t e"]) -> Float[torch.Tensor, "t m"]:
    """Log-probability of every exit by a softmax of all scores, that of the whole model being 0."""
    return F.pad(score, (0, 1)).log_softmax(-1)


def smooth(value: Float[torch.Tensor, "t m"], width: float, lengths: Sequence[int]) -> Float[torch.Tensor, "t m"]:
    """Means over the neighbours of a token in its document, weighted by exp(-(t - t')^2 / width); 0: the value itself.
    `lengths`: tokens of every document.
    """
    if not width:
        return value
    parts = list[torch.Tensor]()
    for part in value.split(list(lengths)):
        at = torch.arange(len(part), dtype=value.dtype)
        weight = torch.exp(-(at[:, None] - at).square() / width)
        parts.append(weight @ part / weight.sum(1, keepdim=True))
    return torch.cat(parts)


def oracle_exits(
    outcomes: ExitOutcomes, oracle: Oracle, penalty: float, width: float = 0.0, lengths: Sequence[int] = ()
) -> Int[torch.Tensor, " t"]:
    """The best exit of every token: the largest of what it is worth less `penalty` times its depth, the first of
    equals.
    """
    worth = outcomes.likelihood if oracle == "likelihood" else outcomes.correct.to(outcomes.likelihood.dtype)
    return (smooth(worth, width, lengths) - penalty * outcomes.depth).argmax(-1)


def sequence_exits(
    outcomes: ExitOutcomes, oracle: Oracle, penalty: float, lengths: Sequence[int]
) -> Int[torch.Tensor, " d"]:
    """The best exit of every document: as `oracle_exits`, by the mean over its tokens."""
    worth = outcomes.likelihood if oracle == "likelihood" else outcomes.correct.to(outcomes.likelihood.dtype)
    means = torch.stack([part.mean(0) for part in worth.split(list(lengths))])
    return (means - penalty * outcomes.depth).argmax(-1)


def memorized_exits(correct: Bool[torch.Tensor, "t m"]) -> Int[torch.Tensor, " t"]:
    """The first exit from which on all are correct (ConsistentEE's memorized layer), `m` if the last one is not."""
    trailing = (~correct.flip(-1)).int().cumsum(-1) == 0
    return correct.shape[-1] - trailing.sum(-1)


def policy_rewards(
    outcomes: ExitOutcomes, exits: Int[torch.Tensor, "t k"], penalty: float
) -> Float[torch.Tensor, "t k"]:
    """Rewards of leaving at some exits: the log-likelihood there, less `penalty` times the depth times 1 less the depth
    of the memorized exit, so that depth costs little where a token is hard.
    """
    depth = F.pad(outcomes.depth, (0, 1), value=1.0)
    easiness = 1 - depth[memorized_exits(outcomes.correct)]
    return outcomes.likelihood.gather(1, exits) - penalty * depth[exits] * easiness[:, None]


def policy_loss(
    score: Float[torch.Tensor, "t e"], outcomes: ExitOutcomes, penalty: float, generator: torch.Generator
) -> Float[torch.Tensor, ""]:
    """REINFORCE with the mean of `ROLLOUTS` rewards of a token as its baseline."""
    log_probability = geometric_distribution(score).clamp_min(torch.tensor(_MIN_PROBABILITY).log().item())
    exits = log_probability.detach().exp().multinomial(ROLLOUTS, replacement=True, generator=generator)
    reward = policy_rewards(outcomes, exits, penalty)
    advantage = reward - reward.mean(1, keepdim=True)
    return -(advantage * log_probability.gather(1, exits)).mean()


def select(outcomes: ExitOutcomes, index: Int[torch.Tensor, " n"]) -> ExitOutcomes:
    """The outcomes at some tokens."""
    return ExitOutcomes(outcomes.likelihood[index], outcomes.correct[index], outcomes.depth)
