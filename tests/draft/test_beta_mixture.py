"""FREE's adaptive threshold: the mixture, and what it is learned from while tokens leave early."""

import numpy as np
import pytest
from test_early_exit import LAYERS, PROMPTS, drafter, engine_of, network

from foretell.accept import AcceptExits
from foretell.draft.beta_mixture import (
    GRID,
    MAX_UPDATES,
    AdaptiveThresholds,
    BetaMixtureThreshold,
    mixture_threshold,
)
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.exit_heads import ExitRule, TrainedExits
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.shape import Chain
from helpers import all_logits, target


def test_the_threshold_lies_on_the_grid_and_follows_the_labels() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(200)
    assert mixture_threshold(confidence, np.ones(200, bool), 0.4) == GRID[0]
    assert mixture_threshold(confidence, np.zeros(200, bool), 0.4) == GRID[-1]
    right, wrong = rng.beta(8, 2, 300), rng.beta(2, 8, 300)
    both, labels = np.concatenate([right, wrong]), np.repeat([True, False], 300)
    found = [mixture_threshold(both, labels, posterior) for posterior in (0.1, 0.4, 0.9, 0.999)]
    assert found == sorted(found) and found[0] < found[-1] and set(found) <= set(GRID.tolist())
    assert 0.3 <= found[1] <= 0.6, "the densities are equal at one half"


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_equal_confidences_give_a_threshold(value: float) -> None:
    found = mixture_threshold(np.full(6, value), np.array([True, False] * 3), 0.4)
    assert found in GRID


def test_the_threshold_changes_between_requests_a_limited_number_of_times() -> None:
    mixture = BetaMixtureThreshold(0.77)
    assert mixture.update() == 0.77, "without data it is the given one"
    mixture.add(0.5, True)
    assert mixture.update() == GRID[0] and mixture.updates == 1
    assert mixture.update() == GRID[0] and mixture.updates == 1, "without new data nothing is fitted"
    mixture.updates = MAX_UPDATES
    mixture.add(0.5, False)
    assert mixture.update() == GRID[0]


def test_labels_are_the_whole_model_s_tokens_after_the_same_text() -> None:
    mixture = BetaMixtureThreshold(0.9)
    draft = EarlyExitDrafter(
        TrainedExits(network(), (2,)), ExitRule("softmax", (0.9,)), only_confident=True,
        adaptive=AdaptiveThresholds(mixture),
    )  # fmt: skip
    request = Request(PROMPTS[1], max_new_tokens=24)
    engine = engine_of(Method(draft, Chain(4), AcceptExits()))
    tokens = [int(t) for t in engine.complete([request])[0].tokens]
    confidence, agrees = np.array(mixture._confidence), np.array(mixture._agrees)
    left = confidence > 0.9
    assert 4 < left.sum() < len(left), "tokens that stayed are labelled too"
    own = all_logits(target(layers=LAYERS), [*request.prompt, *tokens])[len(request.prompt) - 1 : -1].argmax(-1)
    changed = sum(int(a) != b for a, b in zip(own, tokens, strict=True))
    # A token that left is the answer's, so it agrees unless it was changed; the pass of the last ones is not counted.
    assert abs(int((~agrees[left]).sum()) - changed) <= 4
    engine.complete([request])
    assert mixture.updates == 1 and mixture.threshold in GRID


def test_one_exit_of_thresholds_above_one_is_the_whole_model() -> None:
    draft = drafter(1, 1, 1, only_confident=True)
    assert draft.adaptive is None and draft.exact_keys
