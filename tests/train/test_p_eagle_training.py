"""Training P-EAGLE: the loss falls, and a set learned by heart is drafted in one pass."""

from pathlib import Path

from training_helpers import losses, settings, trained

OPTIONS = {"layers": "1", "depth": "4", "ffn": "64", "hard": "1"}


def test_the_loss_falls_and_more_than_one_token_is_accepted(tmp_path: Path) -> None:
    wanted = settings(tmp_path, recipe="p_eagle", options=OPTIONS, steps=70, lr=2e-2, measure_every=0, draft_vocab=0)
    done = trained(wanted)
    found = losses(done)
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    assert done.best > 1.15
    assert set(done.curve[-1].metrics) >= {"depth 1 top 1", "depth 4 top 1"}
