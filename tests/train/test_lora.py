"""LoRA training of heads and target together: adapters are zero at first, can be merged, and fit the heads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell import load
from foretell.catalogue import BuildContext, build
from foretell.catalogue.heads import heads_method
from foretell.catalogue.options.heads import MedusaOptions
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.config.model import ModelConfig
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.load.transforms import DecoderTransform
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.speculator.checkpoint import load_own
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.heads import HeadsNetwork
from foretell.testing import TINY, RandomWeights, letter_codec
from foretell.train.data.batch import Batch
from foretell.train.data.features import compute_hidden_states
from foretell.train.recipe import RECIPES
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.heads import HeadsRecipe
from foretell.train.recipe.lora import HeadsWithLoRA
from helpers import all_logits, random_tokens

WIDE = replace(TINY, vocab=23, hidden=32, head_dim=8, tied=True)


class Toy(Checkpoint):
    """Random weights that can be read again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, RandomWeights(sharpness=0.1), torch.device("cpu"))

    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        return change(self.decoder(torch.float32))


def recipe_of(name: str, source: Checkpoint | None, config: ModelConfig = WIDE, **options: str) -> HeadsRecipe:
    ends = Toy(config).embedding_and_head(torch.float32)
    card = TargetInfo(name="toy", hidden=config.hidden, vocab=config.vocab, layers=config.layers)
    recipe = RECIPES[name].build(RecipeSetup(card, config, ends, source, None, 0, options, letter_codec(config.vocab)))
    assert isinstance(recipe, HeadsRecipe)
    return recipe


def batch() -> Batch:
    """A text that the target did not write."""
    token = torch.tensor([random_tokens(24, 23, seed=i) for i in range(4)])
    known = torch.ones_like(token, dtype=torch.bool)
    return Batch(token, known, compute_hidden_states(Toy(WIDE).decoder(torch.float32), token, (WIDE.layers + 1,)))


def learn(recipe: HeadsRecipe, data: Batch, steps: int) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(
        [{"params": g["params"], "lr": 1e-2 * float(str(g["lr_scale"]))} for g in recipe.parameter_groups()]
    )
    losses = []
    for step in range(steps):
        recipe.set_progress(step / steps)
        loss = recipe.loss(recipe.module, data)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(loss.metrics.get("target loss", -1.0))
    return losses


def test_nothing_is_changed_at_first_and_only_the_joint_stage_changes_anything() -> None:
    data, recipe = batch(), recipe_of("medusa", Toy(WIDE), tune="self", rank="4")
    tuned = recipe.module
    assert isinstance(tuned, HeadsWithLoRA)
    recipe.set_progress(0.4)
    recipe.loss(tuned, data).total.backward()
    assert all(p.grad is None or not p.grad.any() for p in tuned.adapters.parameters())
    assert any(p.grad is not None and p.grad.any() for p in tuned.network.parameters())
    recipe.set_progress(0.5)
    loss = recipe.loss(tuned, data)
    assert loss.metrics["target loss"] == pytest.approx(0, abs=1e-5)
    loss.total.backward()
    assert any(p.grad is not None and p.grad.any() for p in tuned.adapters.parameters())
    assert not any("decoder" in name for name in tuned.state_dict())


def test_added_changes_compute_what_was_trained() -> None:
    data, recipe = batch(), recipe_of("blockwise", Toy(WIDE), tune="text", rank="4", joint_from="0")
    learn(recipe, data, 8)
    tuned = recipe.module
    assert isinstance(tuned, HeadsWithLoRA)
    row, place = torch.arange(24) * 0, torch.arange(24)
    with torch.no_grad():
        logits, own = tuned(data.token[:1], data.features[0][:1], row, place, place, True)
    added = tuned.merge(Toy(WIDE).decoder(torch.float32))
    torch.testing.assert_close(own.double().numpy(), all_logits(added, data.token[0].tolist()), rtol=1e-3, atol=1e-3)
    states = compute_hidden_states(added, data.token[:1], recipe.hidden_layers)[0][0]
    torch.testing.assert_close(logits, recipe.network(states), rtol=1e-3, atol=1e-3)
    before = all_logits(Toy(WIDE).decoder(torch.float32), data.token[0].tolist())
    assert abs(before - own.double().numpy()).max() > 0.05


@pytest.mark.parametrize("name", ["medusa", pytest.param("blockwise", marks=pytest.mark.exhaustive)])
def test_tuned_target_and_heads_are_written_and_work_together(name: str, tmp_path: Path) -> None:
    data = batch()
    recipe = recipe_of(name, Toy(WIDE), tune="text", rank="8", joint_from="0.2", heads="3")
    losses = learn(recipe, data, 80)
    assert losses[0] == -1
    assert losses[-1] < losses[20] - 1
    recipe.save(tmp_path)
    model = load(str(tmp_path / "target"), dtype="float32")
    network = load_own(tmp_path, model.checkpoint.embedding_and_head(torch.float32))
    assert isinstance(network, HeadsNetwork)
    texts = []
    for method in (
        build("autoregressive", BuildContext(23, None)),
        heads_method(network, MedusaOptions(num_draft_tokens=24)),
    ):
        engine = Engine(model.runner(), method)
        requests = [Request(tuple(data.token[i, :4].tolist()), max_new_tokens=21) for i in range(4)]
        found = engine.complete(requests)
        texts.append([done.tokens for done in found])
    assert texts[0] == texts[1]
    assert max(done.statistics.tokens_per_pass for done in found) > 1.5
    measured = recipe.target_runner()
    assert isinstance(measured, DecoderRunner)
    torch.testing.assert_close(
        all_logits(measured.network, texts[0][0]), all_logits(model.network, texts[0][0]), rtol=0.05, atol=0.1
    )


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the target's checkpoint"):
        recipe_of("medusa", None, tune="self")
    odd = replace(WIDE, qk_norm=True)
    with pytest.raises(ValueError, match="Llama architecture"):
        recipe_of("medusa", Toy(odd), odd, tune="self")
