"""Objectives of the trainers: their definitions, and that each raises what speculative sampling accepts."""

from pathlib import Path

import pytest
import torch
from training_helpers import losses, settings, trained

from foretell.distributions.divergence import forward_kl, negative_log_acceptance, total_variation
from foretell.train.objective.distillation import label_losses
from foretell.train.objective.stages import label_loss


def test_a_loss_is_the_objective_and_a_share_of_the_best_token() -> None:
    draft, target = torch.randn(3, 4, 9), 2 * torch.randn(3, 4, 9)
    best = -draft.log_softmax(-1).gather(-1, target.argmax(-1, keepdim=True))[..., 0]
    p = target.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    torch.testing.assert_close(label_losses(draft, target), forward_kl(target, draft) + entropy)
    torch.testing.assert_close(label_losses(draft, target, 1.0, "nla"), best)
    mixed = 0.75 * negative_log_acceptance(target, draft) + 0.25 * best
    torch.testing.assert_close(label_losses(draft, target, 0.25, "nla"), mixed)
    stage = label_loss(draft[0], target[0].argmax(-1), target[0].softmax(-1), 1.0, "tvd")
    torch.testing.assert_close(stage, total_variation(target[0], draft[0]))


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        pytest.param("eagle", "tvd", marks=pytest.mark.exhaustive),
        pytest.param("eagle3", "nla", marks=pytest.mark.exhaustive),
        pytest.param("dflash", "nla", marks=pytest.mark.exhaustive), ("mlp_speculator", "lk_hybrid"),
    ],
)  # fmt: skip
def test_every_kind_learns_what_is_accepted(tmp_path: Path, kind: str, objective: str) -> None:
    options = {"objective": objective} | ({"inner": "32", "soft": "1"} if kind == "mlp_speculator" else {})
    done = trained(settings(tmp_path, recipe=kind, options=options, steps=30, lr=1e-2, measure_every=0))
    found = losses(done)
    assert sum(found[-5:]) < 0.95 * sum(found[:5])
