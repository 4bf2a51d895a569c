"""Acceptance by drafter, sizes of the models and task, fitted to the tokens per pass that were published.

The log odds that a drafter's first choice is accepted are a sum of terms: one of the drafter, one of the task (another
where drafts are copied from a text), parameters and vocabulary of the target, parameters of the drafter beside the
target's, and the temperature. Along a chain the acceptance falls by a factor per depth, which belongs to the drafter;
in a tree it stays, since what is deep in a tree follows text that is easy to predict. The tree of the row turns this
into tokens (acceptance.py).

acceptance_terms.toml holds the terms; `foretell roofline published --fit acceptance` fits them anew.
"""

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from foretell.roofline.acceptance import AcceptanceByRank, best_trees, fit_acceptance, geometric_acceptance
from foretell.roofline.analysis import AnalyzedModel, builtin_model
from foretell.roofline.method_profiles import MethodProfile, cost_of_profile, find_method
from foretell.roofline.published_rows import PublishedRow, published_rows

RIDGE = 0.1
"""Weight of the squared terms against the squared misfits: what no row determines stays near 0."""
TYPICAL_PARAMETERS, TYPICAL_VOCABULARY, TYPICAL_SHARE = 7e9, 32000, 0.05
"""At which the terms of size add nothing."""
_DECAYS = tuple(k / 100 for k in range(50, 101))
_FILE = "acceptance_terms.toml"


@dataclass(frozen=True)
class AcceptanceFit:
    """Terms of the log odds and the factors by depth in chains, with the papers and how many figures of each were used.

    `drafters`: those of which a figure was used; of others nothing is predicted.
    """

    papers: Mapping[str, int]
    drafters: frozenset[str]
    decay: Mapping[str, float]
    terms: Mapping[str, float]

    def acceptance(self, sizes: Mapping[str, float], drafter: str, chain: bool, source: str) -> AcceptanceByRank:
        """The acceptance at the `features` of a drafter, a target and a task."""
        odds = sum(self.terms.get(name, 0.0) * value for name, value in sizes.items())
        decay = self.decay.get(drafter, 1.0) if chain else 1.0
        return geometric_acceptance(1 / (1 + math.exp(-odds)), source, chain, decay)

    def tokens(self, row: PublishedRow) -> float | None:
        """Tokens per pass of the tree of a row; None: no figure of its drafter was used."""
        if _drafter(row) not in self.drafters:
            return None
        acceptance = self.acceptance(_row_features(row), _drafter(row), _is_chain(row), "")
        return best_trees(acceptance, row.nodes, row.depth).tokens[-1]


def features(
    profile: MethodProfile, drafter: str, target: AnalyzedModel, draft: AnalyzedModel | None, task: str = "",
    temperature: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """The value that each term is multiplied with. A set of tasks counts as the mean of its tasks."""
    parameters, cost = target.graph("flash", False).parameters, cost_of_profile(profile, target, draft)
    values = {
        "all": 1.0,
        drafter: 1.0,
        "parameters": math.log10(parameters / TYPICAL_PARAMETERS),
        "vocabulary": math.log10(target.config.vocab / TYPICAL_VOCABULARY),
        "temperature": temperature,
    }
    if cost is not None and cost.added_parameters:
        values["drafter"] = math.log10(cost.added_parameters / parameters / TYPICAL_SHARE)
    tasks = _file()["task_sets"].get(task, [task] if task else [])
    copied = " copied" if profile.draft == "none" else ""
    return values | {f"{name}{copied}": 1 / len(tasks) for name in tasks}


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath(_FILE).read_text("utf-8"))


@cache
def published_tokens() -> Sequence[PublishedRow]:
    """One row for every distinct published number of tokens per pass, of published.toml and of the file of terms."""
    alone = [PublishedRow("", hardware="", runtime="", measure="speedup", published=0.0, **r) for r in _file()["rows"]]
    rows = [row for row in (*published_rows(), *alone) if row.method and row.states_tokens]
    return list({(_setting(row), row.nodes, row.depth, row.tau): row for row in rows}.values())


def fit_terms(rows: Iterable[PublishedRow]) -> AcceptanceFit:
    """Terms fitted to rows: ridge regression of the log odds that give the tokens of each."""
    rows = list(rows)
    decay = _fit_decay(rows)
    papers = {paper: sum(row.paper == paper for row in rows) for paper in dict.fromkeys(row.paper for row in rows)}
    values = [_row_features(row) for row in rows]
    names = list(dict.fromkeys(name for row in values for name in row))
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in values])
    odds = np.array([_log_odds(row, decay.get(_drafter(row), 1.0)) for row in rows])
    penalty = np.diag([0.0 if name == "all" else RIDGE for name in names])
    terms = np.linalg.solve(matrix.T @ matrix + penalty, matrix.T @ odds)
    drafters = frozenset(map(_drafter, rows))
    return AcceptanceFit(papers, drafters, decay, dict(zip(names, map(float, terms), strict=True)))


@cache
def fit_without(paper: str) -> AcceptanceFit:
    """Terms fitted to the figures of all other papers."""
    return fit_terms(row for row in published_tokens() if row.paper != paper)


@cache
def stored_fit() -> AcceptanceFit:
    """The terms of acceptance_terms.toml, fitted to all papers."""
    raw = _file()["fit"]
    return AcceptanceFit(raw["papers"], frozenset(raw["drafters"]), raw["decay"], raw["terms"])


def unseen_errors() -> dict[str, list[float]]:
    """|Error| of every paper's tokens per pass, predicted from those of the others where these have the drafter."""
    errors = {row.paper: list[float]() for row in published_tokens()}
    for row in published_tokens():
        if (tokens := fit_without(row.paper).tokens(row)) is not None:
            errors[row.paper].append(abs(tokens / row.tau - 1))
    return errors


def _fit_decay(rows: Sequence[PublishedRow]) -> dict[str, float]:
    """For every drafter the factor at which its chains of several lengths, elsewise alike, give the same log odds."""
    alike = defaultdict[str, dict[tuple[object, ...], list[PublishedRow]]](lambda: defaultdict(list))
    for row in rows:
        if _is_chain(row):
            alike[_drafter(row)][_setting(row)].append(row)
    chosen = dict[str, float]()
    for drafter, settings in alike.items():
        compared = [chains for chains in settings.values() if len({row.depth for row in chains}) > 1]
        spreads = {d: _spread(compared, d) for d in _DECAYS}
        if compared:
            chosen[drafter] = min(spreads, key=spreads.__getitem__)
    return chosen


def _spread(settings: Sequence[Sequence[PublishedRow]], decay: float) -> float:
    """Sum of the squared deviations of the log odds from the mean of each setting; infinite where one cannot be."""
    try:
        odds = [np.array([_log_odds(row, decay) for row in rows]) for rows in settings]
    except ValueError:
        return math.inf
    return float(sum(((each - each.mean()) ** 2).sum() for each in odds))


@cache  # the fits of all papers but one have most rows in common
def _log_odds(row: PublishedRow, decay: float) -> float:
    """Log odds of the first choice that give the tokens of a row; decay: along a chain."""
    chain = _is_chain(row)
    first = fit_acceptance(row.tau, row.nodes, row.depth, "", chain, decay if chain else 1.0).ranks[0]
    return math.log(first / (1 - first))


def _drafter(row: PublishedRow) -> str:
    return row.drafter or row.method


def _is_chain(row: PublishedRow) -> bool:
    return row.nodes == row.depth + 1


def _setting(row: PublishedRow) -> tuple[object, ...]:
    """All that decides the tokens per pass beside the tree."""
    return row.paper, _drafter(row), row.model, row.draft, row.task, row.temperature


@cache
def _row_features(row: PublishedRow) -> Mapping[str, float]:
    draft = builtin_model(row.draft) if row.draft else None
    return features(find_method(row.method), _drafter(row), builtin_model(row.model), draft, row.task, row.temperature)
