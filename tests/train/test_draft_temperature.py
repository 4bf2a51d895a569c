"""Temperatures of speculators: states and the tokens that follow them, the fit, and the command."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from command import expect_error, run_foretell, save_tiny_model
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.speculator.checkpoint import load_own
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.speculator.network.eagle import EagleNetwork
from foretell.train.data.dataset import Document
from foretell.train.draft_states import STEPS, DraftStates, draft_states
from foretell.train.draft_temperature import best_temperature, calibration, fit_temperature, temperature_network
from helpers import random_tokens, speculator, target

DOCUMENTS = [Document(np.array(random_tokens(30, seed=i)), start=4 + i) for i in range(12)]


def network_of(kind: str) -> EagleNetwork | DraftNetwork:
    loaded = load_own(speculator(kind), embedding_and_head_of(target()))
    return temperature_network(loaded.double())


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_states_stand_beside_the_tokens_that_they_predict(kind: str) -> None:
    document, first = DOCUMENTS[2], 5
    found = draft_states(target(), network_of(kind), [document], 1000)
    tokens = document.tokens.tolist()
    after = [tokens[first + 1 + i :] for i in range(STEPS if kind == "eagle3" else 1)]
    assert found.following.tolist() == [t for part in after for t in part]


@pytest.mark.parametrize("drawn_with", [0.5, 2.0])
def test_the_best_temperature_is_that_with_which_the_tokens_were_drawn(drawn_with: float) -> None:
    network = network_of("eagle3")
    inputs = draft_states(target(), network, DOCUMENTS, 1000).inputs.double().repeat(10, 1) * 8
    generator = torch.Generator().manual_seed(0)
    probability = (network.compute_logits(inputs) / drawn_with).softmax(-1)
    states = DraftStates(inputs, torch.multinomial(probability, 1, generator=generator)[:, 0])
    found = best_temperature(network, states)
    assert found == pytest.approx(drawn_with, rel=0.1)
    least = calibration(network, states, found).loss
    assert least < min(calibration(network, states, factor * found).loss for factor in (0.9, 1.1))
    sure = calibration(network, states, found)
    assert sure.confidence == pytest.approx(sure.right, abs=0.05)


def written_by(network: DraftNetwork, seed: int) -> Document:
    """A text that a draft model wrote at temperature 2."""
    tokens, generator = random_tokens(4, seed=seed), torch.Generator().manual_seed(seed)
    assert network.token_of is not None
    for _ in range(24):
        logits = network.compute_logits(network.hidden_states(torch.tensor([tokens]))[0, -1])
        tokens.append(int(network.token_of[torch.multinomial((logits / 2).softmax(-1), 1, generator=generator)]))
    return Document(np.array(tokens), start=4)


def test_the_fitted_temperature_is_part_of_the_norm() -> None:
    network = network_of("draft_model")
    assert isinstance(network, DraftNetwork)
    network.norm.weight.data.mul_(8)
    documents, weight = [written_by(network, i) for i in range(16)], network.norm.weight.detach().clone()
    found = fit_temperature(target(), network, documents, 1000)
    assert found.temperature == pytest.approx(2, rel=0.3)
    torch.testing.assert_close(network.norm.weight, weight / found.temperature)
    again = fit_temperature(target(), network, documents, 1000)
    assert again.before.loss == pytest.approx(found.after.loss, rel=1e-4)
    assert again.temperature == pytest.approx(1, abs=1e-3)


def test_the_command_writes_a_speculator_whose_text_is_the_same(tmp_path: Path) -> None:
    model, data, sizes = save_tiny_model(tmp_path / "target"), tmp_path / "answers", ("--tokens", "300")
    written = run_foretell("data", "generate", "--model", model, "--self", *sizes, "--max-answer", "40", "--out", data)
    assert written.exit_code == 0, written.output
    small = ("--draft-vocab", "100", "--batch-tokens", "64", "--sequence", "64", "--warmup", "1", "--steps", "2")
    measured = ("--measure-every", "0", "--measure-prompts", "1", "--measure-tokens", "4", "--set", "layers=1")
    draft, out, given = tmp_path / "draft", tmp_path / "calibrated", ("--model", model, "--data", data)
    trained = run_foretell("train", "draft_model", *given, *small, *measured, "--out", draft)
    assert trained.exit_code == 0, trained.output
    done = run_foretell("calibrate", "temperature", draft, *given, "--out", out)
    assert done.exit_code == 0 and "the most probable token is right in" in done.output, done.output
    before, after = (load_file(folder / "model.safetensors")["norm.weight"].float() for folder in (draft, out))
    ratio = before / after
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=0.02, atol=0)
    few = ("--samples", "60", "--max-new-tokens", "8")
    checked = run_foretell("verify", "dynamic_tree", "--model", model, "--draft-model", out, *few)
    assert checked.exit_code == 0, checked.output
    assert "there is something already" in expect_error("calibrate", "temperature", draft, *given, "--out", out)


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator", "eagle"])
def test_kinds_without_a_norm_of_their_own_before_the_head_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"for draft_model and eagle3, and this is a speculator of kind {kind}"):
        temperature_network(load_own(speculator(kind), embedding_and_head_of(target())))
