"""Fitting of exits: least squares, refinement, classifiers, and the command on a model on disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import shared

from command import expect_error, run_foretell, tiny_target
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.speculator.config_file import read_config
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.exits import Exits, ExitsConfig, block_config
from foretell.train.data.dataset import Document
from foretell.train.exits.blocks import block_outputs, train_blocks
from foretell.train.exits.classifiers import HaltingSettings, fit_classifiers
from foretell.train.exits.fit import evaluate, exit_loss, fit_linear, refine, set_shared, target_tokens
from foretell.train.exits.job import default_layers, final_norm_weight
from foretell.train.exits.least_squares import LeastSquares
from foretell.train.exits.states import LayerStates, collect_sequences
from helpers import random_tokens, target

WIDTH, VOCAB, TOKENS = 12, 40, 700


def states(noise: float = 0.0, layers: int = 2) -> LayerStates:
    """States of which the last layer's are a linear map of the others', up to noise that falls with depth."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    final = norm @ torch.randn(WIDTH, WIDTH)
    found = [x + noise * (layers - i) * torch.randn(TOKENS, WIDTH) for i in range(layers)]
    lengths = (TOKENS // 7,) * 7
    return LayerStates(tuple(f.bfloat16() for f in found), final.bfloat16(), lengths)


def exits_for(layers: tuple[int, ...] = (1, 3), **sizes: object) -> Exits:
    info = TargetInfo(name="toy", hidden=WIDTH, vocab=VOCAB, layers=4)
    torch.manual_seed(1)
    head = torch.randn(VOCAB, WIDTH)
    config = ExitsConfig.model_validate({"target": info, "layers": layers, **sizes})
    return Exits(config, EmbeddingAndHead(head, head)).requires_grad_(False)


def test_least_squares_recovers_a_linear_map_and_ignores_order_and_chunks() -> None:
    torch.manual_seed(2)
    truth, x = torch.randn(5, WIDTH), torch.randn(200, WIDTH)
    whole, parts = LeastSquares(WIDTH, 5, 1e-9), LeastSquares(WIDTH, 5, 1e-9)
    whole.add(x, x @ truth.T)
    for chunk in torch.split(x.flip(0), 17):
        parts.add(chunk, chunk @ truth.T)
    torch.testing.assert_close(whole.solve(), truth, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole.solve(), parts.solve(), atol=1e-5, rtol=1e-5)


def test_least_squares_is_never_worse_than_the_identity_on_its_own_rows() -> None:
    torch.manual_seed(3)
    x = torch.randn(300, WIDTH)
    y = x + 0.5 * torch.randn(300, WIDTH)
    fitted = LeastSquares(WIDTH, WIDTH, 0.0)
    fitted.add(x, y)
    assert (x @ fitted.solve().T - y).square().sum() <= (x - y).square().sum()
    same = LeastSquares(WIDTH, WIDTH, 1e-12)
    same.add(x, x)
    torch.testing.assert_close(same.solve(), torch.eye(WIDTH), atol=1e-4, rtol=1e-4)


def test_fewer_rows_than_inputs_are_fitted_by_the_ridge_and_none_are_refused() -> None:
    few = LeastSquares(WIDTH, 2)
    with pytest.raises(ValueError, match="no rows at all"):
        few.solve()
    few.add(torch.randn(3, WIDTH), torch.randn(3, 2))
    assert few.solve().isfinite().all()


def test_shortcuts_agree_where_the_last_layer_is_linear_in_the_exit() -> None:
    exits, found = exits_for(), states()
    fit_linear(exits, found)
    target_of = target_tokens(exits.lm_head, found)
    quality = evaluate(exits, found, target_of)
    assert all(q.agreement[0] > 0.93 and q.residual < 1e-3 for q in quality)
    assert [q.layer for q in quality] == [1, 3]
    assert exits.agreement.tolist() == pytest.approx([q.agreement[0] for q in quality])


def test_the_error_falls_with_depth_and_refinement_raises_agreement() -> None:
    exits, found = exits_for(inner=16), states(noise=0.4)
    fit_linear(exits, found)
    target_of = target_tokens(exits.lm_head, found)
    before = evaluate(exits, found, target_of)
    assert before[0].residual > before[1].residual
    assert all(list(q.agreement) == sorted(q.agreement) for q in before), "more ranks agree more often"
    losses = list[float]()
    refine(exits, found, steps=60, rate=3e-3, on_step=lambda layer, step, loss: losses.append(loss))
    after = evaluate(exits, found, target_of)
    assert sum(losses[50:60]) < sum(losses[:10]) and after[0].agreement[0] > before[0].agreement[0]


def test_an_exit_s_loss_has_no_gradient_elsewhere() -> None:
    exits, found = exits_for(inner=8), states(noise=0.4)
    fit_linear(exits, found)
    before = {name: p.clone() for name, p in exits.state_dict().items()}
    exits.requires_grad_(True)
    exit_loss(exits, 0, found, torch.arange(64)).backward()
    touched = {name for name, p in exits.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched and all(name.split(".")[1] == "0" for name in touched), touched
    assert all(torch.equal(p, before[name]) for name, p in exits.state_dict().items())


def test_classifiers_know_where_an_exit_is_right() -> None:
    exits, found = exits_for(), states(noise=0.5)
    fit_linear(exits, found)
    target_of = target_tokens(exits.lm_head, found)
    # An exit is wrong where a direction of its input is large.
    wrong = found.layers[0][:, 0].float() > 0.5
    changed = torch.where(wrong, (target_of + 1) % VOCAB, target_of)
    best = exits.compute_logits(exits(0, found.layers[0].float())).argmax(-1)
    fit_classifiers(exits, found, torch.where(wrong, changed, best), HaltingSettings())
    score = exits.exit_score(0, found.layers[0].float())
    assert score[wrong].mean() < -0.5 < 0.5 < score[~wrong].mean()


def test_shared_exits_are_the_norm_and_head_of_the_target() -> None:
    network = target(layers=4)
    info = TargetInfo(name="tiny", hidden=network.config.hidden, vocab=network.config.vocab, layers=4)
    config = ExitsConfig(target=info, layers=(2,), maps=False, norm_eps=network.config.norm_eps)
    made = Exits(config, embedding_and_head_of(network)).double()
    set_shared(made, final_norm_weight(network).double())
    h = torch.randn(5, network.config.hidden, dtype=torch.float64)
    expected = network.logits(network.final_norm(h))
    torch.testing.assert_close(made.compute_logits(made(0, h)).double(), expected, atol=1e-4, rtol=1e-4)


def test_exits_lie_below_the_last_layer_in_ascending_order() -> None:
    for layers in ((3, 1), (1, 4), (0, 2), (2, 2)):
        with pytest.raises(ValueError, match=r"exits lie after 1 to 3 layers, in ascending order; found \["):
            exits_for(layers)
    assert default_layers(30) == (3, 6, 9, 12, 15, 18, 21, 24, 27)
    assert default_layers(2) == (1,) and default_layers(4) == (1, 2, 3)


def test_the_command_fits_exits_of_a_model_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "exits"
    fitted = run_foretell("train", "exits", tiny_target(), "--out", out, "--data", shared(), "--draft-vocab", "64")
    assert fitted.exit_code == 0, (fitted.output, fitted.exception)
    assert fitted.stdout.startswith("| layers | same token |") and "\n| 1 | " in fitted.stdout
    config = read_config(out)
    assert config["kind"] == "exits" and config["layers"] == [1] and config["target"]["fingerprint"]
    card = (out / "README.md").read_text()
    again = expect_error("train", "exits", tiny_target(), "--out", out, "--data", shared(), "--draft-vocab", "64")
    assert "there is something already" in again and (out / "README.md").read_text() == card
    assert "measured on" in (out / "README.md").read_text()
    assert "| 1 | " in (out / "README.md").read_text()


def test_an_exit_with_a_decoder_block_is_trained_and_drafts(tmp_path: Path) -> None:
    out, options = tmp_path / "exits", ("--layers", "1", "--blocks", "1", "--steps", "3", "--draft-vocab", "64")
    fitted = run_foretell("train", "exits", tiny_target(), "--out", out, "--data", shared(), *options)
    assert fitted.exit_code == 0, (fitted.output, fitted.exception)
    assert read_config(out)["blocks"]["layers"] == 1
    answers = [
        run_foretell("generate", "hello", "--model", tiny_target(), "--max-new-tokens", "12", *method)
        for method in (("--method", "layer_skip", "--draft-model", out), ("--method", "autoregressive"))
    ]
    assert all(a.exit_code == 0 for a in answers), [a.output for a in answers]
    assert answers[0].stdout == answers[1].stdout


def test_blocks_learn_to_give_the_target_s_tokens() -> None:
    """Trained from the target's next block, an exit agrees more often on the sequences that it was trained on."""
    network = target(vocab=29, layers=3)
    info = TargetInfo(name="tiny", hidden=network.config.hidden, vocab=29, layers=3)
    config = ExitsConfig(target=info, layers=(1,), blocks=block_config(network.config, 1, 1))
    made = Exits(config, embedding_and_head_of(network)).float()
    made.init_from_target(
        Decoder(block_config(network.config, 1, 1), network.embedding, [network.block(1)], network.norm)
    )
    documents = [Document(np.array(random_tokens(40, seed=i)), 5, True) for i in range(30)]
    found = collect_sequences(network, documents, 1, 10_000)
    assert len(found.exit) == 30 and all(len(x) == 40 for x in found.exit)
    before, losses = block_outputs(made, found, 10_000), list[float]()
    fit_linear(made, before)
    train_blocks(made, found, 40, 5e-3, on_step=lambda step, loss: losses.append(loss))
    assert sum(losses[-8:]) < sum(losses[:8])
    after = block_outputs(made, found, 10_000)
    assert len(after) == len(before) == sum(len(x) for x in found.final) and not torch.equal(
        after.layers[0], before.layers[0]
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--layers", "2"), "exits after layers [2] were asked for, and"),
        (("--layers", "x"), "--layers=x: layers of the target by number"),
        (("--inner", "8"), "--inner 8: a feed-forward network is trained by gradient; give --steps too"),
        (("--blocks", "1"), "--blocks 1: decoder blocks are trained by gradient, with a linear map; give --steps"),
        (("--blocks", "1", "--steps", "1"), "--blocks 1: one exit may have decoder blocks; name its layer"),
        (("--blocks", "2", "--steps", "1", "--layers", "1"), "the blocks that follow it in the target (1 here)"),
        (("--from", "draft"), "--from draft: a draft model begins decoder blocks; say how many with --blocks"),
        (("--tokens", "20"), "20 tokens to learn are too few to fit exits on; 500 at least"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_a_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    found = expect_error("train", "exits", tiny_target(), "--out", tmp_path / "exits", "--data", shared(), *options)
    assert sentence in found
