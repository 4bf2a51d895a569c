"""Training of the MLP speculator: losses, and overfitting of a small data set."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from foretell.accept import Match
from foretell.draft import NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import RootOnly
from foretell.speculator.network.base import TargetInfo
from foretell.testing import TINY, tiny_decoder
from foretell.train.data.batch import Batch
from foretell.train.objective.stages import SoftLabels, label_loss, stage_labels, stage_losses
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.mlp_speculator import MLPSpeculatorRecipe, RecurrentRecipe, ReDrafterRecipe
from helpers import chain_tree, random_tokens, run, tokens_of, unchecked

CONFIG = replace(TINY, vocab=64)
PLAIN = Method(NoDrafter(), RootOnly(), Match())


def made_target() -> Decoder:
    return tiny_decoder(CONFIG, dtype=torch.float32)


def setup_of(network: Decoder, options: dict[str, str], kept: int | None = None) -> RecipeSetup:
    ends = EmbeddingAndHead(network.embedding.detach(), network.head.weight.detach())
    card = TargetInfo(name="tiny", hidden=CONFIG.hidden, vocab=CONFIG.vocab, layers=CONFIG.layers)
    chosen = None if kept is None else torch.arange(0, 2 * kept, 2)
    return RecipeSetup(card, network.config, ends, draft_tokens=chosen, options=options)


def recipe_of(network: Decoder, options: dict[str, str], kept: int | None = None) -> MLPSpeculatorRecipe:
    return MLPSpeculatorRecipe.build(setup_of(network, options, kept))


def batch_of(network: Decoder, texts: list[list[int]], start: int, hidden_layers: tuple[int, ...]) -> Batch:
    """Texts of equal length, with the target's states."""
    runner = DecoderRunner(network)
    outputs = [runner.forward([i], chain_tree(t), hidden_layers=hidden_layers) for i, t in enumerate(texts)]
    token = torch.tensor(texts)
    answer = torch.zeros_like(token, dtype=torch.bool)
    answer[:, start:] = True
    features = tuple(torch.stack([o.hidden_states[k] for o in outputs]).clone() for k in range(len(hidden_layers)))
    return Batch(token, answer, features)


def random_batch(recipe: MLPSpeculatorRecipe) -> Batch:
    token = torch.tensor([random_tokens(11, CONFIG.vocab, seed=i) for i in range(3)])
    answer = torch.ones_like(token, dtype=torch.bool)
    answer[:, :4] = False
    answer[2, 9:] = False
    generator = torch.Generator().manual_seed(0)
    features = tuple(torch.randn(3, 11, CONFIG.hidden, generator=generator) for _ in recipe.hidden_layers)
    return Batch(token, answer, features)


@pytest.mark.parametrize("soft", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_losses_and_gradients_are_those_of_the_definition(soft: float, chunk: int) -> None:
    network = made_target()
    recipe = recipe_of(network, {"inner": "40"}, kept=20)
    net, batch = recipe.network, random_batch(recipe)
    state = batch.features[0]
    expected = [torch.zeros(())] * 4
    counts, kept = [0] * 4, torch.arange(0, 40, 2)
    for row in range(3):
        for t in range(11):
            s = net.initial_state([state[row, t]])
            for stage in range(4):
                if t + stage + 2 >= 11:
                    break
                s = net.next_state(s, batch.token[row, t + stage + 1], stage)
                after = int(batch.token[row, t + stage + 2])
                if not batch.loss_mask[row, t + stage + 2] or after not in kept:
                    continue
                log = F.log_softmax(net.head_logits(net.head_input(s, stage), stage), -1)
                distribution = torch.softmax((network.head.weight[kept] @ state[row, t + stage + 1]) / 2, -1)
                hard = -log[after // 2]
                expected[stage] = expected[stage] + soft * -(distribution * log).sum() + (1 - soft) * hard
                counts[stage] += 1
    wanted = torch.stack([e / c for e, c in zip(expected, counts, strict=True)])
    (wanted * torch.tensor([1, 0.5, 0.25, 0.125])).sum().backward()  # type: ignore[no-untyped-call]
    slopes = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    place = recipe._draft_index
    learn = stage_labels(batch.token, batch.loss_mask, place, 4)
    teacher = SoftLabels(recipe._target_head, state.flatten(0, 1), soft, 2.0) if soft else None
    for frozen in (True, False):
        found = net(
            [state.flatten(0, 1)[learn.cell]],
            learn.input_token,
            lambda r, frozen=frozen: stage_losses(net.head_logits, r, learn, teacher, frozen, chunk),
        )
        torch.testing.assert_close(torch.stack(found.loss), wanted.detach(), rtol=1e-4, atol=1e-5)
        found.total(0.5).backward()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.grad, slopes[name], rtol=1e-3, atol=1e-5)
        net.zero_grad()


def test_the_cross_entropy_is_least_for_the_distribution_itself() -> None:
    distribution = torch.tensor([[0.7, 0.2, 0.1]])
    entropy = -(distribution * distribution.log()).sum()
    label = torch.tensor([0])
    assert label_loss(distribution.log(), label, distribution, 1.0).item() == pytest.approx(entropy.item())
    assert label_loss(torch.zeros(1, 3), label, distribution, 1.0).item() > entropy.item()
    assert label_loss(distribution.log(), label, distribution, 0.5).item() == pytest.approx(
        (entropy.item() - distribution[0, 0].log().item()) / 2
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"candidates": "24"}, marks=pytest.mark.exhaustive),
        pytest.param({"tied": "1", "scale_input": "1"}, marks=pytest.mark.exhaustive),
        pytest.param({"soft": "0", "more_hidden_layers": "1", "own_head": "1"}, marks=pytest.mark.exhaustive),
        {"kind": "redrafter", "stages": "4"},
    ],
)
def test_a_tiny_set_is_learned_to_near_perfect_acceptance(options: dict[str, str]) -> None:
    kind: type[RecurrentRecipe] = ReDrafterRecipe if options.get("kind") else MLPSpeculatorRecipe
    options = {name: value for name, value in options.items() if name != "kind"}
    network = made_target()
    prompts = [random_tokens(5, CONFIG.vocab, seed=i) for i in range(3)]
    plain = Engine(DecoderRunner(network), PLAIN, rows=3)
    texts = [p + tokens_of(u) for p, u in zip(prompts, run(plain, requests(prompts)), strict=True)]
    recipe = kind.build(setup_of(network, {"inner": "64", **options}))
    batch = batch_of(network, texts, 5, recipe.hidden_layers)
    optimizer = torch.optim.AdamW(recipe.network.parameters(), 6e-3, weight_decay=0)
    first = recipe.loss(recipe.network, batch).total.item()
    with unchecked():
        for _ in range(70):
            optimizer.zero_grad()
            loss = recipe.loss(recipe.network, batch)
            loss.total.backward()
            optimizer.step()
    assert loss.total.item() < first
    engine = Engine(DecoderRunner(network), recipe.method(recipe.network), rows=3)
    found = engine.complete(requests(prompts))
    assert [[*p, *done.tokens] for p, done in zip(prompts, found, strict=True)] == texts
    passes = [done.statistics.tokens_per_pass for done in found]
    assert min(passes) > 4.2, (passes, loss.metrics)


def requests(prompts: list[list[int]]) -> list[Request]:
    return [Request(p, max_new_tokens=41) for p in prompts]
