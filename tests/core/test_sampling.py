"""Sampling: distributions equal those of transformers and of plain formulas; random numbers are independent."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretell.core.sampling import (
    CounterRNG,
    SamplingParams,
    Stream,
    apply_penalties,
    exponential_variates,
    sample_from,
)
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.distributions.processed import ProcessedDistributions
from foretell.distributions.sampler import kept_tokens
from helpers import context_of, process, random_tokens

VOCAB = 40
NODE_STREAMS = [
    (Stream.ACCEPT, 0),
    (Stream.ACCEPT, 1),
    (Stream.ACCEPT, 2),
    (Stream.RESIDUAL, 0),
    (Stream.DRAFT, 0),
    (Stream.DRAFT, 1),
    (Stream.DRAFT, 17),
]
PINNED = [0.254629, 0.171477, 0.112755, 0.260577, 0.076932, 0.493423, 0.334483, 0.679452]
"""First numbers of every stream at position 4 under seed 7."""
settings_ = st.builds(
    dict[str, Any],
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 39, 40, 99]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    logit_bias=st.sampled_from([{}, {3: 2.5, 7: -float("inf")}]),
)


def distributions_of(
    sequence: list[int], prompt: int, sampling: SamplingParams, logits: torch.Tensor, tree: TokenTree
) -> ProcessedDistributions:
    context = context_of(sequence, sampling=sampling, prompt=prompt)
    return ProcessedDistributions(context, tree, logits, np.arange(tree.nodes)[None])


@given(settings_, st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
@pytest.mark.exhaustive_types
def test_every_parameter_is_exact_at_every_node_of_a_tree(values: dict[str, Any], seed: int) -> None:
    sampling = SamplingParams(**values)
    tokens, parents, text = random_tokens(6, VOCAB, seed + 1), [-1, 0, 0, 1, 3, 2], random_tokens(12, VOCAB, seed)
    tree = tree_from_lists([[text[-1], *tokens[1:]]], [parents])
    logits = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distributions = distributions_of(text, 5, sampling, logits, tree)
    for node in range(6):
        history = [*text, *(int(tree.token[0, a]) for a in tree.ancestors(0, node)[1:])]
        expected = process(logits[node].numpy(), history, 5, sampling)
        np.testing.assert_allclose(distributions.probabilities(0, node).numpy(), expected, atol=1e-12)


@given(settings_, st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_distributions_equal_those_of_transformers(values: dict[str, Any], seed: int) -> None:
    sampling = SamplingParams(**values)
    text = torch.tensor([random_tokens(9, VOCAB, seed)])
    logits = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plain = SamplingParams(repetition_penalty=sampling.repetition_penalty)
    found = apply_penalties(logits, [text[0].numpy()], [4], [plain])[0]
    expected = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(text, logits.clone())
    torch.testing.assert_close(found, expected[0])
    scores = TemperatureLogitsWarper(sampling.temperature)(text, expected)
    warpers = [(sampling.top_k, TopKLogitsWarper), (sampling.top_p < 1 and sampling.top_p, TopPLogitsWarper)]
    for value, warper in [*warpers, (sampling.min_p, MinPLogitsWarper)]:
        scores = warper(value)(text, scores) if value else scores
    kept = kept_tokens(found, sampling)
    p = torch.zeros(VOCAB, dtype=torch.float64)
    p[torch.from_numpy(kept.token).long()] = torch.from_numpy(kept.probability)
    torch.testing.assert_close(p, torch.softmax(scores[0], -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("penalty", [1e-320, 1e300])
def test_extreme_penalties_stay_finite(penalty: float) -> None:
    logits = torch.tensor([2.0, -3.0, 0.5])
    found = apply_penalties(logits[None], [np.array([0, 1])], [2], [SamplingParams(repetition_penalty=penalty)])[0]
    assert found.isfinite().all() and found[2] == 0.5


def test_temperature_zero_is_one_hot_at_the_first_of_equals() -> None:
    tree = tree_from_lists([[1]], [[-1]])
    distributions = distributions_of([1], 1, SamplingParams(), torch.tensor([[0.0, 4.0, 4.0]]), tree)
    assert distributions.probabilities(0, 0).tolist() == [0, 1, 0]
    assert distributions.sample(0, 0) == distributions.argmax(0, 0) == 1
    biased = distributions_of([1], 1, SamplingParams(logit_bias={1: -1.0}), torch.tensor([[0.0, 4.0, 4.0]]), tree)
    assert biased.sample(0, 0) == 2


def test_a_sample_is_the_quantile_and_never_impossible() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.0])
    assert [sample_from(p, u) for u in (0.0, 0.3, 0.34, 0.99, 1.0)] == [1, 1, 3, 3, 3]


def test_random_numbers_are_uniform() -> None:
    values = np.array(
        [
            CounterRNG(seed).uniform(position, stream)
            for seed in range(20)
            for position in range(60)
            for stream in range(5)
        ]
    )
    assert ((values >= 0) & (values < 1)).all()
    assert kstest(values, "uniform").pvalue > 1e-3
    pairs, _, _ = np.histogram2d(values[:-1], values[1:], bins=8)
    assert chisquare(pairs.ravel()).pvalue > 1e-3


def test_noise_is_exponentially_distributed_and_differs_by_token_position_and_seed() -> None:
    keys = [CounterRNG(seed).key(position) for seed in range(8) for position in range(8)]
    values = np.concatenate([exponential_variates(key, np.arange(500)) for key in keys])
    assert kstest(values, "expon").pvalue > 1e-3
    assert len(np.unique(values)) == len(values)
    pairs, _, _ = np.histogram2d(np.exp(-values[:-1]), np.exp(-values[1:]), bins=8)
    assert chisquare(pairs.ravel()).pvalue > 1e-3


def test_random_numbers_do_not_depend_on_the_order_of_calls() -> None:
    places = [(position, stream) for position in range(20) for stream in range(20)]
    forwards, backwards = CounterRNG(5), CounterRNG(5)
    assert [forwards.uniform(*p) for p in places] == [backwards.uniform(*p) for p in places[::-1]][::-1]


def test_no_two_uses_share_a_random_number() -> None:
    """All streams at all positions and depths, under one seed."""
    tree = tree_from_lists([[0] * 6], [[-1, 0, 1, 2, 3, 4]])
    seen: dict[float, tuple[int, ...]] = {}
    rng = CounterRNG(3)
    for length in range(1, 60):
        distributions = ProcessedDistributions(
            context_of([0] * length, sampling=SamplingParams(seed=3)), tree, torch.zeros(6, 2), np.arange(6)[None]
        )
        for node in range(6):
            for use in NODE_STREAMS:
                value = distributions.uniform(0, node, *use)
                assert seen.setdefault(value, (length, node, *use)) == (length, node, *use)
        for stream in (Stream.TARGET, Stream.JACOBI, Stream.LOOKAHEAD, Stream.CHOICE):
            assert seen.setdefault(rng.uniform(length, stream), (length, stream)) == (length, stream)


def test_random_numbers_of_the_streams_stay_the_same() -> None:
    """A seed gives the same answer in every version."""
    tree = tree_from_lists([[1, 2, 3]], [[-1, 0, 1]])
    distributions = distributions_of([5, 1], 2, SamplingParams(seed=7), torch.zeros(3, 2), tree)
    raw = {(Stream.ACCEPT, 2): 3 << 10, (Stream.RESIDUAL, 0): 1 << 21, (Stream.DRAFT, 5): (1 << 22) + (5 << 10)}
    for use, stream in raw.items():
        assert distributions.uniform(0, 2, *use) == CounterRNG(7).uniform(4, stream + 2)
    assert (Stream.JACOBI, Stream.LOOKAHEAD, Stream.CHOICE) == (1 << 30, (1 << 30) + 1, (1 << 30) + 2)
    assert [round(CounterRNG(7).uniform(4, stream), 6) for stream in Stream] == PINNED


def test_the_targets_sample_depends_on_the_position_only() -> None:
    logits, sampling = torch.zeros(3, 50), SamplingParams(temperature=1.0, seed=4)
    drafted = distributions_of([1, 2], 2, sampling, logits, tree_from_lists([[2, 3, 4]], [[-1, 0, 1]]))
    later = distributions_of([1, 2, 3, 4], 2, sampling, logits, tree_from_lists([[4]], [[-1]]))
    assert drafted.sample(0, 2) == later.sample(0, 0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", float("nan"), "at least 0"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("inf"), "at least 0"),
        ("top_k", -2, "at least -1"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("presence_penalty", 3.0, "at least -2 and at most 2"),
        ("frequency_penalty", -2.5, "at least -2 and at most 2"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be {words}, found"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_the_nucleus_is_that_of_sorting_the_whole_vocabulary(temperature: float, top_p: float) -> None:
    """Ties included: among equal probabilities the lower token ids are kept."""
    generator = torch.Generator().manual_seed(7)
    for step in (0.0, 0.5):
        logits = 3 * torch.randn(4099, generator=generator)
        logits = (logits / step).round() * step if step else logits
        p = torch.softmax(logits.double() / temperature, -1)
        ordered, index = p.sort(descending=True, stable=True)
        expected = index[ordered.cumsum(-1) - ordered < top_p].sort().values
        kept = kept_tokens(logits, SamplingParams(temperature, top_p=top_p))
        assert kept.token.tolist() == expected.tolist()
        np.testing.assert_allclose(kept.probability, (p[expected] / p[expected].sum()).numpy(), rtol=1e-6)
