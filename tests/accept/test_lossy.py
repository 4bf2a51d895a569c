"""Lossy acceptors: limits in which they are exact, guarantees, and the reported fidelity loss."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from foretell.accept import (
    Acceptor,
    BiLDRollback,
    DistanceAcceptor,
    LenientRejection,
    Match,
    Rejection,
    SyntheticAcceptance,
    TopKAcceptor,
    TypicalAcceptance,
)
from foretell.accept.fidelity import kl_divergence, total_variation
from foretell.accept.lossy import LossyAcceptor
from foretell.catalogue import BuildContext, find
from foretell.core.sampling import SamplingParams
from foretell.draft import NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.engine.statistics import RequestStatistics
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, RootOnly
from helpers import (
    VOCAB,
    chain_tree,
    engine_for,
    exact_distribution,
    generate,
    good_model,
    p_value,
    random_tokens,
    run,
    small_model,
    target,
    unchecked,
)

PROMPTS = [random_tokens(n, seed=n) for n in (3, 17, 9)]
REQUESTS = [Request(p, max_new_tokens=10) for p in PROMPTS]
SAMPLED = [replace(r, sampling_params=SamplingParams(temperature=2, seed=i)) for i, r in enumerate(REQUESTS)]
PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())


def chain(accept: Acceptor, draw: bool = True, **stops: float) -> AnyMethod:
    return Method(small_model(VOCAB), Chain(4, draw, stops.get("confidence", 0.0), stops.get("fallback", 0.0)), accept)


def statistics(method: AnyMethod, requests: list[Request]) -> list[RequestStatistics]:
    engine = Engine(DecoderRunner(target()), method, rows=3)
    return [done.statistics for done in engine.complete(requests)]


def distribution(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


EXACT_WHEN_GREEDY = [
    LenientRejection(1.0),
    TopKAcceptor(1),
    DistanceAcceptor(0),
    BiLDRollback(0.0),
    TypicalAcceptance(),
]
DEVIATING = [
    LenientRejection(1e-4),
    TopKAcceptor(8),
    DistanceAcceptor(9),
    BiLDRollback(9.0),
    TypicalAcceptance(0.05),
    TopKAcceptor(1, minimum_block=3),
]


@pytest.mark.parametrize("accept", EXACT_WHEN_GREEDY, ids=repr)
def test_strict_limits_are_greedy_decoding_without_loss(accept: Acceptor) -> None:
    assert generate(chain(accept), REQUESTS) == generate(PLAIN, REQUESTS)
    for s in statistics(chain(accept), REQUESTS):
        assert s.fidelity.tokens == s.new_tokens
        assert (s.fidelity.mean_variation, s.fidelity.mean_divergence, s.fidelity.changed_share) == (0, 0, 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("accept", DEVIATING, ids=repr)
@pytest.mark.parametrize("requests", [REQUESTS, SAMPLED], ids=["greedy", "sampled"])
def test_deviation_is_reported(accept: Acceptor, requests: list[Request]) -> None:
    if isinstance(accept, TypicalAcceptance) and requests is REQUESTS:
        pytest.skip("typical acceptance is greedy at temperature 0")
    texts = generate(chain(accept), requests)
    assert texts != generate(PLAIN, requests)
    assert texts == generate(chain(accept), requests, rows=1, chunk=512), "answers depend on the batch"
    losses = [s.fidelity for s in statistics(chain(accept), requests)]
    assert all(p.mean_variation <= 1 and p.changed_share <= 1 for p in losses)
    for name in ("variation", "divergence", "changed"):
        assert sum(getattr(p, name) for p in losses) > 0


def test_greedy_variation_is_the_share_of_changed_tokens() -> None:
    for s in statistics(chain(TopKAcceptor(8)), REQUESTS):
        assert s.fidelity.mean_variation == s.fidelity.changed_share


def test_lossless_methods_report_no_loss() -> None:
    for s in statistics(chain(Rejection()), SAMPLED):
        assert (s.fidelity.tokens, s.fidelity.mean_variation, s.fidelity.changed_share) == (0, 0, 0)


def test_lenience_of_one_is_the_exact_test() -> None:
    for shape in (Chain(4), BranchingTree((2, 2)), BranchingTree((3, 1), distinct=False)):
        exact = generate(Method(small_model(VOCAB), shape, Rejection()), SAMPLED)
        method: AnyMethod = Method(small_model(VOCAB), shape, LenientRejection(1.0))
        assert generate(method, SAMPLED) == exact
    assert all(s.fidelity.mean_variation < 1e-12 for s in statistics(chain(LenientRejection(1.0)), SAMPLED))


@pytest.mark.parametrize("lenience", [0.3, 0.7])
def test_lenience_bounds_every_probability(lenience: float) -> None:
    p, q = distribution(0.5, 0.3, 0.15, 0.05), distribution(0.1, 0.2, 0.2, 0.5)
    rule = LenientRejection(lenience)
    part = rule.accepted_mass(p, q)
    out = part + (1 - part.sum()) * rule.residual(p, q)
    assert float(out.sum()) == pytest.approx(1)
    assert float(part.sum()) == pytest.approx(float(torch.minimum(p / lenience, q).sum()))
    assert (out <= p / lenience + 1e-12).all()


def test_greedy_lenience_asks_for_a_share_of_the_best() -> None:
    assert LenientRejection(0.5).acceptable(distribution(0.5, 0.25, 0.2, 0.05)).tolist() == [True, True, False, False]


def test_sets_of_tokens() -> None:
    p = distribution(0.1, 0.0, 0.6, 0.3, 0.0)
    assert TopKAcceptor(2).acceptable(p).tolist() == [False, False, True, True, False]
    assert TopKAcceptor(4).acceptable(p).tolist() == [True, False, True, True, False]
    assert DistanceAcceptor(1).acceptable(p).tolist() == [False, True, True, True, False]
    assert BiLDRollback(-math.log(0.25)).acceptable(p).tolist() == [False, False, True, True, False]
    assert BiLDRollback(0).acceptable(p).tolist() == [False, False, True, False, False]
    assert BiLDRollback(math.inf).acceptable(p).all()


@pytest.mark.parametrize(
    "rules",
    [
        [BiLDRollback(d) for d in (0.0, 0.5, 1.0, 3.0, math.inf)],
        [LenientRejection(x) for x in (1.0, 0.7, 0.3, 0.05)],
        [TopKAcceptor(k) for k in (1, 2, 4, 7)],
        [DistanceAcceptor(e) for e in (0, 1, 3, 6)],
        [TypicalAcceptance(x, 3 * x) for x in (0.5, 0.2, 0.09, 0.01)],
    ],
    ids=lambda rules: type(rules[0]).__name__,
)
def test_a_looser_rule_accepts_what_a_stricter_one_does(rules: list[LossyAcceptor]) -> None:
    """So that of the same drafts no fewer are accepted, and there are no more rollbacks."""
    for p in np.random.default_rng(0).dirichlet(np.full(7, 0.5), 40):
        sets = [set(rule.acceptable(torch.from_numpy(p)).nonzero().flatten().tolist()) for rule in rules]
        assert all(strict <= loose for strict, loose in pairwise(sets)), p


@pytest.mark.parametrize(("entropy", "least"), [(0, 0.09), (1.204, 0.09), (2, 0.0406), (4, 0.0055)])
def test_typical_thresholds(entropy: float, least: float) -> None:
    assert TypicalAcceptance(0.09, 0.3).threshold(entropy) == pytest.approx(least, abs=1e-4)


def test_a_minimum_block_accepts_that_many_tokens() -> None:
    small = generate(Method(NoDrafter(), RootOnly(), Match()), REQUESTS)
    assert generate(chain(TopKAcceptor(1, minimum_block=1)), REQUESTS) == small
    for s in statistics(chain(DistanceAcceptor(0, minimum_block=3), draw=False), REQUESTS):
        full_passes = s.accepted_per_position[1]
        assert full_passes >= s.target_passes - 2, "all but passes at the end accept two drafts"


def test_bild_limits() -> None:
    """Without confidence: the target's own tokens. With confidence and no rollback: all drafts are accepted."""
    assert generate(chain(BiLDRollback(3.0), draw=False, fallback=1.0), REQUESTS) == generate(PLAIN, REQUESTS)
    for s in statistics(chain(BiLDRollback(math.inf), draw=False), REQUESTS):
        assert sum(s.accepted_per_position) == s.drafted
    passes = [
        sum(s.target_passes for s in statistics(chain(BiLDRollback(d), draw=False), REQUESTS)) for d in (0.0, math.inf)
    ]
    assert passes[0] >= passes[1]


def test_the_distribution_of_a_lossy_chain_is_within_the_reported_loss() -> None:
    """The first token after a one-token chain: a sample of q if acceptable, otherwise of the target."""
    vocab, prompt, count = 5, [1, 2, 0, 1], 600
    requests = [Request(prompt, SamplingParams(temperature=1.5, seed=s), max_new_tokens=2) for s in range(count)]
    method: AnyMethod = Method(small_model(vocab), Chain(1), TopKAcceptor(3))
    with unchecked():
        answers = np.array(generate(method, requests, rows=512, chunk=1 << 14, vocab=vocab))[:, 0]
    p = torch.from_numpy(exact_distribution(target(vocab), prompt, 1, SamplingParams(temperature=1.5)))
    output = small_model(vocab).runner.forward([0], chain_tree(prompt))
    q = torch.softmax(output.logits[-1].double() / 1.5, -1)
    allowed = TopKAcceptor(3).acceptable(p)
    distribution = q * allowed + p * float(q[~allowed].sum())
    assert p_value(np.bincount(answers, minlength=vocab), distribution.numpy()) > 1e-3
    engine = Engine(DecoderRunner(target(vocab)), method)
    (done,) = engine.complete([Request(prompt, SamplingParams(temperature=1.5), max_new_tokens=2)])
    loss = done.statistics.fidelity
    assert total_variation(distribution, p) <= loss.variation + 1e-9
    assert kl_divergence(distribution, p) <= loss.divergence + 1e-9


def test_the_longest_accepted_path_wins() -> None:
    """All accepted siblings are followed: a later one with a longer path wins."""
    method: AnyMethod = Method(good_model(VOCAB), BranchingTree((3, 1, 1), draw=False), TypicalAcceptance(0.01))
    with_tree = sum(s.target_passes for s in statistics(method, SAMPLED))
    chain_only: AnyMethod = Method(good_model(VOCAB), BranchingTree((1, 1, 1), draw=False), TypicalAcceptance(0.01))
    assert with_tree <= sum(s.target_passes for s in statistics(chain_only, SAMPLED))


def test_an_impossible_token_has_a_finite_divergence() -> None:
    assert kl_divergence(distribution(1, 0), distribution(0, 1)) == pytest.approx(10 * math.log(10))
    assert kl_divergence(distribution(0.5, 0.5), distribution(0.5, 0.5)) == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LenientRejection(0.0), "lenience"),
        (lambda: TopKAcceptor(0), "best token"),
        (lambda: DistanceAcceptor(-1), "distance"),
        (lambda: BiLDRollback(-1), "nats"),
        (lambda: BiLDRollback(math.nan), "nats"),
        (lambda: TypicalAcceptance(0), "epsilon"),
        (lambda: TopKAcceptor(2, minimum_block=0), "minimum block"),
    ],
)
def test_bad_values_are_refused(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()


RATES = (0.9, 0.5, 0.4, 0.1)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.exhaustive)])
def test_synthetic_lengths_match_the_rates_of_vllm(temperature: float) -> None:
    """Position i is reached and accepted in a share `rates[i]` of the passes, in which no answer's end is near."""
    requests = [Request(p, SamplingParams(temperature, seed=i), max_new_tokens=200) for i, p in enumerate(PROMPTS)]
    method: AnyMethod = Method(small_model(VOCAB), Chain(5, draw=False), SyntheticAcceptance(RATES))
    lengths: list[int] = []
    for updates in run(engine_for(method), requests):
        decoded = [len(u.tokens) for u in updates if u.tokens]
        lengths += decoded[1 : -len(RATES) - 1]  # The first is of the prompt; towards the end chains are shorter.
    passes = len(lengths)
    assert passes > 150 and max(lengths) == len(RATES) + 1, "no draft beyond the rates is accepted"
    for position, rate in enumerate(RATES):
        accepted = sum(length > position + 1 for length in lengths)
        assert binomtest(accepted, passes, rate).pvalue > 1e-3


def test_synthetic_rates_of_a_mean_length_and_rates_that_cannot_be() -> None:
    parts = BuildContext(VOCAB, target(), (DecoderRunner(target().first_layers(1)),))
    values = {"num_speculative_tokens": 4, "synthetic_acceptance_length": 2.25}
    assert find("synthetic_lossy").build(parts, values).accept == SyntheticAcceptance((1.0, 0.25, 0.0, 0.0))
    for wrong, message in (
        ({"synthetic_acceptance_rates": [0.5, 1.5]}, "less than or equal to 1"),
        ({"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 2}, "give either"),
        ({"synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 2}, "give one for each"),
        ({"synthetic_acceptance_length": 7}, "at most 6 tokens"),
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, "do not rise"),
    ):
        with pytest.raises(ValueError, match=message):
            find("synthetic_lossy").build(parts, wrong)
