"""Training of a decoder with exits, layer dropout, nested widths or a policy from its first step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from command import expect_error, run_foretell
from foretell.draft.skip_decode import LayerBudget
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import FeedForward
from foretell.model.block.sparsity import FirstNeurons, sparse_decoder
from foretell.model.training.full_forward import full_forward
from foretell.testing import TINY
from foretell.train.exits.depth_quality import depth_quality
from foretell.train.exits.from_start import (
    FromStartSettings,
    NestedFeedForward,
    depth_loss,
    exit_weights,
    random_decoder,
    schedule,
    set_neurons,
    train_from_start,
)

LAYERS = 4
CONFIG = replace(TINY, vocab=29, layers=LAYERS, ffn=128, tied=True)
TOKENS = torch.tensor([[(3 * i + 7 * r) % 29 for i in range(12)] for r in range(2)])


def trainable() -> Decoder:
    decoder = random_decoder(CONFIG, seed=3)
    for block in decoder.blocks:
        block.mlp = NestedFeedForward(block.mlp)  # type: ignore[arg-type]
        for parameter in block.parameters():
            # Of a new decoder the layers change almost nothing.
            parameter.data *= 20 if parameter.ndim > 1 else 1
            parameter.requires_grad_()
    return decoder


def logits(decoder: Decoder, layers: int) -> torch.Tensor:
    x = decoder.embed(TOKENS[:, :-1])
    out: torch.Tensor = decoder.logits(decoder.final_norm(full_forward(decoder, x, 0, layers)))
    return out


def test_one_exit_of_weight_one_is_the_model() -> None:
    decoder = trainable()
    here = depth_loss(decoder, TOKENS, exit_weights("none", LAYERS))
    expected = F.cross_entropy(logits(decoder, LAYERS).flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(here.loss, expected)
    assert here.layers == LAYERS


@pytest.mark.parametrize("kind", ["uniform", "linear", "layerskip"])
def test_losses_after_all_layers_are_weighed(kind: str) -> None:
    decoder, weights = trainable(), exit_weights(kind, LAYERS)  # type: ignore[arg-type]
    parts = [F.cross_entropy(logits(decoder, i).flatten(0, 1), TOKENS[:, 1:].flatten()) for i in range(1, LAYERS + 1)]
    expected = sum(w * p for w, p in zip(weights, parts, strict=True)) / sum(weights)
    torch.testing.assert_close(depth_loss(decoder, TOKENS, weights).loss, expected)
    # The sums of LayerSkip's formula, written out: 0.2 times 0, 1 and 3, and 3 more than the last of these.
    assert exit_weights("layerskip", LAYERS) == pytest.approx((0, 0.2, 0.6, 3.6))


def gradients(decoder: Decoder) -> list[float]:
    return [
        sum(0.0 if p.grad is None else float(p.grad.abs().sum()) for p in block.parameters())
        for block in decoder.blocks
    ]


def test_the_loss_at_a_chosen_layer_has_gradients_up_to_it_alone() -> None:
    decoder = trainable()
    here = depth_loss(
        decoder, TOKENS, exit_weights("none", LAYERS), leave=lambda i, x: torch.ones(x.shape[:2]) * i == 2
    )
    here.loss.backward()
    assert here.layers == 2 and [g > 0 for g in gradients(decoder)] == [True, True, False, False]
    torch.testing.assert_close(here.loss, F.cross_entropy(logits(decoder, 2).flatten(0, 1), TOKENS[:, 1:].flatten()))


def test_each_token_has_one_loss_where_it_leaves_and_passes_its_state_on() -> None:
    decoder = trainable()
    exits = torch.full((2, 11), LAYERS)
    exits[:, :5] = 1
    here = depth_loss(decoder, TOKENS, exit_weights("none", LAYERS), leave=lambda i, _: exits == i)
    x = full_forward(decoder, decoder.embed(TOKENS[:, :-1]), 0, 1)
    for i in range(1, LAYERS):
        x = torch.cat([x[:, :5], full_forward(decoder, x, i, i + 1)[:, 5:]], 1)
    own = decoder.logits(decoder.final_norm(x))
    torch.testing.assert_close(here.loss, F.cross_entropy(own.flatten(0, 1), TOKENS[:, 1:].flatten()))
    assert here.layers == pytest.approx((5 + 6 * LAYERS) / 11)


def test_a_layer_that_a_text_skips_is_not_there_for_it() -> None:
    decoder = trainable()
    runs = torch.ones(LAYERS, 2, 1, dtype=torch.bool)
    runs[1:, 0] = False
    here = depth_loss(decoder, TOKENS[:1], exit_weights("none", LAYERS), runs[:, :1])
    torch.testing.assert_close(
        here.loss, F.cross_entropy(logits(decoder, 1)[:1].flatten(0, 1), TOKENS[:1, 1:].flatten())
    )


def test_the_schedule_is_that_of_decoding() -> None:
    runs, budget = schedule(12, 20, torch.tensor([[0], [5]])), LayerBudget(12, 12, 6, 2, 20)
    assert runs[:, 0].sum(0).tolist() == budget.count(torch.arange(20).numpy()).tolist()
    assert runs[:, 1, :6].all() and torch.equal(runs[:, 1, 5:], runs[:, 0, :15])
    assert runs[:2].all() and not (runs[:, :, 1:] & ~runs[:, :, :-1]).any(), "no key is missing"


def test_a_nested_step_changes_the_first_neurons_alone() -> None:
    decoder = trainable()
    set_neurons(decoder, 0.5)
    depth_loss(decoder, TOKENS, exit_weights("none", LAYERS)).loss.backward()
    for i in range(LAYERS):
        mlp = decoder.block(i).mlp
        assert isinstance(mlp, FeedForward)
        gate_up, down = mlp.gate_up.weight.grad, mlp.down.weight.grad
        assert gate_up is not None and down is not None
        assert down[:, :64].abs().sum() > 0 and down[:, 64:].abs().sum() == 0
        assert gate_up.view(2, 128, -1)[:, 64:].abs().sum() == 0
    # What decoding extracts has the logits of the slice that is trained.
    written = trainable()
    for i in range(LAYERS):
        mlp = written.block(i).mlp
        assert isinstance(mlp, FeedForward)
        written.block(i).mlp = FeedForward(mlp.gate_up, mlp.down, mlp.activation)
    extracted = sparse_decoder(written, [FirstNeurons(64)] * LAYERS)
    torch.testing.assert_close(logits(extracted, LAYERS), logits(decoder, LAYERS))
    set_neurons(decoder, 1.0)
    assert not torch.allclose(logits(extracted, LAYERS), logits(decoder, LAYERS))


def test_exits_trained_from_the_start_know_what_those_of_another_model_do_not() -> None:
    text = torch.tensor([(3 * i) % 29 for i in range(400)])
    plain = FromStartSettings(steps=150, rate=1e-2, batch=64, sequence=16)
    quality = []
    for settings in (plain, replace(plain, exit_loss="uniform", layer_dropout=0.1)):
        decoder = random_decoder(CONFIG, seed=0)
        train_from_start(decoder, text, settings)
        quality.append(depth_quality(decoder, text[:64].view(4, 16)))
        assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr() and quality[-1].perplexity[-1] < 1.2
    assert quality[1].perplexity[0] < 1.2 < quality[0].perplexity[0]
    assert quality[1].equal_depth < quality[0].equal_depth


def test_the_command_writes_a_model_with_its_tokenizer_that_drafts_for_itself(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "small"
    text.write_text("\n\n".join(f"the sum of {i} and {i} is {2 * i}." for i in range(400)), "utf-8")
    sizes = "--layers", "2", "--hidden", "64", "--ffn", "128", "--vocab", "300", "--activation", "relu", "--text", text
    few = "--steps", "3", "--sequence", "32", "--batch-tokens", "64"
    made = run_foretell("train", "decoder", *sizes, *few, "--widths", "0.5,1", "--exit-loss", "linear", "--out", out)
    assert made.exit_code == 0, (made.output, made.exception)
    assert json.loads((out / "config.json").read_text())["hidden_act"] == "relu"
    assert "| 64 | 2 |" in made.stdout and "| 128 | 2 |" in made.stdout and "at equal perplexity" in made.stdout
    answer = run_foretell(
        "generate", "the sum", "--raw", "--model", out, "--method", "layer_skip", "--max-new-tokens", "4",
        "--speculative-config", '{"method": "layer_skip", "exit_layer": 1}',
    )  # fmt: skip
    assert answer.exit_code == 0, (answer.output, answer.exception)
    further = "--from", str(out), "--text", str(text), "--depth", "schedule"
    scheduled = run_foretell("train", "decoder", *further, *few, "--out", tmp_path / "scheduled")
    assert scheduled.exit_code == 0 and "before the training" in scheduled.stdout, scheduled.output
    # ConsistentEE: a policy over exits, then the loss where it lets each token leave.
    answers, exits = tmp_path / "answers", tmp_path / "exits"
    for command in (
        ("data", "generate", "--model", out, "--text", text, "--tokens", "1500", "--out", answers),
        ("train", "exits", out, "--data", answers, "--kind", "shared", "--halting", "policy", "--layers", "1", "--out",
         exits),
        ("train", "decoder", "--from", out, "--choose", exits, "--text", text, *few, "--out", tmp_path / "chosen"),
    ):  # fmt: skip
        result = run_foretell(*command)
        assert result.exit_code == 0, (result.output, result.exception)
    assert "before the training" in result.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--layer-dropout", "1"), "--layer-dropout 1: a probability"),
        (("--widths", "0,1"), "shares above 0"),
        (("--widths", "x"), "numbers with commas between"),
        (("--depth", "sampled", "--exit-loss", "linear"), "--depth sampled says itself"),
        (("--choose", "exits"), "give --from alone"),
        (("--from", "nowhere", "--layers", "3"), "--layers"),
        (("--hidden", "100"), "multiples of 64"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    text = tmp_path / "text"
    text.write_text("a b\n\nc d\n\ne f", "utf-8")
    assert sentence in expect_error("train", "decoder", "--text", text, "--out", tmp_path / "small", *options)
