"""Distilled draft models: initial weights, positions of the loss, and overfitting of a small data set."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell.accept import Match
from foretell.draft import DraftModel, NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.load.transforms import DecoderTransform
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.shape import Chain, RootOnly
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.testing import TINY, RandomWeights
from foretell.train.data.batch import Batch
from foretell.train.data.features import compute_hidden_states, pad_sequences
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.draft_model import DraftModelRecipe, evenly_spaced, missed_positions
from helpers import all_logits, random_tokens, unchecked

CONFIG = replace(TINY, vocab=24, hidden=32, layers=4, ffn=48)
KEPT = torch.tensor([t for t in range(24) if t % 6 != 5])
CARD = TargetInfo(name="tiny", hidden=32, vocab=24, layers=4)


class Untied(RandomWeights):
    """With a head of its own: where it is the embedding, a random model repeats itself."""

    def get(self, name: str) -> torch.Tensor | None:
        return 3 * self.require(name, CONFIG.vocab, CONFIG.hidden) if name == "lm_head.weight" else None


class RandomCheckpoint(Checkpoint):
    """The tiny target, read again as often as wanted."""

    def __init__(self) -> None:
        super().__init__(CONFIG, Untied(0, 1.0), torch.device("cpu"))

    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        return change(self.decoder(torch.float32))


SOURCE = RandomCheckpoint()


def setup(options: Mapping[str, str] | None = None, kept: torch.Tensor | None = KEPT) -> RecipeSetup:
    return RecipeSetup(CARD, CONFIG, SOURCE.embedding_and_head(torch.float32), SOURCE, kept, options=options or {})


def batch_of(texts: Sequence[Sequence[int]], start: int = 1) -> Batch:
    wide = max(map(len, texts)) + 2
    token = pad_sequences([torch.tensor(t).numpy() for t in texts], wide)
    place, ends = torch.arange(wide), torch.tensor([len(t) for t in texts])[:, None]
    features = compute_hidden_states(SOURCE.decoder(torch.float32), token, (CONFIG.layers + 1,))
    return Batch(token, (place >= start) & (place < ends), features)


def test_the_first_and_the_last_block_are_always_kept() -> None:
    assert evenly_spaced(1, 30) == (0,) and evenly_spaced(2, 30) == (0, 29) and evenly_spaced(3, 30) == (0, 14, 29)
    assert evenly_spaced(5, 5) == (0, 1, 2, 3, 4)


def test_a_draft_of_all_blocks_is_the_target() -> None:
    recipe = DraftModelRecipe.build(setup({"layers": "4"}, kept=None))
    text = random_tokens(9, 24)
    ours, theirs = recipe.network.to_network(), SOURCE.decoder(torch.float32)
    assert abs(all_logits(ours, text) - all_logits(theirs, text)).max() < 1e-5


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole vocabulary", "reduced vocabulary"])
def test_training_sees_what_decoding_computes(kept: torch.Tensor | None) -> None:
    network = DraftModelRecipe.build(setup({"blocks": "0,3"}, kept)).network
    text = random_tokens(9, 24)
    states = network(torch.tensor([text]), torch.ones(1, 9, dtype=torch.bool))
    trained = network.to_target_vocab(network.compute_logits(states)).detach().numpy()
    decoded = all_logits(network.to_network(), text)
    assert abs(trained[:, KEPT] - decoded[:, KEPT]).max() < 1e-5
    assert (decoded[:, 5] == -float("inf")).all() == (kept is not None)


def test_a_grown_draft_begins_as_the_smaller_one() -> None:
    small, grown = (
        DraftModelRecipe.build(setup({"blocks": blocks, "layers": str(len(blocks) // 2 + 1)})).network
        for blocks in ("0,3", "0,1,2,3")
    )
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    given = grown.adapt_state_dict(small)
    assert given.keys() == grown.state_dict().keys()
    grown.load_state_dict(given)
    token, everywhere = torch.tensor([random_tokens(9, 24)]), torch.ones(1, 9, dtype=torch.bool)
    assert torch.equal(grown(token, everywhere), small(token, everywhere))
    other = DraftModelRecipe.build(setup({"blocks": "1,2,3"})).network
    assert other.adapt_state_dict(small).keys() == small.state_dict().keys(), (
        "of other blocks nothing is taken for the same"
    )
    # What it has more than the smaller one can be learned.
    grown(token, everywhere).square().sum().backward()
    new = {name: p.grad for name, p in grown.blocks[1].named_parameters()}
    for name in ("output.weight", "mlp.down.weight"):
        gradient = new[name]
        assert gradient is not None and gradient.abs().sum() > 0


def test_the_teacher_is_the_target_over_the_drafted_tokens() -> None:
    network, text = DraftModelRecipe.build(setup()).network, random_tokens(9, 24)
    batch = batch_of([text])
    teacher = network.teacher_logits(batch.features[0][0, :9]).numpy()
    assert abs(teacher - all_logits(SOURCE.decoder(torch.float32), text)[:, KEPT]).max() < 1e-4


def test_influential_blocks_keep_first_and_last() -> None:
    blocks = DraftModelRecipe.build(setup({"blocks": "influence", "layers": "3"})).config.blocks
    assert blocks[0] == 0 and blocks[-1] == 3 and len(blocks) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": "9"}, "layers=9: the target has 4 blocks"),
        ({"blocks": "0,7"}, "blocks 0 to 3 of its target, found"),
        ({"blocks": "first"}, "write even, influence, or numbers such as 0,2,3"),
        ({"loss": "kl"}, "loss: input should be 'forward_kl'"),
        ({"lair": "3"}, "layers"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DraftModelRecipe.build(setup(options))


def greedy_texts(count: int, length: int) -> list[list[int]]:
    """What the target says after random beginnings."""
    runner = DecoderRunner(SOURCE.decoder(torch.float32))
    engine = Engine(runner, Method(NoDrafter(), RootOnly(), Match()), rows=count)
    texts = {}
    for i in range(count):
        prompt = random_tokens(4, 24, seed=50 + i)
        texts[engine.submit(Request(prompt, max_new_tokens=length))] = list(prompt)
    for update in engine.run():
        texts[update.request] += update.tokens
    return list(texts.values())


def train(recipe: DraftModelRecipe, batch: Batch, steps: int, rate: float = 3e-3) -> list[float]:
    optimizer, losses = torch.optim.AdamW(recipe.network.parameters(), rate, weight_decay=0.0), list[float]()
    with unchecked():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = recipe.loss(recipe.network, batch)
            loss.total.backward()
            optimizer.step()
            losses.append(float(loss.total.detach()))
    return losses


def tokens_per_pass(method: AnyMethod, texts: Sequence[Sequence[int]]) -> float:
    engine = Engine(DecoderRunner(SOURCE.decoder(torch.float32)), method, rows=len(texts))
    with unchecked():
        found = engine.complete([Request(t[:4], max_new_tokens=len(t) - 4) for t in texts])
    assert [list(done.tokens) for done in found] == [list(t[4:]) for t in texts]
    counts = [done.statistics for done in found]
    return sum(s.new_tokens for s in counts) / sum(s.target_passes for s in counts)


def test_a_draft_learns_a_tiny_set_by_heart_and_is_accepted_almost_always(tmp_path: Path) -> None:
    texts = greedy_texts(6, 30)
    recipe = DraftModelRecipe.build(setup({"layers": "2"}, kept=None))
    before = tokens_per_pass(recipe.method(recipe.network), texts)
    losses = train(recipe, batch_of(texts, 4), 150)
    assert losses[-1] < 0.1 * losses[0]
    after = tokens_per_pass(recipe.method(recipe.network), texts)
    assert before < 3 and after > 5.4, (before, after)  # 6 would be perfect
    recipe.save(tmp_path)
    read_again = load_speculator(tmp_path, CARD, SOURCE.embedding_and_head(torch.float32))
    assert isinstance(read_again, DraftNetwork)
    again = Method(DraftModel(read_again.to_runner()), Chain(5, draw=False), Match())
    assert tokens_per_pass(again, texts) > 5.2  # stored in bfloat16


def test_only_answers_that_can_be_drafted_count() -> None:
    recipe = DraftModelRecipe.build(setup())
    inside, outside = [1, 2, 3, 4, 6, 7], [1, 2, 5, 4, 11, 7]
    where = recipe._loss_positions(batch_of([inside, outside], start=2))
    assert where.nonzero()[:, 1].tolist() == [1, 2, 3, 4, 2, 4]
    empty = recipe.loss(recipe.network, batch_of([[1, 5, 5]], start=1))
    assert float(empty.total.detach()) == 0
    empty.total.backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("candidates", ["0", "16"])
@pytest.mark.parametrize(
    "loss",
    [
        "reverse_kl",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("tvd++", "forward_kl", "jsd", "tvd")),
    ],
)
def test_every_divergence_raises_acceptance_on_texts_that_were_not_trained_on(loss: str, candidates: str) -> None:
    train_set, held_out = (
        batch_of([random_tokens(40, 24, seed=i) for i in range(24)]),
        batch_of([random_tokens(40, 24, seed=100 + i) for i in range(8)]),
    )
    recipe = DraftModelRecipe.build(setup({"loss": loss, "blocks": "0,3", "candidates": candidates}))
    judge = DraftModelRecipe.build(setup({"loss": loss, "blocks": "0,3"}))
    before = judge.loss(recipe.network, held_out).metrics["acceptance"]
    train(recipe, train_set, 40, 2e-3)
    after = judge.loss(recipe.network, held_out).metrics["acceptance"]
    assert after > before + 0.05, (before, after)


@pytest.mark.exhaustive
def test_boosting_leaves_out_what_an_earlier_draft_finds(tmp_path: Path) -> None:
    texts = greedy_texts(4, 20)
    first = DraftModelRecipe.build(setup({"blocks": "0,3"}))
    train(first, batch_of(texts[:2], 4), 60)
    first.save(tmp_path)
    second = DraftModelRecipe.build(setup({"blocks": "0,3", "earlier": str(tmp_path)}))
    batch = batch_of(texts, 4)
    every, left = first._loss_positions(batch), second._loss_positions(batch)
    assert (left <= every).all() and left[:2].sum() < 3 and left[2:].sum() > 8
    target, found = (
        SOURCE.decoder(torch.float32),
        load_speculator(tmp_path, CARD, SOURCE.embedding_and_head(torch.float32)),
    )
    assert isinstance(found, DraftNetwork)
    for i, text in enumerate(texts):
        theirs, ours = all_logits(target, text), all_logits(found.to_network(), text)
        best = KEPT[theirs[:, KEPT].argmax(-1)].numpy()
        wrong = [t for t in range(len(text)) if every[i, t] and best[t] != ours[t].argmax()]
        assert left[i].nonzero()[:, 0].tolist() == wrong
    # The union of both finds what the first one lacked.
    train(second, batch, 150)
    both = torch.nn.ModuleList([first.network, second.network])
    assert missed_positions(both, first.network, batch, every, "position").sum() < 0.1 * every.sum()


def test_boosting_by_text_keeps_a_text_whole_unless_it_is_mastered(tmp_path: Path) -> None:
    texts = greedy_texts(4, 20)
    first = DraftModelRecipe.build(setup({"blocks": "0,3"}))
    train(first, batch_of(texts[:1], 4), 100)
    first.save(tmp_path)
    batch = batch_of(texts, 4)
    left = DraftModelRecipe.build(setup({"blocks": "0,3", "earlier": str(tmp_path), "unit": "text"}))._loss_positions(
        batch
    )
    every = first._loss_positions(batch)
    assert not left[0].any() and (left[1:] == every[1:]).all()


@pytest.mark.parametrize("writer", ["draft", "target"])
def test_answers_are_written_anew_by_whom_was_asked(writer: str) -> None:
    recipe = DraftModelRecipe.build(setup({"writer": writer, "share": "1", "written": "6", "blocks": "0,3"}))
    assert recipe._regenerator is not None
    texts = [random_tokens(12, 24, seed=i) for i in range(3)]
    old = batch_of(texts, start=4)
    torch.manual_seed(7)
    new = recipe._regenerator.regenerate(old)
    torch.manual_seed(7)
    again = recipe._regenerator.regenerate(old)
    assert torch.equal(new.token, again.token)
    for i, text in enumerate(texts):
        answer = new.loss_mask[i].nonzero()[:, 0].tolist()
        assert 4 <= answer[0] < 12 and answer == list(range(answer[0], answer[0] + 6))
        assert new.token[i, : answer[0]].tolist() == text[: answer[0]]
        if writer == "draft":
            assert set(new.token[i, answer].tolist()) <= set(KEPT.tolist())
    expected = compute_hidden_states(SOURCE.decoder(torch.float32), new.token, recipe.hidden_layers)
    torch.testing.assert_close(new.features[0], expected[0])
    assert recipe.loss(recipe.network, old).total.isfinite()


def test_no_batch_is_rewritten_at_a_share_of_nothing() -> None:
    recipe = DraftModelRecipe.build(setup({"writer": "draft", "share": "0"}))
    batch = batch_of([random_tokens(9, 24)])
    assert recipe._regenerator is not None and recipe._regenerator.regenerate(batch) is batch
