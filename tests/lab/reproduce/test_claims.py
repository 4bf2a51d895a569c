"""Claims of papers: every method has one, the arithmetic is right, and a false claim does not hold."""

from types import SimpleNamespace

import pytest

from foretell.catalogue import BUILT_IN, find
from foretell.lab.reproduce import CLAIMS, Claim, Finding, LabRun, Series, claim_of
from foretell.lab.reproduce.claim import rises
from foretell.lab.reproduce.claims.draft_model import expected_tokens
from foretell.testing import TINY


def run(passes: int = 12, accepted: tuple[int, ...] = (8, 4), answers: int = 2) -> LabRun:
    """Each answer begins with a pass without drafts."""
    return LabRun(
        key="", new_tokens=passes + sum(accepted), passes=passes, drafting_passes=passes - answers, drafted=30,
        accepted_per_position=accepted,
        identical=answers, answers=answers, mean_variation=0.0, changed_share=0.0, tokens=((1,),) * answers,
    )  # fmt: skip


def test_every_method_has_one_claim() -> None:
    assert sorted(c.method for c in CLAIMS) == sorted(e.name for e in BUILT_IN)


def test_a_claim_is_found_by_the_other_names_of_its_method() -> None:
    assert claim_of("prompt-lookup").method == claim_of("pld").method == "ngram"
    with pytest.raises(ValueError, match="eagle3"):
        claim_of("eagel3")


def test_acceptance_counts_the_passes_that_draft() -> None:
    found = run()
    assert found.tokens_per_pass == 2.0
    assert found.tokens_per_drafting_pass == 2.2
    assert found.acceptance == 0.8
    assert found.conditional_acceptance(2) == 0.5
    assert found.conditional_acceptance(3) == 0.0


@pytest.mark.parametrize(("acceptance", "drafts", "tokens"), [(0.8, 5, 3.68928), (0.0, 4, 1.0), (1.0, 4, 5.0)])
def test_the_capped_geometric_mean(acceptance: float, drafts: int, tokens: float) -> None:
    assert expected_tokens(acceptance, drafts) == pytest.approx(tokens, abs=1e-5)


def test_a_slack_is_a_share_of_the_value_before() -> None:
    assert rises([1.0, 0.99, 2.0], 0.01) and not rises([1.0, 0.98], 0.01)


class ScriptedLab:
    """Gives runs of a method by the value of one option."""

    def __init__(self, option: str, runs: dict[object, LabRun]) -> None:
        self._option, self._runs = option, runs

    def run(self, method: str, options: dict[str, object] | None = None, **_: object) -> LabRun:
        """The run for this value."""
        return self._runs[(options or {}).get(self._option)]


class CheckingLab:
    """Checks the options of every run, and gives the same run for all of them."""

    free = mixed = long = ("text",)

    def __init__(self) -> None:
        self.model = SimpleNamespace(network=SimpleNamespace(config=TINY))

    def run(self, method: str, options: dict[str, object] | None = None, **_: object) -> LabRun:
        """Any run."""
        find(method).parse_options(options or {})
        return run(accepted=(8, 6, 5, 4, 3, 2, 1))

    def plain_texts(self) -> list[str]:
        """Some texts."""
        return ["one", "two"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.method)
def test_a_claim_names_options_that_its_methods_have(claim: Claim) -> None:
    finding = claim.check(CheckingLab())  # type: ignore[arg-type]
    assert finding.summary and finding.series and finding.x and finding.y


@pytest.mark.parametrize(("shares", "holds"), [((8, 4), True), ((4, 8), False)])
def test_a_claim_that_is_false_does_not_hold(shares: tuple[int, int], holds: bool) -> None:
    few, many = run(accepted=(shares[1],)), run(accepted=(shares[0],))
    lab = ScriptedLab("num_draft_tokens", {2: few, 6: many, 10: many, 14: many})
    assert claim_of("specinfer").check(lab).holds is holds  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_depth_at_which_acceptance_falls_is_named(method: str) -> None:
    same = run(accepted=(10, 5, 5, 5, 5))
    finding = claim_of(method).check(SimpleNamespace(run=lambda *_: same))  # type: ignore[arg-type]
    assert not finding.holds and "100 %, 50 %, 100 %, 100 %" in finding.summary


def test_a_claim_is_a_sentence_with_a_criterion() -> None:
    for claim in CLAIMS:
        assert claim.statement.endswith(".") and claim.criterion, claim.method


def test_series_are_made_of_points() -> None:
    finding = Finding(True, "found", (Series.of("line", [(1, 2), (3, 4)]),), "x")
    assert finding.series[0].x == (1.0, 3.0) and finding.series[0].y == (2.0, 4.0)
    assert Claim("ngram", "So.", "always", lambda lab: finding).check(None) is finding  # type: ignore[arg-type]
