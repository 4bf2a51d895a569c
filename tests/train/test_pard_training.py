"""Training PARD and PARD-2: the loss falls, drafts of one pass are accepted, and it may start from a draft model."""

from pathlib import Path

import pytest
from training_helpers import losses, settings, task, trained

from foretell.draft import Pard2Drafter
from foretell.speculator.network.pard import PardNetwork

OPTIONS = {"layers": "1", "depth": "4", "hard": "1"}


def test_it_starts_from_a_draft_model_and_more_than_one_token_is_accepted(tmp_path: Path) -> None:
    draft = settings(tmp_path / "draft", recipe="draft_model", options={"layers": "1"}, steps=30, measure_every=0)
    trained(draft)
    wanted = settings(
        tmp_path / "pard", recipe="pard", options=OPTIONS, steps=70, lr=1e-2, measure_every=0, draft_vocab=None,
        init_from=str(tmp_path / "draft"),
    )  # fmt: skip
    done = trained(wanted)
    found = losses(done)
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    assert done.best > 1.15
    assert done.job.recipe.network.token_of is not None


def test_the_states_of_the_target_are_learned_from(tmp_path: Path) -> None:
    """PARD-2, from a draft model; it drafts with the states."""
    trained(settings(tmp_path / "draft", recipe="draft_model", options={"layers": "1"}, steps=30, measure_every=0))
    wanted = settings(
        tmp_path / "pard2", recipe="pard", options=OPTIONS | {"states": "1,3"}, steps=40, lr=1e-2, measure_every=0,
        draft_vocab=None, init_from=str(tmp_path / "draft"),
    )  # fmt: skip
    done = trained(wanted)
    network = done.job.recipe.network
    assert isinstance(network, PardNetwork) and network.state_projection is not None
    assert network.state_projection.layers == (1, 3) and network.state_projection.weight.abs().max() > 0
    assert done.best > 1.15
    method = done.job.recipe.method(network)
    assert isinstance(method.draft, Pard2Drafter)


def test_layers_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state_layers should be hidden layers 0 to 1 of the target, or 3 .*\[1, 2\]"):
        task(settings(tmp_path, recipe="pard", options=OPTIONS | {"states": "1,2"}))
