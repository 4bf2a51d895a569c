"""Training of DFlash: the weights of the places of a block, the choice of anchors, and overfitting of a small set."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_eagle_training import CARD, batch_of, embedding_and_head

from foretell.accept import Match
from foretell.draft import DFlashDrafter, NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, RootOnly
from foretell.speculator.network.base import TokenSubset
from foretell.speculator.network.correction_base import Candidates
from foretell.speculator.network.dflash import BlockPredictions
from foretell.testing import TINY, tiny_decoder
from foretell.train.objective.block import (
    block_loss,
    confidence_loss,
    decay_weights,
    dpace_weights,
    place_losses,
    sample_blocks,
)
from foretell.train.objective.unrolled import TargetLabels
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.dflash import DFlashRecipe
from helpers import random_tokens, run, statistics_of, tokens_of, unchecked

MASK = torch.tensor([[True, True, True, True], [True, True, False, False], [False] * 4])


def test_dpace_weights_are_the_gradient_of_expected_acceptance() -> None:
    assert dpace_weights(torch.ones(1, 4), MASK[:1]).tolist() == [[4, 3, 2, 1]]
    p = torch.randn(3, 4, dtype=torch.float64).sub(1).exp().clamp(max=1)
    # The derivative by the logarithm of a smoothed factor is the sum of the products that have it.
    factors = (0.5 * p + 0.5).log().requires_grad_(True)
    gradient = torch.autograd.grad((factors.cumsum(-1).exp() * MASK).sum(), factors)[0]
    weights = dpace_weights(p.requires_grad_(True), MASK)
    torch.testing.assert_close(weights, gradient * MASK)
    assert (weights.diff(dim=-1) <= 0).all() and not weights.requires_grad


def test_decay_falls_by_the_published_factor() -> None:
    weights = decay_weights(MASK, 8)
    assert weights[0, 1] / weights[0, 0] == pytest.approx(torch.tensor(-0.25).exp())
    assert decay_weights(MASK[:1], 16)[0, 1] == pytest.approx(torch.tensor(-1 / 7).exp())
    assert (weights == 0)[~MASK].all()


def test_the_loss_of_a_block_is_that_of_its_definition() -> None:
    draft, target = torch.randn(6, 9), 2 * torch.randn(6, 9)
    loss, right = place_losses(draft, target, 0.25, "cross_entropy")
    log_q, p = draft.log_softmax(-1), target.softmax(-1)
    best = log_q[range(6), p.argmax(-1)]
    torch.testing.assert_close(loss, -0.25 * best - 0.75 * (p * log_q).sum(-1))
    torch.testing.assert_close(right, best.exp())
    torch.testing.assert_close(place_losses(draft, target, 1.0, "cross_entropy")[0], -best)
    weights = decay_weights(MASK, 8)[MASK]
    torch.testing.assert_close(block_loss(loss, right, MASK, "decay", 8), (weights * loss).mean())
    torch.testing.assert_close(block_loss(loss, right, MASK, "uniform", 8), loss.mean())
    assert block_loss(loss[:0], right[:0], MASK & False, "dpace", 8) == 0
    assert confidence_loss(torch.zeros(0), draft[:0], target[:0]) == 0


def test_confidence_is_best_at_the_share_that_both_have() -> None:
    draft, target = torch.randn(1, 9), torch.randn(1, 9)
    shared = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum()
    confidence = shared.logit()[None].requires_grad_(True)
    gradient = torch.autograd.grad(confidence_loss(confidence, draft, target), confidence)[0]
    assert abs(float(gradient[0])) < 1e-6


def test_anchors_are_tokens_of_the_answer_and_places_end_where_labels_do() -> None:
    row = torch.full((3, 9), -1)
    row[0, 3:8], row[1, [0, 1, 2, 4, 5]] = torch.arange(5), torch.arange(5, 10)
    anchor, found = sample_blocks(TargetLabels(row, torch.zeros(10, 4), 1.0), 64, 3)
    assert anchor.shape == (3, 5) and found.shape == (3, 5, 3)
    expected = {
        0: {3: [0, 1, 2], 4: [1, 2, 3], 5: [2, 3, 4], 6: [3, 4, -1], 7: [4, -1, -1]},
        1: {1: [6, 7, -1], 2: [7, -1, -1], 4: [8, 9, -1], 5: [9, -1, -1]},  # before 0 there is no position
        2: {},
    }
    for text, blocks in expected.items():
        kept = found[text, :, 0] >= 0
        assert dict(zip(anchor[text][kept].tolist(), found[text][kept].tolist(), strict=True)) == blocks
    drawn = {tuple(sorted(sample_blocks(TargetLabels(row, row, 1.0), 2, 3)[0][0].tolist())) for _ in range(40)}
    assert len(drawn) > 3 and all(len(each) == 2 for each in drawn)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        {"predicts_from_anchor": "true", "confidence": "true", "weighting": "decay"},
        pytest.param({"convolution": "1"}, marks=pytest.mark.exhaustive),
        pytest.param({"window": "6"}, marks=pytest.mark.exhaustive),
        pytest.param({"correction": "selector", "convolution": "1", "markov_rank": "0"}, marks=pytest.mark.exhaustive),
        pytest.param({"correction": "domino", "markov_rank": "0"}, marks=pytest.mark.exhaustive),
        {"correction": "lattice", "markov_rank": "0", "candidates": "24"},
        pytest.param({"causal": "true", "weighting": "uniform", "markov_rank": "0"}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"correction": "refiner", "markov_rank": "0", "predicts_from_anchor": "true", "candidates": "24"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_small_set_is_learned_by_heart(options: dict[str, str]) -> None:
    network = tiny_decoder(replace(TINY, vocab=64, layers=3), dtype=torch.float32)
    wanted = {"block_size": "4", "markov_rank": "8", "hard": "1.0", "mask_token": "5", **options}
    setup = RecipeSetup(CARD, network.config, embedding_and_head(network), options=wanted)
    recipe = DFlashRecipe.build(setup)
    assert recipe.config.causal == ("causal" in options)
    requests = [Request(random_tokens(6, 64, seed=i), max_new_tokens=20) for i in range(4)]
    answers = answers_of(network, Method(NoDrafter(), RootOnly(), Match()), requests)[0]
    texts = [[*r.prompt, *answer] for r, answer in zip(requests, answers, strict=True)]
    batch = batch_of(network, texts, 6, recipe.hidden_layers)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(recipe.network.parameters(), 6e-3)
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        loss = recipe.loss(recipe.module, batch)
        loss.total.backward()
        optimizer.step()
        losses.append(float(loss.total.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert loss.metrics["place 1 top 1"] > 0.9
    drafter = DFlashDrafter(recipe.network.eval().requires_grad_(False))
    again, passes = answers_of(network, Method(drafter, Chain(3, draw=False), Match()), requests)
    assert again == answers
    assert 4 * 20 / passes > 1.8


def test_a_lattice_learns_the_right_token_where_both_it_and_the_one_before_are_candidates() -> None:
    decoder = tiny_decoder(replace(TINY, vocab=64, layers=3), dtype=torch.float32)
    wanted = {"block_size": "4", "markov_rank": "0", "correction": "lattice", "candidates": "0"}
    recipe = DFlashRecipe.build(RecipeSetup(CARD, decoder.config, embedding_and_head(decoder), options=wanted))
    texts = [random_tokens(20, 64, seed=i) for i in range(3)]
    network, batch = recipe.network, batch_of(decoder, texts, 2, recipe.hidden_layers)
    anchor = torch.arange(2, 16).expand(3, -1)
    each = torch.ones(3, 14, 3, dtype=torch.bool)
    features, right = batch.features[: len(network.hidden_layers)], torch.randint(64, (3 * 14 * 3,))
    with torch.no_grad():
        found = network(batch.token, features, anchor, each, None, right)
    likeliest = found.uncorrected.topk(8).indices
    log_q, rows, learned = found.logits.log_softmax(-1), torch.arange(len(right)), 0
    for k, (slot, token) in enumerate(zip(rows % 3, batch.token[:, 2:18].unfold(1, 3, 1).flatten(), strict=True)):
        # The token that slot `s` follows is at `anchor + s`.
        known = slot == 0 or token in likeliest[k - 1]
        one = float(found.candidates.scores[k].log_softmax(-1)[0])
        if known and right[k] in likeliest[k]:
            assert found.candidates.index[k, 0] == right[k] and one == pytest.approx(float(log_q[k, right[k]]))
            learned += 1
        else:
            assert one == 0
    assert 3 < learned < len(right) / 3
    # The same tokens are candidates where the logits are of a part of the vocabulary, in other columns.
    columns = likeliest.unique()
    part = network(batch.token, features, anchor, each, TokenSubset(columns, torch.zeros(len(columns))), None)
    assert torch.equal(columns[part.logits.topk(8).indices.sort().values], likeliest.sort().values)


def test_what_a_lattice_learns_is_weighted_as_published() -> None:
    decoder = tiny_decoder(replace(TINY, vocab=64, layers=3), dtype=torch.float32)
    wanted = {"markov_rank": "0", "correction": "lattice"}
    recipe = DFlashRecipe.build(RecipeSetup(CARD, decoder.config, embedding_and_head(decoder), options=wanted))
    target, alone, scores = 2 * torch.randn(5, 64), torch.randn(5, 64), 8 * torch.randn(5, 8)
    index = target.topk(8).indices
    losses, _ = recipe._losses(BlockPredictions(alone, None, alone, Candidates(scores, index)), target)
    expected = place_losses(alone, target, 0.3, "cross_entropy")[0]
    for k in range(5):
        q = scores[k].softmax(-1)
        regret = sum(q[i] * (target[k].max() - target[k, index[k, i]]) for i in range(8))
        expected[k] += -0.25 * q[0].log() + 0.25 * regret
    torch.testing.assert_close(losses, expected)


def answers_of(network: Decoder, method: AnyMethod, requests: Sequence[Request]) -> tuple[list[list[int]], int]:
    """Answers, and the passes that they took."""
    with unchecked():
        updates = run(Engine(DecoderRunner(network), method, rows=4), requests)
    return [tokens_of(u) for u in updates], sum(statistics_of(u).target_passes for u in updates)
