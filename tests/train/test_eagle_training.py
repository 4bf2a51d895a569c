"""Training of EAGLE's layers: losses, initial weights, and overfitting of a small data set."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from foretell.accept import Match
from foretell.draft import EagleDrafter, NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.layer import DecoderBlock, FeedForward
from foretell.model.block.linear import Linear
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, RootOnly
from foretell.speculator.checkpoint import load_own
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.eagle import Eagle1, Eagle3
from foretell.speculator.network.layer import Eagle3FirstLayer, EagleLayer
from foretell.testing import TINY, tiny_decoder
from foretell.train.data.batch import Batch
from foretell.train.objective.unrolled import mean_loss, target_labels, top1_agreement, unrolled_loss
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.eagle import (
    Eagle1Recipe,
    Eagle3Recipe,
    EagleRecipe,
    add_uniform_noise,
    feature_loss,
    fused_layers,
    sample_positions,
)
from foretell.train.recipe.init_from_target import init_from_target
from helpers import chain_tree, random_tokens, run, statistics_of, tokens_of, unchecked

CONFIG = replace(TINY, vocab=64, layers=3)
CARD = TargetInfo(name="tiny", hidden=CONFIG.hidden, vocab=CONFIG.vocab, layers=CONFIG.layers)
RECIPES: dict[str, type[EagleRecipe]] = {"eagle": Eagle1Recipe, "eagle3": Eagle3Recipe}
every_kind = pytest.mark.parametrize("kind", RECIPES)


def made_target() -> Decoder:
    return tiny_decoder(CONFIG, dtype=torch.float32)


def embedding_and_head(network: Decoder) -> EmbeddingAndHead:
    return EmbeddingAndHead(network.embedding.detach(), network.head.weight.detach())


def recipe_of(kind: str, network: Decoder, kept: torch.Tensor | None = None, **options: str) -> EagleRecipe:
    return RECIPES[kind].build(
        RecipeSetup(CARD, network.config, embedding_and_head(network), draft_tokens=kept, options=options)
    )


def batch_of(network: Decoder, texts: list[list[int]], start: int, hidden_layers: tuple[int, ...]) -> Batch:
    """Texts of equal length, with the target's states."""
    runner = DecoderRunner(network)
    outputs = [runner.forward([i], chain_tree(t), hidden_layers=hidden_layers) for i, t in enumerate(texts)]
    token = torch.tensor(texts)
    answer = torch.zeros_like(token, dtype=torch.bool)
    answer[:, start:] = True
    features = tuple(torch.stack([o.hidden_states[k] for o in outputs]).clone() for k in range(len(hidden_layers)))
    return Batch(token, answer, features)


def test_cross_entropies_are_those_of_the_definition() -> None:
    guess, target = torch.randn(5, 7), 3 * torch.randn(5, 7)
    p, log_q = target.softmax(-1), guess.log_softmax(-1)
    soft = sum(-(p[k] * log_q[k]).sum() for k in range(5)) / 5
    hard = sum(-log_q[k, p[k].argmax()] for k in range(5)) / 5
    torch.testing.assert_close(mean_loss(guess, target), soft)
    torch.testing.assert_close(mean_loss(guess, target, 1.0), hard)
    torch.testing.assert_close(mean_loss(guess, target, 0.25), 0.75 * soft + 0.25 * hard)
    steps = [(guess, target), (target, guess), (guess[:0], target[:0])]
    expected = soft + 0.5 * mean_loss(target, guess)
    torch.testing.assert_close(unrolled_loss(steps, 0.5), expected)
    assert top1_agreement(guess, guess) == 1.0
    assert top1_agreement(guess, -guess) < 1
    assert top1_agreement(guess[:0], guess[:0]) == 0


def test_regression_is_smooth_and_noise_is_bounded() -> None:
    guess, feature = torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 0.0]])
    assert float(feature_loss(guess, feature)) == pytest.approx((0.5 * 0.25 + 2.5) / 2)
    assert float(feature_loss(guess[:0], feature[:0])) == 0
    noise = add_uniform_noise(torch.zeros(1000), 0.1)
    assert noise.abs().max() <= 0.1 < noise.abs().max() + 0.01
    assert add_uniform_noise(feature, 0.0) is feature


def test_labels_are_the_targets_opinion_where_the_text_can_be_drafted() -> None:
    network, kept = made_target(), torch.arange(0, 64, 2)
    texts = [random_tokens(9, 64, seed=i) for i in range(3)]
    batch = batch_of(network, texts, 4, (4,))
    found = target_labels(batch.features[0], batch.token, batch.loss_mask, embedding_and_head(network), kept)
    full = F.linear(batch.features[0], network.head.weight)
    good = 0
    for b in range(3):
        for p in range(8):
            if p + 1 < 4 or batch.token[b, p + 1] % 2:
                assert found.row[b, p] == -1
            else:
                torch.testing.assert_close(found.logits[found.row[b, p]], full[b, p, kept])
                good += 1
    assert found.covered == pytest.approx(good / 15)
    where, target = found.shifted(3)
    expected = [full[b, j + 3, kept] for b in range(3) for j in range(8) if j + 3 < 8 and found.row[b, j + 3] >= 0]
    assert where.sum() == len(expected)
    torch.testing.assert_close(target, torch.stack(expected))
    assert not found.shifted(8)[0].any()


@every_kind
def test_the_loss_is_that_of_every_position_on_its_own(kind: str) -> None:
    network, kept, steps = made_target(), torch.arange(0, 64, 2), 3
    recipe = recipe_of(kind, network, kept, steps=str(steps), **({"noise": "0"} if kind == "eagle" else {}))
    texts = [random_tokens(10, 64, seed=i) for i in range(2)]
    batch = batch_of(network, texts, 6, recipe.hidden_layers)
    loss = recipe.loss(recipe.network, batch)
    seen = batch.features[-1]
    full = F.linear(seen, network.head.weight)
    everywhere = torch.ones(2, 9, dtype=torch.bool)
    guesses = recipe.network(batch.token, batch.features[: len(recipe.network.hidden_layers)], [everywhere] * steps)
    total = torch.zeros(())
    for i, guess in enumerate(guesses):
        entropies, distances = [], []
        for b in range(2):
            for j in range(9 - 1 - i):
                if j + 2 + i < 6:
                    continue
                state, logits = guess.state.view(2, 9, -1)[b, j], guess.logits.view(2, 9, -1)[b, j]
                distances.append(F.smooth_l1_loss(state, seen[b, j + 1 + i]))
                if batch.token[b, j + 2 + i] % 2 == 0:
                    p = full[b, j + 1 + i, kept].softmax(-1)
                    entropies.append(-(p * logits.log_softmax(-1)).sum())
        entropy = torch.stack(entropies).mean()
        total = total + 0.8**i * (torch.stack(distances).mean() + 0.1 * entropy if kind == "eagle" else entropy)
    torch.testing.assert_close(loss.total, total)
    loss.total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in recipe.network.parameters())


def test_no_more_positions_than_asked_for_count() -> None:
    answer = torch.rand(4, 50) < 0.7
    drawn = sample_positions(answer, 20)
    assert drawn.sum() == 20
    assert not (drawn & ~answer).any()
    assert sample_positions(answer, 500) is answer


@every_kind
def test_a_layer_begins_with_the_targets_state_and_blocks(kind: str) -> None:
    network = made_target()
    recipe = recipe_of(kind, network)
    init_from_target(recipe.network, network, 0)
    text = random_tokens(8, 64)
    batch = batch_of(network, [text], 0, recipe.network.hidden_layers)
    fused = recipe.network.fuse(torch.cat(batch.features, -1))
    assert isinstance(recipe.network, Eagle1 | Eagle3)
    near = F.cosine_similarity(fused, batch.features[-1], dim=-1).min()
    assert near > 0.95
    layer, block = recipe.network.layers[0], network.blocks[-1]
    assert isinstance(layer, EagleLayer | Eagle3FirstLayer)
    assert isinstance(block, DecoderBlock)
    assert isinstance(block.mlp, FeedForward) and isinstance(block.qkv, Linear)
    assert torch.equal(layer.mlp.gate_up_proj.weight, block.mlp.gate_up.weight)
    assert network.norm.weight.std() > 0.05
    state = batch.features[-1]
    read = layer.hidden_norm(state) if isinstance(layer, Eagle3FirstLayer) else state
    projected = read @ layer.self_attn.qkv_proj.weight[:, -16:].T
    # EAGLE-1 reads the state after the final norm, EAGLE-3 that before it.
    wanted = block.qkv(block.attention_norm(state / network.norm.weight if kind == "eagle" else state))
    # The norm of a state with scales and of one without differ in length, not in direction.
    assert F.cosine_similarity(projected, wanted, dim=-1).min() > 0.9999


@every_kind
def test_all_layers_have_the_window(kind: str) -> None:
    """With one of a token, positions see themselves alone: their outputs do not depend on the text before."""
    network = made_target()
    recipe = recipe_of(kind, network, layers="2", window="1")
    assert (recipe.config.window, recipe.config.window_layers) == (1, (0, 1))
    texts = [random_tokens(9, 64, seed=i)[:6] + random_tokens(4, 64, seed=9) for i in range(2)]
    batch = batch_of(network, texts, 4, recipe.hidden_layers)
    states = [state[:1].expand(2, -1, -1) for state in batch.features[: len(recipe.network.hidden_layers)]]
    where = torch.zeros(2, batch.token.shape[1] - 1, dtype=torch.bool)
    where[:, 6:] = True
    one, other = recipe.network(batch.token, states, [where])[0].logits.chunk(2)
    torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="window"):
        recipe_of(kind, network, window="-1")


@every_kind
def test_options_are_checked(kind: str) -> None:
    with pytest.raises(ValueError, match="step"):
        recipe_of(kind, made_target(), stepz="3")
    if kind == "eagle3":
        for wrong in ("1,2,9", "a"):
            with pytest.raises(ValueError, match="--set hidden_layers"):
                recipe_of(kind, made_target(), hidden_layers=wrong)
        assert recipe_of(kind, made_target(), hidden_layers="0,4").hidden_layers == (0, 4)
        assert recipe_of(kind, made_target(), hidden_layers="0,2").hidden_layers == (0, 2, 4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("candidates", ["0", "24"])
@every_kind
def test_a_tiny_set_is_learnt_to_near_perfect_acceptance(kind: str, candidates: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    network = made_target()
    prompts = [random_tokens(6, 64, seed=i) for i in range(4)]
    plain = Engine(DecoderRunner(network), Method(NoDrafter(), RootOnly(), Match()), rows=4)
    texts = [
        p + tokens_of(u)
        for p, u in zip(prompts, run(plain, [Request(p, max_new_tokens=24) for p in prompts]), strict=True)
    ]
    kept = torch.tensor(sorted({t for text in texts for t in text[6:]}))
    options = {"noise": "0", "steps": "3", "classify": "1"} if kind == "eagle" else {"steps": "4", "hard": "0.5"}
    recipe = recipe_of(kind, network, kept, ffn="64", candidates=candidates, **options)
    init_from_target(recipe.network, network, 0)
    batch = batch_of(network, texts, 6, recipe.hidden_layers)
    optimizer = torch.optim.AdamW(recipe.network.parameters(), lr=6e-3)
    with unchecked():
        for _ in range(120):
            optimizer.zero_grad()
            recipe.loss(recipe.network, batch).total.backward()
            optimizer.step()
    recipe.save(tmp_path)
    trained = load_own(tmp_path, embedding_and_head(network))
    assert isinstance(trained, Eagle1 | Eagle3)
    engine = Engine(
        DecoderRunner(network), Method(EagleDrafter(trained.float()), Chain(4, draw=False), Match()), rows=4
    )
    updates = run(engine, [Request(p, max_new_tokens=24) for p in prompts])
    assert [p + tokens_of(u) for p, u in zip(prompts, updates, strict=True)] == texts
    drafted = sum(s.drafted for s in map(statistics_of, updates))
    accepted = sum(sum(s.accepted_per_position) for s in map(statistics_of, updates))
    assert accepted >= 0.9 * drafted
    assert drafted > 40


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 30])
def test_fused_layers_are_those_that_other_engines_give(layers: int) -> None:
    """The outputs of blocks, each once, the last one among them; never the state after the final norm."""
    fused = fused_layers(layers)
    assert fused[-1] == layers and sorted(set(fused)) == list(fused)
    assert layers != 30 or fused == (2, 15, 27, 30)
