"""Objectives of HASS, GRIFFIN and CORAL: their definitions, and the loss of EAGLE's layers with them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_eagle_training import batch_of, every_kind, made_target, recipe_of
from training_helpers import losses, settings, trained

from foretell.train.objective.alignment import DraftedPaths, contrastive_loss, cross_step_loss, top_k_losses
from helpers import random_tokens


def test_top_k_losses_are_the_largest_terms_of_the_cross_entropy() -> None:
    draft, target = torch.randn(4, 9), 2 * torch.randn(4, 9)
    p, log_q = target.softmax(-1), draft.log_softmax(-1)
    expected = [sum(-float(p[i, j] * log_q[i, j]) for j in p[i].argsort(descending=True)[:3]) for i in range(4)]
    torch.testing.assert_close(top_k_losses(draft, target, 3), torch.tensor(expected))
    torch.testing.assert_close(top_k_losses(draft, target, 99), -(p * log_q).sum(-1))


def test_the_contrastive_loss_is_that_of_the_definition() -> None:
    states, label = torch.randn(7, 5, requires_grad=True), torch.tensor([0, 1, 0, 2, 1, 0, 3])
    cosine = F.cosine_similarity(states[:, None], states[None], dim=-1) / 0.1
    expected = list[torch.Tensor]()
    for i in range(7):
        others = [j for j in range(7) if j != i]
        total = torch.logsumexp(torch.stack([cosine[i, j] for j in others]), 0)
        terms = [total - cosine[i, j] for j in others if label[j] == label[i]]
        expected += [torch.stack(terms).mean()] if terms else []
    assert len(expected) == 5
    torch.testing.assert_close(contrastive_loss(states, label, 0.1), torch.stack(expected).mean())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_without_two_states_of_a_label_nothing_is_contrasted(count: int) -> None:
    states = torch.randn(count, 5, requires_grad=True)
    loss = contrastive_loss(states, torch.arange(count))
    loss.backward()
    assert float(loss.detach()) == 0 and states.grad is not None and not states.grad.any()


def test_steps_are_compared_at_the_token_that_they_predict() -> None:
    masks = [torch.rand(2, 6) < 0.7 for _ in range(3)]
    states = [torch.randn(int(mask.sum()), 4) for mask in masks]
    label = [(int(b), int(j) + i) for i, mask in enumerate(masks) for b, j in mask.nonzero()]
    number = torch.tensor([sorted(set(label)).index(each) for each in label])
    torch.testing.assert_close(cross_step_loss(states, masks), contrastive_loss(torch.cat(states), number))


def test_paths_end_where_the_text_is_not_among_the_best() -> None:
    columns, text = torch.arange(0, 18, 2), torch.randint(0, 18, (2, 5))
    paths, left = DraftedPaths(3, (2, 5), text.device), torch.ones(2, 5, dtype=torch.bool)
    for _ in range(2):
        mask = torch.rand(2, 5) < 0.8
        draft = torch.randn(int(mask.sum()), 9)
        paths.advance(mask, draft, columns, text)
        rows = iter(draft)
        for b in range(2):
            for j in range(5):
                best = columns[next(rows).argsort(descending=True)[:3]].tolist() if mask[b, j] else []
                left[b, j] &= int(text[b, j]) in best
    everywhere = torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(paths.at(everywhere).view(2, 5), left)
    always = DraftedPaths(0, (2, 5), text.device)
    always.advance(mask, draft, columns, text)
    assert always.at(everywhere).all()


@every_kind
def test_the_loss_of_a_layer_with_all_of_them(kind: str) -> None:
    """Position by position, from the outputs of the network alone."""
    network, kept, steps, width = made_target(), torch.arange(0, 64, 2), 3, 22
    options = {"steps": "3", "top_k_weight": "0.5", "top_k": "4", "aligned_width": str(width), "coral_weight": "0.3"}
    recipe = recipe_of(kind, network, kept, **options, **({"noise": "0"} if kind == "eagle" else {}))
    batch = batch_of(network, [random_tokens(30, 64, seed=i) for i in range(3)], 5, recipe.hidden_layers)
    loss = recipe.loss(recipe.network, batch)
    seen = batch.features[-1]
    full = F.linear(seen, network.head.weight)[..., kept]
    everywhere = torch.ones(3, 29, dtype=torch.bool)
    inputs = batch.features[: len(recipe.network.hidden_layers)]
    outputs = recipe.network(batch.token, inputs, [everywhere] * steps)
    left = {(b, j) for b in range(3) for j in range(29)}
    total, states, labels = torch.zeros(()), list[torch.Tensor](), list[int]()
    for i, output in enumerate(outputs):
        entropies, distances, hits = list[torch.Tensor](), list[torch.Tensor](), set[tuple[int, int]]()
        for b, j in [(b, j) for b in range(3) for j in range(28 - i) if j + 2 + i >= 5]:
            state, logits = output.state.view(3, 29, -1)[b, j], output.logits.view(3, 29, -1)[b, j]
            token, target = int(batch.token[b, j + 2 + i]), full[b, j + 1 + i]
            if kind == "eagle" or token % 2 == 0:
                states.append(state)
                labels.append(b * 100 + j + i)
            if (b, j) in left:
                distances.append(F.smooth_l1_loss(state, seen[b, j + 1 + i]))
            if token % 2 == 0:
                if (b, j) in left:
                    losses_of_one = top_k_losses(logits[None], target[None], 4)[0]
                    entropies.append(F.cross_entropy(logits, target.softmax(-1)) + 0.5 * losses_of_one)
                if token in kept[logits.argsort(descending=True)[:width]].tolist():
                    hits.add((b, j))
        entropy = torch.stack(entropies).mean()
        total = total + 0.8**i * (torch.stack(distances).mean() + 0.1 * entropy if kind == "eagle" else entropy)
        assert hits & left and left - hits, "the test compares nothing"
        left &= hits
    total = total + 0.3 * contrastive_loss(torch.stack(states), torch.tensor(labels))
    torch.testing.assert_close(loss.total, total)


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.exhaustive), "eagle3"])
def test_a_layer_learns_with_them(tmp_path: Path, kind: str) -> None:
    options = {"steps": "3", "top_k_weight": "1", "aligned_width": "10", "coral_weight": "0.1"}
    found = losses(trained(settings(tmp_path, recipe=kind, options=options, steps=30, lr=1e-2, measure_every=0)))
    assert sum(found[-5:]) < 0.95 * sum(found[:5])


@every_kind
def test_comparing_steps_needs_two(kind: str) -> None:
    with pytest.raises(ValueError, match="compare steps, and there is one"):
        recipe_of(kind, made_target(), steps="1", coral_weight="1")
