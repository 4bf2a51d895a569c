"""Training UNO's adapters: a step sees what drafting sees, and what is written drafts better than a new adapter."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import answers, losses, settings, target, task, trained

from command import expect_error, run_foretell, tiny_target
from foretell.draft import UnoDrafter
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.load import load_draft
from foretell.model.training.full_forward import full_forward
from foretell.speculator.network.low_rank import LoRAUpdate
from foretell.train.data.batch import Batch
from foretell.train.loop.measure import measure
from foretell.train.recipe.uno import UnoRecipe
from helpers import random_tokens, unchecked
from uno_recording import Recording

OPTIONS = {"rank": "8", "depth": "3"}


def recipe_of(out: Path, **options: str) -> UnoRecipe:
    """A recipe whose adapter changes what it is read with."""
    recipe = task(settings(out, recipe="uno", options=OPTIONS | options)).recipe
    assert isinstance(recipe, UnoRecipe)
    torch.manual_seed(3)
    for update in recipe.network.adapters:
        assert isinstance(update, LoRAUpdate)
        torch.nn.init.normal_(update.up, std=0.3)
    return recipe


def test_a_step_sees_what_drafting_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several cuts of a text at once, each with its random tokens, against drafts of the adapter that was written."""
    recipe, model = recipe_of(tmp_path, depth="4"), target(str(tiny_target()))
    recipe.save(tmp_path)
    monkeypatch.setattr(Budget, "governs", lambda self, bound: False)  # it drafts at any cost
    method = model.method("pard", {"num_steps": 4}, drafts=[load_draft(str(tmp_path))])
    drafter = method.draft
    assert isinstance(drafter, UnoDrafter)
    drafter.__class__, drafter.noted = Recording, {}  # type: ignore[attr-defined]
    with unchecked():
        done = Engine(model.runner(), method).complete([Request(random_tokens(9, 256, seed=1), max_new_tokens=20)])[0]
    noted: dict[tuple[int, ...], tuple[torch.Tensor, list[int]]] = drafter.noted  # type: ignore[attr-defined]
    text = torch.tensor([[*random_tokens(9, 256, seed=1), *done.tokens]])
    assert len(noted) > 3 and all(tuple(text[0, : len(key)].tolist()) == key for key in noted)
    cut = torch.tensor([[len(key) - 1 for key in noted]])
    noise = torch.tensor([[drawn for _, drawn in noted.values()]])
    with torch.no_grad():
        found = recipe.network.compute_logits(recipe.network(recipe._setup.decoder, text, cut, noise))[0]
    plain = task(settings(tmp_path / "new", recipe="uno", options=OPTIONS)).recipe
    with torch.no_grad():
        unadapted = plain.network.compute_logits(plain.network(recipe._setup.decoder, text, cut, noise))[0]
    for ours, new, (logits, _) in zip(found, unadapted, noted.values(), strict=True):
        torch.testing.assert_close(ours, logits[1:].float(), atol=1e-4, rtol=0)
        assert (new - ours).abs().max() > 0.1


def test_the_loss_is_the_mean_over_the_random_tokens_of_the_total_variation(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, anchors="200", candidates="0")
    assert recipe.options.objective == "tvd"
    model = target(str(tiny_target()))
    token = torch.tensor([random_tokens(10, 256, seed=2)])
    decoder = recipe._setup.decoder
    mask = torch.zeros_like(token, dtype=torch.bool)
    mask[:, 4:] = True
    state = decoder.final_norm(full_forward(decoder, decoder.embed(token[0])[None]))
    torch.manual_seed(7)
    loss = recipe.loss(recipe.network, Batch(token, mask, (state,)))
    torch.manual_seed(7)
    teacher = (state @ decoder.head.weight.T).float().softmax(-1)[0]
    torch.rand(1, 9)
    noise = torch.randint(1, recipe._tokens, (1, 6, 2))
    assert model.config.vocab >= recipe._tokens and loss.total.requires_grad
    # Positions 3 to 8 have labels; the last of them has none for the second random token.
    order = torch.rand(1, 9, generator=torch.Generator().manual_seed(7))
    order[:, :3] = -1
    sums = []
    for i, anchor in enumerate(order.topk(6, -1).indices[0].tolist()):
        with torch.no_grad():
            states = recipe.network(decoder, token[:, :anchor], torch.tensor([[anchor - 1]]), noise[:, i : i + 1])
            law = recipe.network.compute_logits(states)[0, 0].softmax(-1)
        sums += [float((law[j] - teacher[anchor + j]).abs().sum()) / 2 for j in range(2) if anchor + j < 9]
    assert len(sums) == 11
    assert float(loss.total.detach()) == pytest.approx(sum(sums) / len(sums), rel=1e-4)


def test_more_is_accepted_after_training_and_what_is_written_is_peft(tmp_path: Path) -> None:
    model = target(str(tiny_target()))
    data = answers(tmp_path / "data", model, texts=8)
    wanted = settings(
        tmp_path / "out", data, recipe="uno", options=OPTIONS | {"objective": "cross_entropy", "hard": "1"}, steps=100,
        lr=3e-2, batch_tokens=200, measure_every=0, measure_prompts=1, measure_tokens=8,
    )  # fmt: skip
    new, done = task(wanted).recipe, trained(wanted)
    found = losses(done)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])
    job = done.job
    prompts = [document.tokens[: document.start].tolist() for document in job.data[0]]
    with unchecked():
        before, after = (
            measure(model.runner(), recipe.method(recipe.network), prompts, 24, ()) for recipe in (new, job.recipe)
        )
    # A pass gives two tokens but the first; a new adapter guesses none of the others.
    assert before.tokens_per_pass < 1.9 and after.tokens_per_pass > 1.95 and after.accepted[1] > 0.1
    said = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 8, 16)
    parts = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert set(said["target_modules"]) == parts
    names = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert len(names) == 2 * 7 * model.config.layers
    assert names["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == 8
    common = ("generate", "abc", "--raw", "--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "4")
    drafting = "--method", "pard", "--draft-model", tmp_path / "out"
    with unchecked():
        texts = [run_foretell(*common, *more).stdout for more in ((), drafting)]
        error = expect_error(*common, "--method", "eagle3", "--draft-model", tmp_path / "out")
    assert len(set(texts)) == 1 and "" not in texts
    assert f"{tmp_path / 'out'}: an adapter, with which --method pard lets the target itself draft (UNO)" in error
