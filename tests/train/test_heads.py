"""Training of heads: labels, losses, the tree of best paths, and overfitting of a small data set."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foretell.catalogue import BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import FixedTree
from foretell.speculator.checkpoint import load_own
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.heads import HeadsNetwork
from foretell.testing import TINY, tiny_decoder
from foretell.train.data.batch import Batch
from foretell.train.data.features import compute_hidden_states
from foretell.train.objective.heads import (
    HeadLabels,
    cross_entropies,
    head_labels,
    label_ranks,
    loss_weights,
    soft_cross_entropies,
)
from foretell.train.recipe import RECIPES
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.heads import HeadsRecipe
from foretell.train.recipe.path_counts import PathCounts
from helpers import random_tokens

WIDE = replace(TINY, vocab=29, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96)
PLAIN = build("autoregressive", BuildContext(29, None))


def test_every_head_is_told_the_token_that_it_can_first_guess() -> None:
    token = torch.tensor([[5, 6, 7, 8, 9, 1], [4, 3, 2, 1, 0, 0]])
    answer = torch.tensor([[False, False, False, True, True, True], [True, True, True, True, False, False]])
    number = torch.full((10,), -1)
    number[[1, 2, 7, 8]] = torch.arange(4)
    found = head_labels(token, answer, 3, number)
    naive = []
    for row in range(2):
        for place in range(6):
            ahead = [place + 2 + i for i in range(3)]
            known = [a < 6 and bool(answer[row, a]) for a in ahead]
            guess = [int(number[token[row, a]]) if k else -1 for a, k in zip(ahead, known, strict=True)]
            if any(known):
                naive.append((row, place, guess, known))
    assert [
        (int(r), int(p), t.tolist(), k.tolist())
        for r, p, t, k in zip(found.row, found.position, found.token, found.known, strict=True)
    ] == naive
    assert (found.token[found.known] == -1).any()


def test_a_draw_of_positions_is_a_part_of_them() -> None:
    token, answer = torch.randint(0, 9, (3, 20)), torch.rand(3, 20) < 0.6
    everything = {(int(r), int(p)) for r, p in zip(*_positions(head_labels(token, answer, 2)), strict=True)}
    drawn = head_labels(token, answer, 2, max_positions=7)
    some = {(int(r), int(p)) for r, p in zip(*_positions(drawn), strict=True)}
    assert len(some) == len(drawn.row) == 7
    assert some < everything


def _positions(labels: HeadLabels) -> tuple[torch.Tensor, torch.Tensor]:
    return labels.row, labels.position


def test_losses_are_means_over_what_is_known() -> None:
    torch.manual_seed(0)
    logits, token = torch.randn(5, 2, 4), torch.tensor([[0, -1], [3, -1], [-1, -1], [2, 1], [1, -1]])
    naive = []
    for head in range(2):
        each = [-float(torch.log_softmax(logits[i, head], -1)[t]) for i, t in enumerate(token[:, head]) if t >= 0]
        naive.append(sum(each) / len(each))
    assert cross_entropies(logits, token).tolist() == pytest.approx(naive, rel=1e-5)
    assert cross_entropies(logits, torch.full((5, 2), -1)).tolist() == [0, 0]
    assert cross_entropies(logits[:0], token[:0]).tolist() == [0, 0]
    sharp = F.one_hot(token.clamp_min(0), 4).float()
    assert soft_cross_entropies(logits, sharp, token >= 0).tolist() == pytest.approx(naive, rel=1e-5)
    own = soft_cross_entropies(logits, logits.softmax(-1), token >= 0)
    entropy = entropies(logits)
    assert float(own[0]) == pytest.approx(float(entropy[token[:, 0] >= 0, 0].mean()), rel=1e-5)
    assert loss_weights(3, 0.8) == pytest.approx([0.8, 0.64, 0.512])


def entropies(logits: torch.Tensor) -> torch.Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def test_ranks_count_what_is_preferred() -> None:
    logits = torch.tensor([[[0.1, 3.0, 2.0]], [[0.1, 3.0, 2.0]], [[0.1, 3.0, 2.0]]])
    assert label_ranks(logits, torch.tensor([[1], [0], [-1]])).tolist() == [[0], [2], [1 << 30]]


def test_the_noted_paths_make_the_tree_that_accepts_most() -> None:
    generator = np.random.default_rng(0)
    shared = generator.integers(0, 4, (1200, 1))
    rank = np.minimum(generator.geometric(0.45, (1200, 3)) - 1 + shared // 2, 9)
    known = generator.random((1200, 3)) < 0.95
    counts = PathCounts(ranks=6, decay=1.0)
    counts.add(rank[:500], known[:500])
    counts.add(rank[500:], known[500:])
    paths, chances = counts.most_frequent(20)
    seen = rank[known.all(1)]

    def accepted(choices: tuple[tuple[int, ...], ...]) -> float:
        held = set(choices)
        return sum(
            sum(tuple(r[: d + 1]) in held for d in range(3) if all(tuple(r[: e + 1]) in held for e in range(d)))
            for r in seen.tolist()
        ) / len(seen)

    assert sum(chances) == pytest.approx(accepted(paths), abs=2e-3)
    assert all(a >= b for a, b in pairwise(chances))
    for size in (1, 5, 20):
        FixedTree(paths[:size])  # holds the ancestors of its nodes
    grown: list[tuple[int, ...]] = []
    for _ in range(8):
        options = [(*p, r) for p in [(), *grown] for r in range(6) if len(p) < 3 and (*p, r) not in grown]
        grown.append(max(options, key=lambda p: accepted((*grown, p))))
    assert accepted(paths[:8]) == pytest.approx(accepted(tuple(grown)))


def test_old_observations_fade() -> None:
    counts = PathCounts(decay=0.5)
    for right in (3, 0, 0, 0, 0, 0, 0):
        counts.add(np.full((10, 1), right), np.ones((10, 1), bool))
    paths, chances = counts.most_frequent()
    assert paths[0] == (0,)
    assert chances[0] > 0.95


def setup_for(decoder: Decoder, kept: torch.Tensor | None, **options: str) -> RecipeSetup:
    ends = EmbeddingAndHead(decoder.embedding.detach(), decoder.head.weight.detach())
    c = decoder.config
    card = TargetInfo(name="tiny", hidden=c.hidden, vocab=c.vocab, layers=c.layers)
    return RecipeSetup(card, c, ends, None, kept, 0, options)


def answers(decoder: Decoder, method: AnyMethod) -> tuple[list[list[int]], float]:
    """Answers that vary, and the tokens per pass that they took."""
    prompts = [random_tokens(n, seed=n) for n in (3, 5, 8, 12)]
    requests = [Request(p, SamplingParams(temperature=1.0, seed=len(p)), max_new_tokens=41) for p in prompts]
    engine = Engine(DecoderRunner(decoder), method)
    found = engine.complete(requests)
    texts = [[*p, *done.tokens] for p, done in zip(prompts, found, strict=True)]
    return texts, float(np.mean([done.statistics.tokens_per_pass for done in found]))


def batch_of(decoder: Decoder, texts: list[list[int]]) -> Batch:
    """Texts, of which the last 41 tokens are to be learned, with the target's states."""
    wide = max(map(len, texts)) + 2
    token = torch.tensor([[*t, *[0] * (wide - len(t))] for t in texts])
    length = torch.tensor([[len(t)] for t in texts])
    place = torch.arange(wide)
    loss_mask = (place < length) & (place >= length - 41)
    return Batch(token, loss_mask, compute_hidden_states(decoder, token, (decoder.config.layers + 1,)))


OVERFIT = {
    "medusa": {"blocks": "2", "heads": "3", "positions": "128"},
    "medusa own": {"heads": "3", "own_head": "true", "learn": "hard"},
    "blockwise": {"heads": "3", "inner": "256"},
    "blockwise one": {"heads": "3", "inner": "256", "draw": "one"},
}


@pytest.mark.parametrize(
    "name", ["medusa", "blockwise", *(pytest.param(f"{n}", marks=pytest.mark.exhaustive) for n in OVERFIT if " " in n)]
)
def test_heads_learn_a_small_set_by_heart(name: str) -> None:
    decoder = tiny_decoder(WIDE, dtype=torch.float32, sharpness=0.1)
    texts, one = answers(decoder, PLAIN)
    assert one == 1
    batch = batch_of(decoder, texts)
    recipe = RECIPES[name.split()[0]].build(
        setup_for(decoder, torch.unique(batch.token[batch.loss_mask]), **OVERFIT[name])
    )
    assert isinstance(recipe, HeadsRecipe)
    untrained = answers(decoder, recipe.method(recipe.network))[1]  # knows the noise of a nearly even distribution
    learn(recipe, batch, 250 if name.endswith("one") else 80)
    got, passes = answers(decoder, recipe.method(recipe.network))
    assert got == texts
    assert passes > max(0.95 * 41 / 11, untrained + 0.3)


def learn(recipe: HeadsRecipe, batch: Batch, steps: int) -> None:
    torch.manual_seed(0)
    parameters = [p for p in recipe.network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        recipe.loss(recipe.network, batch).total.backward()
        optimizer.step()


@pytest.mark.parametrize("candidates", [pytest.param("0", marks=pytest.mark.exhaustive), "200"])
def test_heads_taught_by_distributions_come_to_give_them(candidates: str) -> None:
    decoder = tiny_decoder(replace(WIDE, vocab=300), dtype=torch.float32, sharpness=0.1)
    texts, _ = answers(decoder, PLAIN)
    batch = batch_of(decoder, texts)
    options = {"heads": "2", "inner": "256", "learn": "soft"}
    recipe = RECIPES["blockwise"].build(setup_for(decoder, None, **options, candidates=candidates))
    judge = RECIPES["blockwise"].build(setup_for(decoder, None, **options))
    assert isinstance(recipe, HeadsRecipe)
    told = recipe.target_distributions(recipe.labels(batch), batch.features[0])
    assert told is not None and (told.candidates is None) == (candidates == "0")
    first = judge.loss(recipe.network, batch).metrics
    learn(recipe, batch, 100)
    last = judge.loss(recipe.network, batch).metrics
    wanted = recipe.labels(batch)
    for head in range(2):
        keep = wanted.token[:, head] >= 0
        before = batch.features[0][wanted.row[keep], wanted.position[keep] + 1 + head]
        entropy = float(entropies(decoder.logits(before)).mean())
        assert first[f"head {head + 1} loss"] > entropy + 0.2
        assert entropy <= last[f"head {head + 1} loss"] < entropy + 0.05


def test_the_loss_of_a_drawn_head_is_the_mean_on_average() -> None:
    decoder = tiny_decoder(WIDE, dtype=torch.float32)
    recipe = RECIPES["blockwise"].build(setup_for(decoder, None, heads="3", draw="one"))
    assert isinstance(recipe, HeadsRecipe)
    losses, gradient = torch.tensor([1.0, 10.0, 100.0], requires_grad=True), torch.zeros(3)
    torch.manual_seed(0)
    drawn = [recipe.combine(losses) for _ in range(900)]
    for one in drawn:
        gradient += torch.autograd.grad(one, losses)[0]
    assert {float(d.detach()) for d in drawn} == {1.0, 10.0, 100.0}
    assert (gradient / 900).tolist() == pytest.approx([1 / 3] * 3, abs=0.05)


def test_tokens_that_are_not_drafted_teach_nothing_and_count_as_missed() -> None:
    decoder = tiny_decoder(WIDE, dtype=torch.float32, sharpness=0.1)
    batch = batch_of(decoder, answers(decoder, PLAIN)[0])
    never = torch.tensor([t for t in range(29) if not (batch.token[batch.loss_mask] == t).any()])
    recipe = RECIPES["medusa"].build(setup_for(decoder, never, heads="2"))
    loss = recipe.loss(recipe.network, batch)
    assert float(loss.total.detach()) == 0
    assert loss.metrics["head 1 top 3"] == 0
    loss.total.backward()
    assert all(not p.grad.any() for p in recipe.network.parameters() if p.grad is not None)


def test_what_a_training_wrote_is_read_back_with_its_tree(tmp_path: Path) -> None:
    decoder = tiny_decoder(WIDE, dtype=torch.float32, sharpness=0.1)
    batch = batch_of(decoder, answers(decoder, PLAIN)[0])
    setup = setup_for(decoder, torch.arange(0, 29, 2), heads="3", own_head="true")
    recipe = RECIPES["medusa"].build(setup)
    assert isinstance(recipe, HeadsRecipe)
    learn(recipe, batch, 9)
    recipe.save(tmp_path)
    read_back = load_own(tmp_path, setup.embedding_and_head)
    assert isinstance(read_back, HeadsNetwork)
    assert read_back.paths == recipe.network.paths
    assert len(read_back.paths) > 10
    torch.testing.assert_close(read_back(batch.features[0]), recipe.network(batch.features[0]), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("options", [{"heads": "0"}, {"inner": "9"}, {"learn": "softly"}])
def test_options_are_checked(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="--set"):
        RECIPES["medusa"].build(setup_for(tiny_decoder(WIDE), None, **options))
