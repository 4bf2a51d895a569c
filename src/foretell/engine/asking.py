"""Whom to ask for drafts: the requests for which a drafter's expected drafts raise the step's tokens per second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from foretell.engine.budget_statistics import COST, BudgetStatistics
from foretell.engine.draft_source import DraftSource, Trials
from foretell.engine.drafted_trees import NO_LIMIT
from foretell.engine.offers import Offers, Paying
from foretell.engine.pass_times import Key
from foretell.engine.step_costs import StepLoad
from foretell.engine.tuning import (
    CHILD_SHARE,
    FLOOR_SLACK,
    MOST_EXPANDED,
    OFF,
    ON,
    READING_GAIN,
    TRIAL_NODES,
    TRIAL_REQUESTS,
    TRIAL_STEPS,
)


@dataclass(frozen=True)
class Plan:
    """Which requests a drafter is asked for, and the least scores of its drafts that matter; see `Context`."""

    asked: list[int]
    least_score: float = 0.0
    least_expanded: float = 0.0
    deepest: int = NO_LIMIT


class _Cut(NamedTuple):
    """A least chance, the drafts down to it, and the rate of the step with them."""

    chance: float
    nodes: float
    rate: float


class Asking:
    """Weighs drafters in the step of number `step`, each beside what others have offered before. `may_try`: no request
    has lost what it may. `trials`: of drafters by name and load.
    """

    def __init__(
        self,
        load: StepLoad,
        offers: Offers,
        step: int,
        may_try: bool,
        statistics: BudgetStatistics,
        trials: dict[tuple[str, Key], Trials],
    ) -> None:
        self._load, self._offers, self._costs, self._trials = load, offers, offers.costs, trials
        self._step, self.may_try, self._statistics = step, may_try, statistics
        self.trial_nodes = 0
        """Drafts that are verified for a trial beyond those that pay."""

    def weigh(self, source: DraftSource, which: list[int], unread: Callable[[int], int]) -> Plan | str:
        """The requests that a drafter is asked for: if the rate with its expected drafts is above that with what was
        offered so far. Or the reason why it is asked for none.
        """
        trials = self._trials.setdefault((source.name, self._costs.key), Trials())
        # What did not pay for other requests may pay for one whose answer begins.
        if trials.rests(self._step) and all(self._load.accounts[i].tokens > 1 for i in which):
            return COST
        self._costs.count_unread(which, unread)
        source.reads = source.reads or bool(self._costs.unread)
        before, asked = self._offers.paying, list[int]()
        for i in which:
            hoped, offered = self._hoped(source, i), before.expected.get(i, 0.0)
            if hoped > offered and self._offers.weights[i] * hoped > before.rate * self._costs.reading(source, [i])[1]:
                asked.append(i)
        best = self._best_cut(source, asked, before)
        is_new = source.is_new and self.may_try
        if not is_new and best.rate < before.rate * READING_GAIN and any(i in self._costs.unread for i in asked):
            asked = [i for i in asked if i not in self._costs.unread]
            best = self._best_cut(source, asked, before)
        pays = best.rate >= before.rate * (OFF if trials.on else ON)
        if is_new:
            # Its first step may offer nothing: retrieval knows no text yet.
            asked = (asked or which)[:TRIAL_REQUESTS]
        on = bool(asked) and (is_new or pays)
        if not on and before.nodes:
            return COST  # in this step alone: the next one may be offered less before
        if on is not trials.on:
            trials.switch(on, self._step)
            self._statistics.switched_on += on
            self._statistics.switched_off += not on
        if not on:
            trials.rest(self._step)
            asked = self._tried(trials, source, which)
            if not asked:
                return COST
        return self._plan(source, asked, best, max(before.rate, best.rate))

    def _plan(self, source: DraftSource, asked: list[int], best: _Cut, rate: float) -> Plan:
        """How far the trees of these requests are grown, where the step has this rate."""
        # In tokens: the rate and the offered values are in what tokens are worth.
        rate *= len(asked) / sum(self._offers.weights[i] for i in asked)
        draft = FLOOR_SLACK * rate * self._costs.of_a_draft(best.nodes)
        level = rate * self._costs.of_a_level(source, len(asked)) / len(asked)
        kinds = [source.acceptance(kind) for kind in {self._load.sampled[i] for i in asked}]
        least = max(kind.least_score(min(best.chance, draft, 1.0)) for kind in kinds)
        # The best child of a node is verified, too, if it is drafted.
        expanded = max(kind.least_score(min(1.0, (level + draft) / CHILD_SHARE)) for kind in kinds)
        return Plan(asked, least, min(MOST_EXPANDED, max(least, expanded)))

    def _hoped(self, source: DraftSource, i: int) -> float:
        """Accepted tokens that are hoped for of this drafter's drafts for a request."""
        acceptance = source.acceptance(self._load.sampled[i])
        return self._own(source, i)[1] * acceptance.hope * acceptance.promised

    def _own(self, source: DraftSource, i: int) -> tuple[float, float]:
        """How many drafts and accepted tokens of this drafter are expected for a request, over those for all."""
        account = self._load.accounts[i]
        share = account.share(source.name, source.acceptance(self._load.sampled[i]).promised)
        return share, share * account.factor(source.name)

    def _best_cut(self, source: DraftSource, asked: Sequence[int], before: Paying) -> _Cut:
        """The least chance down to which the drafts that are expected for these requests are best taken, instead of
        those offered to them before.
        """
        load, weights, factors = self._load, self._offers.weights, dict[bool, list[tuple[float, float]]]()
        nodes, tokens = float(before.nodes), self._offers.worth + before.gained
        for i in asked:
            drafted, accepted = self._own(source, i)
            factors.setdefault(load.sampled[i], []).append((drafted, accepted * weights[i]))
            if i in before.kept:
                nodes -= before.kept[i]
                tokens -= before.expected[i] * weights[i]
        reading, share = self._costs.reading(source, asked)
        spent = self._offers.spent + self._costs.drafting(source, len(asked)) + share
        # Reading pays only if later steps draft, too, those without prompts.
        costs = self._costs.without_prompts() if reading else self._costs
        drafts = list[tuple[float, float, float]]()
        for kind, own in factors.items():
            acceptance = source.acceptance(kind)
            requests, worth = sum(drafted for drafted, _ in own), sum(value for _, value in own) * acceptance.hope
            drafts += [(chance, n * requests, chance * n * worth) for chance, n in acceptance.promise]
        if len(factors) > 1:
            drafts.sort(reverse=True)
        best, host = _Cut(inf, nodes, 0.0), costs.before_drafts(spent)
        for chance, count, more in drafts:
            tokens, nodes = tokens + more, nodes + count
            rate = tokens / (host + costs.at(nodes))
            if rate > best.rate:
                best = _Cut(chance, nodes, rate)
        return best

    def _tried(self, trials: Trials, source: DraftSource, which: list[int]) -> list[int]:
        """The requests that a drafter which does not pay is tried for in this step, so rarely that it costs little."""
        if not trials.left:
            if self._step < trials.next or not self.may_try:
                return []
            plain, reading = self._costs.at(0), self._costs.reading(source, which)[0]
            # The chances of drafts with scores are learned without a verification of those that do not pay.
            cheap = source.scored and not reading and not self._costs.needs_drafted
            forced = 0 if cheap else TRIAL_NODES
            lost = self._costs.at(forced) - plain + self._costs.drafting(source, TRIAL_REQUESTS)
            lost += reading * min(1, TRIAL_REQUESTS / len(which))
            if not trials.begin(self._step, lost / plain, forced, TRIAL_STEPS if source.reads else 1):
                return []
        trials.left -= 1
        self._statistics.trials += 1
        self.trial_nodes = trials.forced
        start = trials.next % len(which)
        return (which[start:] + which[:start])[:TRIAL_REQUESTS]
