"""Divergences against their definitions in float64, their bounds, and their gradients."""

import math

import numpy as np
import pytest
import torch

from foretell.distributions.divergence import (
    acceptance_hybrid,
    divergences,
    forward_kl,
    jensen_shannon,
    merge_tail,
    negative_log_acceptance,
    reverse_kl,
    total_variation,
    total_variation_plus,
)

V = 6


def pair(seed: int = 0, positions: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(positions, V, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def distributions(*logits: torch.Tensor) -> list[np.ndarray]:
    return [torch.softmax(x, -1).numpy() for x in logits]


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    out: np.ndarray = (p * np.log(p / q)).sum(-1)
    return out


def test_values_are_those_of_the_definitions() -> None:
    target, draft = pair()
    p, q = distributions(target, draft)
    np.testing.assert_allclose(forward_kl(target, draft), kl(p, q))
    np.testing.assert_allclose(reverse_kl(target, draft), kl(q, p))
    np.testing.assert_allclose(total_variation(target, draft), 1 - np.minimum(p, q).sum(-1))
    for beta in (0.1, 0.5, 0.9):
        middle = beta * p + (1 - beta) * q
        expected = beta * kl(p, middle) + (1 - beta) * kl(q, middle)
        np.testing.assert_allclose(jensen_shannon(target, draft, beta), expected)


def test_acceptance_losses_are_those_of_the_acceptance_probability() -> None:
    target, draft = pair(8)
    accepted = 1 - total_variation(target, draft)
    torch.testing.assert_close(negative_log_acceptance(target, draft), -accepted.log())
    share = torch.exp(-3 * accepted)
    mixed = share * forward_kl(target, draft) + (1 - share) * (1 - accepted)
    torch.testing.assert_close(acceptance_hybrid(target, draft), mixed)
    slopes = gradient(negative_log_acceptance, target, draft), gradient(total_variation, target, draft)
    torch.testing.assert_close(slopes[0], slopes[1] / accepted[:, None])
    certain = torch.zeros(1, V, dtype=torch.float64)
    certain[:, 2] = 200.0
    torch.testing.assert_close(negative_log_acceptance(certain, draft[:1]), -draft[:1].log_softmax(-1)[:, 2])


def test_bounds_symmetry_and_pinsker() -> None:
    target, draft = pair(1, 500)
    variation, divergence = total_variation(target, draft), forward_kl(target, draft)
    assert ((variation >= 0) & (variation <= 1)).all() and (divergence >= 0).all()
    assert (variation <= (divergence / 2).sqrt()).all()
    even = jensen_shannon(target, draft)
    torch.testing.assert_close(even, jensen_shannon(draft, target))
    assert (even <= math.log(2)).all()
    torch.testing.assert_close(jensen_shannon(target, draft, 0.3), jensen_shannon(draft, target, 0.7))


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "tvd", "nla", "lk_hybrid"])
def test_zero_if_and_only_if_equal(name: str) -> None:
    target, draft = pair(2)
    function = divergences()[name]
    assert function(target, target + 3).abs().max() < 1e-12
    assert function(target, draft).min() > 1e-3


def test_disjoint_distributions_have_the_largest_divergences_and_no_nan() -> None:
    inf = float("inf")
    target = torch.tensor([[0.0, -inf, -inf]], dtype=torch.float64)
    draft = torch.tensor([[-inf, 0.0, 0.0]], dtype=torch.float64)
    assert total_variation(target, draft).item() == pytest.approx(1)
    assert jensen_shannon(target, draft).item() == pytest.approx(math.log(2))
    assert forward_kl(target, draft).item() == inf and reverse_kl(target, draft).item() == inf


def gradient(function: object, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    draft = draft.clone().requires_grad_(True)
    function(target, draft).sum().backward()  # type: ignore[operator]
    assert draft.grad is not None
    return draft.grad


def score_gradient(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of q * weight * (gradient of log q by the logits)."""
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    return torch.einsum("tx,txv->tv", q * weight, eye - q[:, None])


def test_gradients_are_those_of_the_score_expressions() -> None:
    target, draft = pair(3)
    p, q = torch.softmax(target, -1), torch.softmax(draft, -1)
    torch.testing.assert_close(gradient(forward_kl, target, draft), q - p)
    torch.testing.assert_close(gradient(reverse_kl, target, draft), score_gradient(q, (q / p).log()))
    torch.testing.assert_close(gradient(total_variation, target, draft), score_gradient(q, (q > p).double()))
    reward = (p > q).double()
    mean = (q * reward).sum(-1).mean()
    standard = (reward - mean) / (mean * (1 - mean)).sqrt()
    torch.testing.assert_close(gradient(total_variation_plus, target, draft), -score_gradient(q, standard))


def test_the_policy_gradient_is_the_mean_over_drafted_tokens() -> None:
    """TVD++ as published draws tokens from the draft; the expectation taken here is what such draws average to."""
    target, draft = pair(4, 1)
    p, q = torch.softmax(target, -1)[0], torch.softmax(draft, -1)[0]
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    reward = (p > q).double()[drawn]
    standard = (reward - reward.mean()) / reward.std(correction=0)
    counted = torch.zeros(V, dtype=torch.float64).index_add_(0, drawn, standard) / len(drawn)
    sampled = -(counted - q * counted.sum())
    torch.testing.assert_close(gradient(total_variation_plus, target, draft)[0], sampled, atol=5e-3, rtol=0)


@pytest.mark.parametrize("name", sorted(divergences()))
def test_following_the_gradient_raises_acceptance_and_leaves_the_target_alone(name: str) -> None:
    target, draft = pair(5)
    target.requires_grad_(True)
    before = total_variation(target, draft).mean()
    draft.requires_grad_(True)
    for _ in range(300):
        draft.grad = None
        divergences()[name](target, draft).sum().backward()
        assert draft.grad is not None and draft.grad.isfinite().all()
        draft.data -= 0.3 * draft.grad
    assert total_variation(target, draft).mean() < 0.7 * before
    assert target.grad is None


def test_half_precision_is_computed_in_float32() -> None:
    target, draft = (x.bfloat16() for x in pair(6))
    assert forward_kl(target, draft).dtype == torch.float32


def test_merging_outcomes_never_makes_a_divergence_larger_and_merging_none_keeps_it() -> None:
    target, draft = pair(7)
    best = target.topk(3, -1).indices
    merged = merge_tail(target, best), merge_tail(draft, best)
    torch.testing.assert_close(merged[0].exp().sum(-1), torch.ones(len(target), dtype=torch.float64))
    for name in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        function = divergences()[name]
        assert (function(*merged) <= function(target, draft) + 1e-9).all()
    all_tokens = target.topk(V, -1).indices
    whole = forward_kl(merge_tail(target, all_tokens), merge_tail(draft, all_tokens))
    torch.testing.assert_close(whole, forward_kl(target, draft), atol=1e-4, rtol=0)


def test_one_minus_total_variation_is_the_rate_at_which_the_rejection_test_accepts() -> None:
    target, draft = pair(8, 1)
    p, q = distributions(target, draft)
    rng = np.random.default_rng(0)
    drawn = rng.choice(V, 40_000, p=q[0] / q[0].sum())
    accepted = (rng.random(40_000) * q[0][drawn] <= p[0][drawn]).mean()
    expected = 1 - total_variation(target, draft).item()
    assert abs(accepted - expected) < 4 * math.sqrt(expected * (1 - expected) / 40_000)


def test_a_beta_at_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, found 1"):
        jensen_shannon(*pair(), beta=1)
