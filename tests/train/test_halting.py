"""Halting of exits: distributions over depths, oracles, the policy's rewards, and classifiers trained towards them."""

import pytest
import torch
from test_exits import TOKENS, VOCAB, exits_for, states

from foretell.draft.exit_heads import TrainedExits
from foretell.speculator.network.exits import Exits, Halting
from foretell.train.exits.classifiers import HaltingSettings, fit_classifiers, measure_outcomes
from foretell.train.exits.fit import fit_linear, target_tokens
from foretell.train.exits.halting import (
    ROLLOUTS,
    ExitOutcomes,
    geometric_distribution,
    memorized_exits,
    multinomial_distribution,
    oracle_exits,
    policy_loss,
    policy_rewards,
    sequence_exits,
    smooth,
)
from foretell.train.exits.states import LayerStates


def outcomes(tokens: int = 60, seed: int = 0) -> ExitOutcomes:
    torch.manual_seed(seed)
    likelihood = -torch.rand(tokens, 4) * torch.tensor([4.0, 3.0, 2.0, 1.0])
    correct = torch.rand(tokens, 4) < torch.tensor([0.3, 0.5, 0.7, 1.1])
    return ExitOutcomes(likelihood, correct, torch.tensor([0.25, 0.5, 0.75, 1.0]))


@pytest.mark.parametrize("distribution", [geometric_distribution, multinomial_distribution])
def test_the_depths_are_a_distribution_with_the_rest_at_the_last_layer(distribution: object) -> None:
    score = 3 * torch.randn(50, 3)
    q = distribution(score).exp()  # type: ignore[operator]
    assert q.shape == (50, 4)
    torch.testing.assert_close(q.sum(-1), torch.ones(50))
    never = distribution(torch.full((1, 3), -80.0)).exp()  # type: ignore[operator]
    torch.testing.assert_close(never, torch.tensor([[0.0, 0, 0, 1]]))


def test_geometric_depths_are_those_of_independent_decisions() -> None:
    chi = torch.tensor([[0.25, 0.5, 0.8]])
    q = geometric_distribution(torch.logit(chi)).exp()
    torch.testing.assert_close(q, torch.tensor([[0.25, 0.75 * 0.5, 0.75 * 0.5 * 0.8, 0.75 * 0.5 * 0.2]]))


@pytest.mark.parametrize("oracle", ["likelihood", "correctness"])
def test_oracles_run_fewer_layers_the_more_these_cost(oracle: str) -> None:
    found = outcomes()
    depth = [found.depth[oracle_exits(found, oracle, p)].mean() for p in (0.0, 0.5, 2.0, 1e6)]  # type: ignore[arg-type]
    assert depth == sorted(depth, reverse=True) and depth[-1] == 0.25
    free = oracle_exits(found, oracle, 0.0)  # type: ignore[arg-type]
    worth = found.likelihood if oracle == "likelihood" else found.correct.float()
    assert torch.equal(free, worth.argmax(-1)), "of equals the first"


def test_smoothing_is_a_mean_over_neighbours_within_a_document() -> None:
    value = outcomes().likelihood
    assert torch.equal(smooth(value, 0.0, [60]), value)
    torch.testing.assert_close(smooth(value, 1e-6, [20, 40]), value)
    wide = smooth(value, 1e9, [20, 40])
    torch.testing.assert_close(wide[:20], value[:20].mean(0).expand(20, -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(wide[20:], value[20:].mean(0).expand(40, -1), atol=1e-5, rtol=1e-5)
    assert sequence_exits(outcomes(), "likelihood", 1e6, [20, 40]).tolist() == [0, 0]
    assert sequence_exits(outcomes(), "likelihood", 0.0, [20, 40]).tolist() == [3, 3]


def test_the_memorized_exit_is_the_first_from_which_all_are_right() -> None:
    correct = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]).bool()
    assert memorized_exits(correct).tolist() == [0, 1, 2, 3, 4]


def test_depth_costs_easy_tokens_only_and_nothing_without_a_penalty() -> None:
    found, exits = outcomes(), torch.arange(4).expand(60, 4)
    torch.testing.assert_close(policy_rewards(found, exits, 0.0), found.likelihood)
    costs = found.likelihood - policy_rewards(found, exits, 2.0)
    hard = memorized_exits(found.correct) >= 3
    assert costs[hard].abs().max() < 1e-6 and (costs[~hard].diff(dim=1) > 0).all()


def test_equal_rollouts_give_no_gradient_and_a_penalty_leads_to_the_first_exit() -> None:
    generator = torch.Generator().manual_seed(0)
    same = ExitOutcomes(torch.zeros(30, 4), torch.ones(30, 4).bool(), outcomes().depth)
    score = torch.zeros(30, 3, requires_grad=True)
    policy_loss(score, same, 0.0, generator).backward()
    assert score.grad is not None and score.grad.abs().max() == 0, "all depths have the same reward"
    bias = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([bias], 0.1)
    for _ in range(150):
        optimizer.zero_grad()
        policy_loss(bias.expand(30, 3), same, 5.0, generator).backward()
        optimizer.step()
    q = geometric_distribution(bias[None]).exp()[0]
    assert q[0] > 0.8 and ROLLOUTS == 8


def test_only_the_difference_to_the_mean_reward_counts() -> None:
    """The baseline: rewards that are higher everywhere give the same gradient (ConsistentEE)."""
    found, gradients = outcomes(), list[torch.Tensor]()
    for shift in (0.0, 7.0):
        score = torch.zeros(60, 3, requires_grad=True)
        raised = ExitOutcomes(found.likelihood + shift, found.correct, found.depth)
        policy_loss(score, raised, 0.5, torch.Generator().manual_seed(1)).backward()
        assert score.grad is not None
        gradients.append(score.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)
    assert gradients[0].abs().max() > 1e-4


def _fitted(halting: Halting, penalty: float) -> tuple[Exits, LayerStates]:
    found = states(noise=0.4)
    exits = exits_for(halting=halting)
    fit_linear(exits, found)
    fit_classifiers(exits, found, target_tokens(exits.lm_head, found), HaltingSettings(halting, "likelihood", penalty))
    return exits, found


def _mean_depth(exits: Exits, found: LayerStates, halting: Halting) -> float:
    depth, heads = torch.tensor([0.25, 0.75, 1.0]), TrainedExits(exits)
    if halting in ("token", "sequence"):
        assert heads.chooses_depth and heads.chooses_once is (halting == "sequence")
        below = heads.depth_distribution(found.layers[0].float())
        q = torch.diff(below, dim=1, prepend=torch.zeros(len(below), 1), append=torch.ones(len(below), 1))
    else:
        scores = [exits.exit_score(i, h.float()) for i, h in enumerate(found.layers)]
        q = geometric_distribution(torch.stack(scores, 1)).exp()
    torch.testing.assert_close(q.sum(-1), torch.ones(len(q)))
    return float((q @ depth).mean())


@pytest.mark.parametrize(
    "halting",
    ["policy", "sequence", *(pytest.param(f"{n}", marks=pytest.mark.exhaustive) for n in ("geometric", "token"))],
)
def test_trained_classifiers_stop_earlier_the_more_layers_cost(halting: Halting) -> None:
    cheap, dear = (_mean_depth(*_fitted(halting, penalty), halting) for penalty in (0.0, 30.0))
    assert dear < 0.55 < 0.75 < cheap


def test_outcomes_count_tokens_outside_the_draft_vocabulary_as_unlikely_and_wrong() -> None:
    found, exits = states(), exits_for(draft_vocab=20)
    exits.set_draft_vocab(torch.arange(20))
    fit_linear(exits, found)
    own = target_tokens(exits.full_lm_head, found)
    measured = measure_outcomes(exits, found, own)
    outside = own >= 20
    assert 0 < outside.sum() < TOKENS == len(own) and VOCAB == 40
    assert (measured.likelihood[outside, :-1] == -20).all() and not measured.correct[outside, :-1].any()
    assert measured.correct[:, -1].all() and measured.depth.tolist() == [0.25, 0.75, 1.0]
    assert (measured.likelihood[~outside] > -20).all()
