"""FREE's training: a model whose first layers answer alone more often, and what it costs."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_helpers import shared

from command import expect_error, run_foretell, tiny_target
from foretell.lab.cli.train_free import _answers
from foretell.model.training.full_forward import full_forward
from foretell.train.data.dataset import Document
from foretell.train.exits.depth_quality import depth_quality
from foretell.train.exits.from_start import FromStartSettings, depth_loss, exit_weights, train_from_start
from foretell.train.exits.shallow_deep import align_layers, teacher_layers
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
    text = torch.tensor(random_tokens(21, 29, seed=1))
    settings = FromStartSettings(
        steps=1, rate=0, batch=20, sequence=20, exit_loss="linear", exits=(2,), distillation=distillation
    )
    losses = list[float]()
    train_from_start(decoder, text, settings, on_step=lambda _, loss: losses.append(loss), blocks_only=True)
    states = [full_forward(decoder, decoder.embed(text[None, :-1]), 0, i) for i in range(1, LAYERS + 1)]
    parts = [F.cross_entropy(decoder.logits(decoder.final_norm(x[0])), text[1:]) for x in (states[1], states[3])]
    expected = (2 * parts[0] + 4 * parts[1]) / 6
    # Teachers after layers 2 and 4; the nearest of the first two layers, from the last teacher on.
    errors = [[float((states[t] - states[s]).square().mean()) for s in (0, 1)] for t in (1, 3)]
    pairs = [errors[1][1], errors[0][0]] if errors[1][1] < errors[1][0] else [errors[1][0]]
    assert losses[0] == pytest.approx(float(expected) + distillation * sum(pairs) / len(pairs), rel=0.02)


def test_training_lets_the_first_layers_know_the_text() -> None:
    decoder = target(vocab=29, layers=LAYERS).float()
    head, losses = decoder.head.weight.clone(), list[float]()
    tokens = torch.tensor([d.tokens.tolist() for d in documents()])

    def right() -> float:
        states = full_forward(decoder, decoder.embed(tokens), 0, 3)[:, :-1]
        return float((decoder.logits(decoder.final_norm(states)).argmax(-1) == tokens[:, 1:]).float().mean())

    before = right()
    settings = FromStartSettings(
        steps=20, rate=1e-2, batch=60, sequence=30, exit_loss="linear", exits=(3,), distillation=0.01
    )
    train_from_start(
        decoder, _answers(documents())[0], settings, on_step=lambda _, loss: losses.append(loss), blocks_only=True
    )
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5]) and right() > before + 0.3
    assert torch.equal(decoder.head.weight, head), "the head stays"


def test_answers_alone_are_learned() -> None:
    text, learn = _answers(documents(2))
    assert len(text) == 60 and learn.view(2, 30).sum(1).tolist() == [24, 24]
    assert learn.view(2, 30)[:, 5:29].all(), "from the last token of the prompt to the last but one"
    decoder = target(vocab=29, layers=LAYERS).float()
    batch, weights = text.view(2, 30), exit_weights("none", LAYERS)
    x = full_forward(decoder, decoder.embed(batch[:, :-1]))
    own = decoder.logits(decoder.final_norm(x))[:, 5:].flatten(0, 1)
    loss = depth_loss(decoder, batch, weights, learn=learn.view(2, 30)).loss
    torch.testing.assert_close(loss, F.cross_entropy(own, batch[:, 6:].flatten()))


def test_a_model_whose_deep_layers_do_nothing_agrees_with_its_first_ones() -> None:
    decoder = target(vocab=29, layers=LAYERS).float()
    texts = [torch.from_numpy(d.tokens).long() for d in documents()]
    assert depth_quality(decoder, texts, (2, LAYERS)).agreement[0] < 1
    for block in list(decoder.blocks)[2:]:
        for name, parameter in block.named_parameters():
            if name.startswith(("output.", "mlp.down.")):
                parameter.data.zero_()
    quality = depth_quality(decoder, texts, (2, LAYERS))
    assert quality.agreement == (1, 1) and quality.equal_depth == 0.5


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
