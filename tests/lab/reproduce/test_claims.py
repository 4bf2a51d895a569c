"""Claims of papers: totals and intervals against counting by hand, verdicts, and a null method that confirms none."""

from types import SimpleNamespace

import numpy as np
import pytest

from foretell.catalogue import find
from foretell.lab.reproduce import CLAIMS, Claim, Finding, Interval, LabRun, claim_of, mixed_prompts, reproduce
from foretell.lab.reproduce.counts import Counts, Totals, bootstrap
from foretell.lab.reproduce.lab import code_sources

PLAIN = Counts(tokens=60, passes=60, drafting=0, drafted=0, accepted=())
GOOD = Counts(tokens=63, passes=21, drafting=20, drafted=100, accepted=(19, 14, 9))


def check(claim: Claim, *counts: Counts, changed: int = 0) -> str:
    """The verdict where the runs of a claim have these counts at every prompt."""
    runs = [LabRun(key="", prompts=(c,) * 24, tokens=()) for c in counts]
    place = {id(run): measured for run, measured in zip(claim.runs, runs, strict=True)}
    lab = SimpleNamespace(run=lambda run: place[id(run)], changed=lambda run: changed, preparation=None)
    return next(reproduce(lab, [claim])).verdict  # type: ignore[arg-type]


def test_a_claim_is_found_by_the_other_names_of_its_method() -> None:
    assert claim_of("prompt-lookup").method == claim_of("pld").method == "ngram"
    with pytest.raises(ValueError, match="eagle3"):
        claim_of("eagel3")
    with pytest.raises(ValueError, match="no paper's number about it can be measured here"):
        claim_of("cascade")


def test_totals_are_sums_over_the_prompts_of_a_sample() -> None:
    prompts = [PLAIN, GOOD]
    totals = Totals.of(prompts, np.array([[1.0, 1.0], [0.0, 2.0], [2.0, 0.0]]))
    assert totals.per_pass.tolist() == pytest.approx([123 / 81, 3.0, 1.0])
    assert totals.acceptance.tolist() == pytest.approx([19 / 20, 19 / 20, 0.0])
    assert totals.gain(0.5).tolist() == pytest.approx([123 / 131, 126 / (42 + 100), 1.0])


def test_samples_of_prompts_spread_as_the_central_limit_theorem_says() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(3.0, 1.0, 400)
    weights = bootstrap(len(values))
    assert weights[0].tolist() == [1.0] * 400 and set(weights.sum(1)) == {400.0}
    means = weights[1:] @ values / 400
    low, high = np.quantile(means, (0.025, 0.975))
    error = values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.02)


def finding(low: float, high: float, changed: int = 0) -> Finding:
    """A finding with this interval of the ratio."""
    return Finding(Interval(1, 1, 1), 0.0, Interval((low + high) / 2, low, high), 24, changed)


@pytest.mark.parametrize(
    ("low", "high", "changed", "verdict"),
    [
        (0.7, 1.4, 0, "reproduced"),
        (0.6, 1.4, 0, "direction only"),
        (0.7, 1.6, 0, "direction only"),
        (0.25, 0.4, 0, "direction only"),
        (0.24, 2.0, 0, "not reproduced"),
        (-1.0, -0.5, 0, "not reproduced"),
        (0.9, 1.1, 1, "not reproduced"),
    ],
)
def test_a_verdict_needs_the_whole_interval_and_unchanged_texts(
    low: float, high: float, changed: int, verdict: str
) -> None:
    assert finding(low, high, changed).verdict((2 / 3, 3 / 2)) == verdict


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.method)
def test_no_claim_is_confirmed_by_a_method_without_effect(claim: Claim) -> None:
    """Neither where no draft is accepted, nor where all runs have the same drafts accepted."""
    assert check(claim, *(PLAIN for _ in claim.runs)) == "not reproduced"
    if len(claim.runs) > 1:
        assert check(claim, *(GOOD for _ in claim.runs)) == "not reproduced"


def test_a_changed_text_confirms_nothing() -> None:
    claim = claim_of("draft_model")
    good = Counts(tokens=228, passes=100, drafting=100, drafted=500, accepted=(60, 40, 28))
    assert check(claim, good) == "reproduced" and check(claim, good, changed=1) == "not reproduced"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.method)
def test_a_claim_names_options_of_its_methods_and_a_number_with_its_source(claim: Claim) -> None:
    for run in claim.runs:
        find(run.method).parse_options(dict(run.options_for(30)))
    assert claim.paper.endswith(".") and ("arXiv" in claim.paper or "Spec-Bench" in claim.paper)
    null = 0.0 if callable(claim.null) else claim.null
    assert claim.published > null and 0 < claim.band[0] < 1 < claim.band[1]


def test_prompts_are_of_two_sources() -> None:
    prompts = mixed_prompts(4)
    assert len(prompts) == len(set(prompts)) == 36
    assert sum(p.startswith(("Summarise:\n\n", "Continue:\n\n")) for p in prompts) == 12


def test_no_module_of_the_prompts_is_in_the_datastore() -> None:
    held_back, corpus = code_sources()
    documents = "\n".join(corpus)
    assert len(held_back) == 36 and len(documents) > 5_000_000
    assert not [name for name, source in held_back.items() if source[800:1400] in documents]


def test_claims_are_one_per_method() -> None:
    methods = [c.method for c in CLAIMS]
    assert len(methods) == len(set(methods))
