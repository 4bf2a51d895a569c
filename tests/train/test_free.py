"""FREE's training: a model whose first layers answer alone more often, and what it costs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import shared

from command import expect_error, run_foretell, tiny_target
from foretell.model.training.full_forward import full_forward
from foretell.train.data.dataset import Document
from foretell.train.exits.shallow_deep import (
    ShallowDeepSettings,
    align_layers,
    shallow_deep_loss,
    shallow_quality,
    teacher_layers,
    train_shallow_deep,
)
from helpers import random_tokens, target

LAYERS = 4


def documents(count: int = 12) -> list[Document]:
    """Texts in which every token follows from the one before."""
    return [Document((np.arange(i, i + 30, dtype=np.int32) * 3) % 29, 6, True) for i in range(count)]


def test_teachers_lie_in_equal_distances_up_to_the_last_layer() -> None:
    # Of T5-large and T5-3B in the paper, there counted from 0.
    assert teacher_layers(6, 24) == [4, 8, 12, 16, 20, 24] and teacher_layers(8, 24) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert teacher_layers(1, 30) == [30]


def test_teachers_are_aligned_with_ascending_students_from_the_last_one_on() -> None:
    errors = torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.1, 0.3], [0.9, 0.8, 0.1]])
    assert align_layers(errors) == [(0, 0), (1, 1), (2, 2)]
    # The last teacher takes the second student; the one before has the first left, and the first teacher none.
    errors = torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.1, 0.0], [0.9, 0.1, 0.8]])
    assert align_layers(errors) == [(1, 0), (2, 1)]


@pytest.mark.parametrize("distillation", [0.0, 0.5])
def test_the_loss_weighs_both_models_by_their_layers(distillation: float) -> None:
    decoder = target(vocab=29, layers=LAYERS).float()
    tokens = torch.tensor([random_tokens(20, 29, seed=1)])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    settings = ShallowDeepSettings(2, distillation=distillation)
    decoder.requires_grad_(False)
    decoder.blocks.requires_grad_()
    loss = shallow_deep_loss(decoder, tokens, mask, settings)
    loss.backward()
    assert all(p.grad is not None for p in decoder.blocks.parameters() if p.is_floating_point())
    # States of a model of random weights differ from layer to layer, so the distillation adds to the loss.
    plain = shallow_deep_loss(decoder, tokens, mask, ShallowDeepSettings(2, distillation=0.0))
    assert loss > plain if distillation else loss == plain


def test_training_lets_the_first_layers_know_the_text() -> None:
    decoder = target(vocab=29, layers=LAYERS).float()
    head, losses = decoder.head.weight.clone(), list[float]()
    tokens = torch.tensor([d.tokens.tolist() for d in documents()])

    def right() -> float:
        states = full_forward(decoder, decoder.embed(tokens), 0, 3)[:, :-1]
        return float((decoder.logits(decoder.final_norm(states)).argmax(-1) == tokens[:, 1:]).float().mean())

    before = right()
    settings = ShallowDeepSettings(3, steps=20, rate=1e-2, distillation=0.01, batch=60)
    train_shallow_deep(decoder, documents(), settings, lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5]) and right() > before + 0.3
    assert torch.equal(decoder.head.weight, head), "the head stays"


def test_a_model_whose_deep_layers_do_nothing_agrees_with_its_first_ones() -> None:
    decoder = target(vocab=29, layers=LAYERS).float()
    assert shallow_quality(decoder, documents(), 2).agreement < 1
    for block in list(decoder.blocks)[2:]:
        for name, parameter in block.named_parameters():
            if name.startswith(("output.", "mlp.down.")):
                parameter.data.zero_()
    found = shallow_quality(decoder, documents(), 2)
    assert found.agreement == 1 and found.tokens == len(documents()) * 24


def test_the_command_writes_another_model_and_says_what_it_costs(tmp_path: Path) -> None:
    out = tmp_path / "free"
    options = "--layer", "1", "--data", shared(), "--steps", "3", "--lr", "0.1", "--batch-tokens", "64"
    trained = run_foretell("train", "free", tiny_target(), "--out", out, *options)
    assert trained.exit_code == 0, (trained.output, trained.exception)
    assert "give the whole model's token in" in trained.stdout and "LOSSY" in trained.stdout
    assert "KL divergence" in trained.stdout
    answers = [
        run_foretell("generate", "hello", "--model", m, "--max-new-tokens", "4", "--json") for m in (tiny_target(), out)
    ]
    assert all(a.exit_code == 0 for a in answers), [a.output for a in answers]
    # It is another model, so exits of its source are not its own.
    exits = tmp_path / "exits"
    fitted = run_foretell(
        "train", "exits", tiny_target(), "--out", exits, "--data", shared(), "--draft-vocab", "64", "--layers", "1"
    )
    assert fitted.exit_code == 0, fitted.output
    assert "trained for" in expect_error(
        "generate", "hello", "--model", out, "--method", "layer_skip", "--draft-model", exits
    )
    assert "exists already" in expect_error("train", "free", tiny_target(), "--out", out, *options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--layer", "2"), "--layer 2: the model has 2 layers; give 1 to 1"),
        (("--layer", "99"), "--layer 99: the model has 2 layers; give 1 to 1"),
        (("--layer", "1", "--data", "nowhere"), "nowhere: no training set here"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    data = () if "--data" in options else ("--data", str(shared()))
    assert sentence in expect_error("train", "free", tiny_target(), "--out", tmp_path / "free", *data, *options)
