"""Training layers of multi-token prediction for a target whose checkpoint has none."""

from pathlib import Path

import pytest
from training_helpers import losses, settings, target, task, trained

from foretell.draft import MTPDrafter, MTPModulesDrafter
from foretell.speculator.network.mtp import MTPNetwork


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_loss_falls_and_drafts_are_accepted(layers: int, tmp_path: Path) -> None:
    wanted = settings(
        tmp_path / "mtp", recipe="mtp", options={"layers": str(layers), "hard": "1"}, steps=40, lr=1e-2,
        measure_every=0,
    )  # fmt: skip
    done = trained(wanted)
    found, network = losses(done), done.job.recipe.network
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    assert done.best > 1.15
    assert isinstance(network, MTPNetwork)
    method = done.job.recipe.method(network)
    model = target(wanted.model)
    named = model.method("mtp", {"num_draft_tokens": 6}, drafts=[tmp_path / "mtp"])
    plain, drafted = (model.generate("Hi", m, max_new_tokens=24, ignore_eos=True) for m in ("autoregressive", named))
    assert drafted[0].tokens == plain[0].tokens
    assert isinstance(method.draft, MTPModulesDrafter if layers > 1 else MTPDrafter)


def test_several_layers_learn_one_token_each(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps=3: 2 layers predict one token each; only a single layer predicts more"):
        task(settings(tmp_path, recipe="mtp", options={"layers": "2", "steps": "3"}))
