"""Acceptance fitted to published tokens per pass: known terms are recovered, and papers are predicted from others."""

import itertools
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
from typer.testing import CliRunner

from foretell.cli.roofline import app
from foretell.roofline import fitted_acceptance
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.fitted_acceptance import (
    features,
    fit_terms,
    fit_without,
    published_tokens,
    stored_fit,
    unseen_errors,
)
from foretell.roofline.method_profiles import find_method
from foretell.roofline.model_configs import find_model
from foretell.roofline.plan import profiles_for
from foretell.roofline.published import compare_published, group_errors
from foretell.roofline.published_rows import PublishedRow, published_rows

FIRST, DECAY = 0.7, 0.8
compared = cache(compare_published)


def row(tokens: float, depth: int = 4, nodes: int = 0, method: str = "eagle", **changes: object) -> PublishedRow:
    figures = {"model": "vicuna-7b", "hardware": "", "runtime": "", "measure": "speedup", "published": 0.0}
    drafts = {"method": method, "tau": tokens, "nodes": nodes or depth + 1, "depth": depth, "source": "made, here"}
    return PublishedRow("", **(figures | drafts | changes))  # type: ignore[arg-type]


def chain(depth: int, first: float = FIRST, decay: float = DECAY) -> float:
    """Tokens per pass by enumeration: every draft before the first refused one, and the target's own token."""
    rates = [first * decay**d for d in range(depth)]
    ends = (math.prod(rates[:k]) * (1 - rates[k] if k < depth else 1.0) for k in range(depth + 1))
    return sum(p * (k + 1) for k, p in enumerate(ends))


def tree(depth: int, ranks: tuple[float, ...]) -> float:
    """Tokens per pass of all nodes down to a depth, by enumeration of their paths."""
    return 1 + sum(math.prod(path) for d in range(1, depth + 1) for path in itertools.product(ranks, repeat=d))


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


def test_the_factor_per_depth_is_that_of_the_chains() -> None:
    fit = fit_terms([row(chain(k), k) for k in range(2, 8)])
    assert fit.decay == {"eagle": DECAY} and fit.papers == {"made": 6}
    for depth in (1, 9):
        assert fit.tokens(row(0.0, depth)) == pytest.approx(chain(depth), rel=0.01)
    one_length = fit_terms([row(chain(3), 3), row(chain(3), 3, task="gsm8k")])
    assert one_length.decay == {}


def test_drafter_task_and_temperature_add_up() -> None:
    """Tokens of every combination but one follow from known log odds; the missing one is predicted."""
    drafters, tasks = {"eagle": 1.0, "eagle3": 1.6}, {"gsm8k": 0.3, "alpaca": -0.3, "humaneval": 0.0}

    def tokens(drafter: str, task: str, temperature: float) -> float:
        return chain(4, 1 / (1 + math.exp(-(drafters[drafter] + tasks[task] - 0.4 * temperature))), 1.0)

    every = list(itertools.product(drafters, tasks, (0.0, 1.0)))
    rows = [row(tokens(*c), method=c[0], task=c[1], temperature=c[2]) for c in every]
    for at, left_out in enumerate(rows):
        fit = fit_terms(rows[:at] + rows[at + 1 :])
        assert fit.tokens(left_out) == pytest.approx(left_out.tau, rel=0.025)


def test_a_tree_keeps_its_acceptance_with_depth() -> None:
    fit = fit_terms([row(chain(k), k) for k in range(2, 8)])
    first = 1 / (1 + math.exp(-(fit.terms["all"] + fit.terms["eagle"] + _sizes(fit.terms))))
    ranks = (first, *(min(first, 0.75 * (1 - first) * 0.5**r) for r in range(1, 8)))
    assert fit.tokens(row(0.0, 2, 1 + 8 + 64)) == pytest.approx(tree(2, ranks), rel=1e-6)


def _sizes(terms: Mapping[str, float]) -> float:
    values = features(find_method("eagle"), "eagle", AnalyzedModel(*find_model("vicuna-7b")), None)
    return sum(terms[name] * values[name] for name in ("parameters", "vocabulary", "drafter"))


def test_features_are_the_sizes_and_the_mean_of_the_tasks() -> None:
    target = AnalyzedModel(*find_model("llama-3.1-8b"))
    draft = AnalyzedModel(*find_model("llama-3.2-1b"))
    values = features(find_method("draft_model"), "draft_model", target, draft, "eagle_five", 1.0)
    assert values["vocabulary"] == pytest.approx(math.log10(128256 / 32000))
    assert values["parameters"] == pytest.approx(math.log10(8.030261248 / 7))
    assert values["drafter"] == pytest.approx(math.log10(1.235814400 / 8.030261248 / 0.05))
    assert values["temperature"] == 1.0 and values["cnn_dm"] == values["mt_bench"] == pytest.approx(1 / 5)
    copied = features(find_method("ngram"), "ngram", target, None, "cnn_dm")
    assert copied["cnn_dm copied"] == 1.0 and not {"cnn_dm", "drafter"} & set(copied)


def test_the_stored_terms_are_those_of_the_published_rows() -> None:
    fit, stored = fit_terms(published_tokens()), stored_fit()
    assert (stored.papers, stored.drafters, stored.decay) == (fit.papers, fit.drafters, fit.decay)
    assert stored.terms == pytest.approx(fit.terms, abs=1e-4)


def test_tokens_that_nobody_published_are_not_fitted_to() -> None:
    assert not any(r.tau_basis.startswith("assumed") for r in published_tokens())
    assert any(r.tau_basis.startswith("assumed") for r in published_rows())
    settings = [(r.paper, r.drafter or r.method, r.model, r.draft, r.task, r.temperature, r.nodes, r.tau) for r in
                published_tokens()]  # fmt: skip
    assert len(set(settings)) == len(settings)


def test_a_papers_own_figures_do_not_change_its_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = "arXiv 2503.01840"
    rows = [r for r in published_tokens() if r.paper == paper]
    before = [fit_without(paper).tokens(r) for r in rows]
    another = fit_without("Spec-Bench leaderboard").terms
    changed = [replace(r, tau=1 + 0.6 * (r.tau - 1)) if r.paper == paper else r for r in published_tokens()]
    monkeypatch.setattr(fitted_acceptance, "published_tokens", lambda: changed)  # `fit_without` itself stays cached
    assert [fit_without.__wrapped__(paper).tokens(r) for r in rows] == before
    assert fit_without.__wrapped__("Spec-Bench leaderboard").terms != another


def test_a_drafter_of_one_paper_is_not_predicted_from_others() -> None:
    medusa_2 = [c for c in compared() if c.row.drafter == "medusa-2"]
    assert len(medusa_2) == 4 and {(c.tokens, c.error_from_tokens) for c in medusa_2} == {(None, None)}


def test_papers_are_predicted_better_than_by_the_drafters_other_figures() -> None:
    """Against the null: the median log odds of the drafter's figures in other papers, whatever model and task."""
    null, fitted = [], []
    odds = {id(r): fitted_acceptance._log_odds(r, 1.0) for r in published_tokens()}
    for r in published_tokens():
        drafter = r.drafter or r.method
        others = [odds[id(o)] for o in published_tokens() if o.paper != r.paper and (o.drafter or o.method) == drafter]
        tokens = fit_without(r.paper).tokens(r)
        assert (tokens is None) == (not others)
        if tokens is not None:
            constant = fitted_acceptance.AcceptanceFit({}, frozenset({drafter}), {}, {"all": statistics.median(others)})
            null.append(abs((constant.tokens(r) or 0) / r.tau - 1))
            fitted.append(abs(tokens / r.tau - 1))
    assert statistics.median(fitted) < 0.065 < 0.09 < statistics.median(null)
    assert statistics.mean(fitted) < 0.09 < 0.10 < statistics.mean(null)


def test_errors_of_speedups_of_unseen_papers_and_their_goals() -> None:
    groups = {g.group: g for g in group_errors(compared())}
    reached = {"eager": 0.08, "eager_third_party": 0.16, "compiled": 0.19, "serving": 0.12}
    goals = {"eager": 0.08, "eager_third_party": 0.08, "compiled": 0.15, "serving": 0.20}
    assert {name: g.goal for name, g in groups.items() if g.goal is not None} == goals
    assert {name for name, g in groups.items() if g.unseen_median is not None} == set(goals)
    assert [name for name, most in reached.items() if (groups[name].unseen_median or 1) > most] == []
    assert [groups[name].unseen for name in reached] == [68, 20, 13, 32]
    by_paper = unseen_errors()
    assert statistics.median(by_paper["arXiv 2401.15077"]) == pytest.approx(0.035, abs=0.01)
    assert by_paper["arXiv 2401.10774"] == []


def test_a_plan_fits_acceptance_to_targets_without_figures() -> None:
    def planned(model: str, method: str) -> object:
        return profiles_for(AnalyzedModel(*find_model(model)), {method: find_method(method)}, None)[method]

    fitted = profiles_for(AnalyzedModel(*find_model("qwen3-8b")), {"eagle3": find_method("eagle3")}, None)["eagle3"]
    assert fitted.basis == "fitted" and "120 figures of 7 publications" in fitted.acceptance.source
    row_of_it = row(0.0, 8, 61, method="eagle3", model="qwen3-8b")
    first = fitted.acceptance.ranks[0]
    assert log_odds(first) == pytest.approx(
        sum(stored_fit().terms[n] * v for n, v in fitted_acceptance._row_features(row_of_it).items())
    )
    assert planned("qwen3-8b", "ngram") == find_method("ngram")
    assert planned("qwen3-8b", "mtp") == find_method("mtp")


def test_the_command_prints_what_it_fitted_to() -> None:
    runner = CliRunner(env={"COLUMNS": "120"})
    records = json.loads(runner.invoke(app, ["published", "--fit", "acceptance", "--json"]).stdout)
    printed = {(r["what"], r["name"]): r["value"] for r in records}
    assert printed["figures of", "Spec-Bench leaderboard"] == 27
    assert printed["factor by depth of", "eagle"] == stored_fit().decay["eagle"]
    text = runner.invoke(app, ["published", "--fit", "acceptance"]).stdout
    assert "predicted from the others" in text and "arXiv 2401.10774" in text
