"""Divergences between the target's and the draft's next-token distributions, per position: losses of distillation.

They are computed from logits in float32 or wider. No gradient flows into the target. A divergence that divides by a
probability of zero is infinite.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int

Logits: TypeAlias = Float[torch.Tensor, "*t v"]
PerPosition: TypeAlias = Float[torch.Tensor, "*t"]
Divergence = Callable[[Logits, Logits], PerPosition]
"""A function of the target's and the draft's logits that gives one number per position."""


def forward_kl(target: Logits, draft: Logits) -> PerPosition:
    """KL(p || q) in nats: the cross-entropy with the target's soft labels minus their entropy."""
    log_p, log_q = _log_probabilities(target, draft)
    return _expectation(log_p, log_p - log_q)


def reverse_kl(target: Logits, draft: Logits) -> PerPosition:
    """KL(q || p) in nats: mode-seeking, so the draft may leave out tokens that the target finds likely."""
    log_p, log_q = _log_probabilities(target, draft)
    return _expectation(log_q, log_q - log_p)


def jensen_shannon(target: Logits, draft: Logits, beta: float = 0.5) -> PerPosition:
    """Generalised Jensen-Shannon divergence in nats: b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q.

    At b = 1/2 it is symmetric and at most log 2.

    Raises:
        ValueError: `beta` outside 0..1, ends excluded.
    """
    if not 0 < beta < 1:
        raise ValueError(f"the beta of a Jensen-Shannon divergence lies between 0 and 1, found {beta}")
    log_p, log_q = _log_probabilities(target, draft)
    log_b, log_rest = torch.log(torch.tensor([beta, 1 - beta], dtype=log_p.dtype)).tolist()
    middle = torch.logaddexp(log_p + log_b, log_q + log_rest)
    return beta * _expectation(log_p, log_p - middle) + (1 - beta) * _expectation(log_q, log_q - middle)


def total_variation(target: Logits, draft: Logits) -> PerPosition:
    """Half the sum of |p - q|: one minus the probability that speculative sampling accepts a drafted token
    (DistillSpec, arXiv 2310.08461).

    Its gradient is the expectation, over tokens sampled from the draft, of 1{q > p} grad log q. It vanishes where p and
    q share no token, so an untrained draft should start with another divergence.
    """
    log_p, log_q = _log_probabilities(target, draft)
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def total_variation_plus(target: Logits, draft: Logits) -> PerPosition:
    """TVD++ (Goel et al., arXiv 2403.00858): the policy gradient of total variation with the reward 1{p > q}
    standardised over all positions.

    The result has that gradient; its value is a surrogate and no distance. The expectation over drafted tokens is
    exact, not sampled.
    """
    log_p, log_q = _log_probabilities(target, draft)
    q = log_q.detach().exp()
    reward = (log_p > log_q.detach()).to(q.dtype)
    mean = (q * reward).sum(-1).mean()
    # The reward is 0 or 1, so its variance under the draft follows from its mean.
    deviation = (mean * (1 - mean)).clamp_min(1e-6).sqrt()
    advantage = (reward - mean) / deviation
    return -(q * advantage * log_q).masked_fill(q == 0, 0).sum(-1)


def negative_log_acceptance(target: Logits, draft: Logits) -> PerPosition:
    """Minus the log of the probability that speculative sampling accepts a drafted token, in nats (arXiv 2602.23881).

    Its gradient is that of total variation divided by that probability: it is the cross-entropy where the target is
    certain, and does not vanish for a draft that shares little with the target.
    """
    log_p, log_q = _log_probabilities(target, draft)
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def acceptance_hybrid(target: Logits, draft: Logits) -> PerPosition:
    """KL(p || q) in nats where little is accepted, total variation where much is: the share of the former is
    exp(-3 a) for an acceptance probability of a, without a gradient (arXiv 2602.23881).
    """
    distance = total_variation(target, draft)
    share = torch.exp(-3 * (1 - distance.detach()))
    return share * forward_kl(target, draft) + (1 - share) * distance


def merge_tail(logits: Float[torch.Tensor, "*t v"], tokens: Int[torch.Tensor, "*t k"]) -> Float[torch.Tensor, "*t k1"]:
    """Log-probabilities of the given tokens and, last, of all others together: a distribution with k + 1 outcomes.

    Every divergence here may be taken between two such distributions; merging outcomes never increases it.
    """
    log_p = torch.log_softmax(logits, -1)
    some = log_p.gather(-1, tokens)
    rest = torch.log1p(-some.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([some, rest], -1)


def divergences(beta: float = 0.5) -> Mapping[str, Divergence]:
    """All divergences by the name that options use; `beta`: the parameter of `jsd`."""
    return {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jsd": partial(jensen_shannon, beta=beta),
        "tvd": total_variation,
        "tvd++": total_variation_plus,
        "nla": negative_log_acceptance,
        "lk_hybrid": acceptance_hybrid,
    }


def _log_probabilities(target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(draft.dtype, torch.float32)
    return torch.log_softmax(target.detach().to(wide), -1), torch.log_softmax(draft.to(wide), -1)


def _expectation(log_weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Sum of exp(log_weight) * value; a weight of zero contributes zero, even times infinity."""
    return (log_weight.exp() * value.masked_fill(log_weight == -torch.inf, 0)).sum(-1)
