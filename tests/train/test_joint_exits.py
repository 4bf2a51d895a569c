"""Exits that are trained together on a network that they share."""

import pytest
from test_exits import exits_for, states
from training_helpers import shared

from command import expect_error, run_foretell, tiny_target
from foretell.train.exits.fit import evaluate, fit_linear, target_tokens
from foretell.train.exits.joint import JointSettings, parse_weights, train_jointly


def test_weights_are_named_or_given_and_may_rise() -> None:
    assert parse_weights("uniform", (1, 3)) == (0.5, 0.5) and parse_weights("linear", (1, 3)) == (0.25, 0.75)
    assert parse_weights("0.1,0.2", (1, 3)) == (0.1, 0.2)
    for wrong in ("0.1", "0.1,x", "0.1,0", "0.1,nan", "deep"):
        with pytest.raises(ValueError, match=r"--exit-weights .*: uniform, linear, or a number above 0 for each of"):
            parse_weights(wrong, (1, 3))
    rising = JointSettings((0.5, 0.5), 0.5)
    assert rising.at(0, 8) == (0.125, 0.5) and rising.at(3, 8) == (0.5, 0.5) == rising.at(7, 8)


def test_joint_training_lowers_the_loss() -> None:
    exits, found = exits_for(inner=8, shared_inner=True), states(noise=0.4)
    assert len(exits.up) == len(exits.down) == 1 and len(exits.maps) == 2
    fit_linear(exits, found)
    own = target_tokens(exits.lm_head, found)
    before, losses = evaluate(exits, found, own), list[float]()
    weights = JointSettings((0.5, 0.5))
    train_jointly(exits, found, 60, 3e-3, 0, weights, lambda step, loss: losses.append(loss))
    after = evaluate(exits, found, own)
    assert sum(losses[50:]) < sum(losses[:10]) and after[0].agreement[0] > before[0].agreement[0]
    assert not any(p.requires_grad for p in exits.parameters())


def test_the_command_trains_exits_together(tmp_path: object) -> None:
    out = f"{tmp_path}/exits"
    options = "--layers", "1", "--steps", "2", "--inner", "4", "--joint", "--draft-vocab", "64"
    fitted = run_foretell("train", "exits", tiny_target(), "--out", out, "--data", shared(), *options)
    assert fitted.exit_code == 0, (fitted.output, fitted.exception)
    assert "| layers | same token |" in fitted.stdout
    text = expect_error("train", "exits", tiny_target(), "--out", out, "--data", shared(), "--joint")
    assert "--joint trains a feed-forward network that all exits share; give its width with --inner" in text
    text = expect_error(
        "train", "exits", tiny_target(), "--out", f"{out}2", "--data", shared(), *options, "--exit-weights", "1,2"
    )
    assert "a number above 0 for each of the 1 exits" in text
