"""A budget of layers per position: what runs, what is cached, and what the whole model says of it."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from foretell.accept import AcceptReduced
from foretell.core.sampling import SamplingParams
from foretell.draft.skip_decode import LayerBudget, SkipDecodeDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.decoder import BlockRange
from foretell.model.cache.layout import Layout
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import RootOnly
from helpers import chain_tree, naive, random_tokens, target

LAYERS = 5
PROMPTS = [random_tokens(n, seed=n) for n in (3, 17, 9)]
BUDGET = LayerBudget(LAYERS, LAYERS, 2, 1, 8)


def engine_of(budget: LayerBudget, measure: bool = True, rows: int = 3) -> Engine:
    network = target(layers=LAYERS)
    draft = SkipDecodeDrafter(budget, DecoderRunner(network) if measure else None)
    accept = AcceptReduced(draft.reference_logits if measure else None)
    return Engine(DecoderRunner(network), Method(draft, RootOnly(), accept), rows=rows, prefix_caching=True)


def teacher_forced(prompt: list[int], tokens: list[int], budget: LayerBudget) -> np.ndarray:
    """Logits of an answer's tokens in one pass over all of them: at every layer the tokens before its cut-off run."""
    network = target(layers=LAYERS)
    cache, text = network.new_cache(), [*prompt, *tokens[:-1]]
    cache.reserve([0], [len(text)])
    position = np.maximum(np.arange(len(text)) - len(prompt) + 1, 0)
    resumes = np.where(np.arange(len(text)) < len(prompt), 0, budget.resumes_at(position))
    with torch.inference_mode():
        states = network.embed(torch.tensor(text))
        for layer in range(LAYERS):
            runs = (layer < budget.warm_up) | (layer >= resumes)
            layout, _ = Layout.from_tree(chain_tree(text), [0], np.array([0]), runs[None])
            states[torch.from_numpy(runs)] = network.run(
                states[torch.from_numpy(runs)], layout, cache, BlockRange(layer, layer + 1)
            ).hidden_states[-1]
        logits: np.ndarray = network.logits(network.final_norm(states))[len(prompt) - 1 :].numpy()
        return logits


def test_the_budget_falls_and_its_layers_are_those_of_the_position_before() -> None:
    budget = LayerBudget(30, 28, 11, 3, 100)
    count = budget.count(np.arange(150))
    assert count[0] == 28 and count[99] == 11 and (count[99:] == 11).all() and (np.diff(count) <= 0).all()
    sets = [{*range(3), *range(int(budget.resumes_at(t)), 30)} for t in range(150)]
    assert all(later <= earlier and set(range(3)) <= later for earlier, later in pairwise(sets))
    assert [len(s) for s in sets] == count.tolist()
    assert budget.mean == pytest.approx((28 + 11) / 2, abs=0.5)


@pytest.mark.parametrize("sizes", [(5, 6, 2, 1), (5, 5, 1, 1), (5, 3, 4, 1), (5, 5, 2, -1), (5, 5, 2, 1, 1)], ids=str)
def test_budgets_outside_their_range_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"was asked for: 0 <= warmup_layers < min_layers <= max_layers <= 5"):
        LayerBudget(*sizes)


def test_a_budget_of_all_layers_changes_nothing() -> None:
    requests = [Request(p, max_new_tokens=12) for p in PROMPTS]
    completed = engine_of(LayerBudget(LAYERS, LAYERS, LAYERS, 2, 8)).complete(requests)
    assert [list(c.tokens) for c in completed] == [naive(target(layers=LAYERS), r) for r in requests]
    assert all(c.statistics.fidelity.changed == 0 and c.statistics.fidelity.tokens == 12 for c in completed)


@pytest.mark.parametrize("warm_up", [0, 1, 2])
def test_tokens_and_their_deviation_are_those_of_one_pass_with_cut_offs(warm_up: int) -> None:
    budget = LayerBudget(LAYERS, LAYERS, 3, warm_up, 8)
    requests = [Request(p, max_new_tokens=14) for p in PROMPTS]
    completed = engine_of(budget, rows=2).complete(requests)
    for request, c in zip(requests, completed, strict=True):
        logits = teacher_forced(list(request.prompt), list(c.tokens), budget)
        assert logits.argmax(-1).tolist() == list(c.tokens)
    plain = engine_of(budget, measure=False).complete(requests)
    assert [c.tokens for c in plain] == [c.tokens for c in completed]
    assert all(c.statistics.fidelity.tokens == 0 for c in plain), "what was not measured is not reported"
    assert sum(c.statistics.fidelity.changed for c in completed) > 0


def test_sampled_deviations_are_between_the_two_distributions() -> None:
    request = Request(PROMPTS[1], SamplingParams(temperature=1, seed=3), max_new_tokens=12)
    found = engine_of(BUDGET).complete([request])[0].statistics.fidelity
    assert found.tokens == 12 and 0 < found.mean_variation < 1 and found.mean_divergence > 0


def test_the_layers_that_ran_are_those_of_the_schedule() -> None:
    engine = engine_of(BUDGET, measure=False)
    draft = engine.method.draft
    engine.complete([Request(PROMPTS[0], max_new_tokens=9)])
    expected = np.bincount(BUDGET.count(np.arange(1, 9)), minlength=LAYERS + 1)
    assert draft.layer_counts.tolist() == expected.tolist()


def test_a_layer_s_cache_holds_a_prefix_of_the_text() -> None:
    """Every layer has the keys of the prompt and of the first tokens of the answer, and those of no later token."""
    engine, prompt = engine_of(BUDGET, measure=False, rows=1), PROMPTS[1]
    engine.submit(Request(prompt, max_new_tokens=12))
    text = list(prompt)
    while len(text) < len(prompt) + 9:
        for update in engine.step():
            text += update.tokens
    length, runner = len(text) - 1, engine.runner
    assert isinstance(runner, DecoderRunner) and runner.length(0) == length
    counts = list[int]()
    for layer in range(LAYERS):
        keys = runner.cache.read(layer, torch.tensor([0]), length)[0][0]  # type: ignore[attr-defined]
        written = keys.abs().sum((0, 2)) > 0
        count = int(written.sum())
        assert written[:count].all() and count >= len(prompt), "no holes"
        counts.append(count)
    position = np.arange(1, length - len(prompt) + 1)
    runs = [(layer < BUDGET.warm_up) | (layer >= BUDGET.resumes_at(position)) for layer in range(LAYERS)]
    assert counts == [len(prompt) + int(np.count_nonzero(r)) for r in runs]


def test_other_requests_begin_with_prompts_only() -> None:
    """The keys of an answer's tokens are not those of a full pass, so no other request may read them."""
    engine = engine_of(BUDGET, measure=False, rows=1)
    first = engine.complete([Request(PROMPTS[1], max_new_tokens=20)])[0]
    longer = [*PROMPTS[1], *(int(t) for t in first.tokens)]
    again = engine.complete([Request(longer, max_new_tokens=4)])[0]
    assert 0 < again.statistics.cached_tokens <= len(PROMPTS[1])
    assert again.tokens == engine_of(BUDGET, measure=False).complete([Request(longer, max_new_tokens=4)])[0].tokens
