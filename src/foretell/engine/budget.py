"""The draft budget: decides in every step which drafters are asked for which requests, and which of the drafts that
they offer the target verifies: those that give the most expected tokens per second over all requests together.

The goal is that of TurboSpec (arXiv 2406.14066), chosen per node and step; requests behind their deadline weigh more,
as AdaServe (arXiv 2501.12162) serves them first.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from foretell.core.context import StepResult
from foretell.core.tree import TokenTree
from foretell.draft.base import Drafter, NoDrafter
from foretell.engine.acceptance import OfferedTree
from foretell.engine.draft_source import DraftSource, Trials
from foretell.engine.drafted_trees import NO_LIMIT, DraftedTrees
from foretell.engine.drafter_check import DrafterCheck
from foretell.engine.method import BoundMethod
from foretell.engine.pass_times import PassTimes
from foretell.engine.statistics import StepTime
from foretell.engine.step_costs import StepCosts, StepLoad
from foretell.engine.tuning import (
    CHILD_SHARE,
    FIRST_STEPS,
    FLOOR_SLACK,
    HORIZON,
    LEVEL_SHARE,
    MOST_EXPANDED,
    OFF,
    ON,
    READING_GAIN,
    TRIAL_NODES,
    TRIAL_REQUESTS,
)
from foretell.shape.chain import Chain

NO_CHOICE, LOAD, MEASURED, COST = "no_choice", "load", "measured", "cost"
REASONS = NO_CHOICE, LOAD, MEASURED, COST
"""Why a request got no drafts in a step: it may have none; more requests than `disable_by_batch_size`; a plain pass is
measured, or none was before a prompt is read; drafts would not pay; they would cost a request more than it may lose.
"""


@dataclass(frozen=True)
class Plan:
    """Which requests a drafter is asked for, and the least scores of its drafts that matter; see `Context`."""

    asked: list[int]
    least_score: float = 0.0
    least_expanded: float = 0.0
    deepest: int = NO_LIMIT


@dataclass
class BudgetStatistics:
    """Sums over all steps that decode."""

    steps: int = 0
    drafting_steps: int = 0
    """Steps with drafts to verify."""
    trials: int = 0
    """Steps in which drafters that do not pay were tried."""
    switched_on: int = 0
    """How often a drafter was asked again at a load where it had not paid."""
    switched_off: int = 0
    nodes_drafted: int = 0
    nodes_verified: int = 0
    undrafted: Counter[str] = field(default_factory=Counter)
    """Steps of requests without drafts, by reason."""


@dataclass(frozen=True)
class Forecast:
    """What was expected of the last step."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    """Of the step without drafts."""
    tokens: float | None = 0.0
    """New ones; None: a method drafted that the budget does not govern."""


@dataclass
class _Offer:
    source: DraftSource
    indices: list[int]
    tree: OfferedTree
    check: DrafterCheck | None
    read: int
    """Tokens that the drafter had to read before."""


class _Offered(NamedTuple):
    """Drafts that pay: their number and summed value, the rate with them, and per request number and summed chances."""

    nodes: int
    gained: float
    rate: float
    kept: dict[int, int]
    expected: dict[int, float]


class _Cut(NamedTuple):
    """A least chance, the drafts down to it, and the rate of the step with them."""

    chance: float
    nodes: float
    rate: float


class Budget:
    """Chooses the drafts of every step. It governs lossless methods that keep the text of a seed whatever is drafted:
    all of them, or with `every_method` False those whose shape is `elastic`. Of other methods it sees no drafts: they
    draft by the request alone, and no measured time touches their texts.

    `times`: of passes and drafters; None: learned. `disable_by_batch_size`: a request beside which so many others wait
    or run gets no drafts (None: any number). A budget serves one engine.
    """

    def __init__(
        self, times: PassTimes | None = None, *, every_method: bool = True, disable_by_batch_size: int | None = None
    ) -> None:
        self.times = PassTimes() if times is None else times
        self.statistics, self.last = BudgetStatistics(), Forecast()
        self._every_method, self._crowd = every_method, disable_by_batch_size
        self._sources: WeakKeyDictionary[Drafter, list[DraftSource]] = WeakKeyDictionary()
        """By the drafter of a method, which lives as long as the method does."""
        self._step = 0
        self.begin(StepLoad(1, False, (), (), (), (), ()))

    def governs(self, bound: BoundMethod) -> bool:
        """Whether it chooses the drafts of a method."""
        method = bound.method
        free = method.accept.same_seed and method.lossless and not isinstance(method.draft, NoDrafter)
        return free and (self._every_method or method.tree.elastic)

    def prunes(self, bound: BoundMethod) -> bool:
        """Whether it leaves out predicted and forced drafts of requests of a method that do not pay."""
        return self._every_method and bound.method.accept.same_seed

    def depths(self, bound: BoundMethod, indices: Sequence[int]) -> list[int]:
        """How deep the drafts of requests of a method may be, by each request alone."""
        shape, accounts = bound.method.tree, self._load.accounts
        if isinstance(shape, Chain) and shape.adaptive:
            return [accounts[i].own_depth(shape.length) for i in indices]
        return [NO_LIMIT] * len(indices)

    def begin(self, load: StepLoad) -> None:
        """Begin a step; the one before may have failed."""
        self._load, self._step = load, self._step + 1
        self._costs = StepCosts(self.times, load)
        deficits = [account.deficit(left) for account, left in zip(load.accounts, load.left, strict=True)]
        self._weights = [w * (1 + self._costs.requests * d**2) for w, d in zip(load.weights, deficits, strict=True)]
        """What a token of each request is worth: the more, the more it has lost by drafts."""
        self._may_try = all(d < 1 for w, d in zip(load.weights, deficits, strict=True) if w)
        """Whether no request has lost what it may."""
        self._worth, self._spent, self._trial_nodes = sum(self._weights), 0.0, 0
        self._ahead = 0.0
        """Seconds of reading that the drafts of later steps pay for."""
        self._values, self._offers = list[float](), list[_Offer]()
        self._offered = dict[int, list[float]]()
        """Chances of the drafts offered to each request."""
        self._expected = dict[int, float]()
        """Accepted tokens that are expected of the drafts chosen for each request."""
        self._fixed = 0
        """Drafts that are verified whatever they cost."""
        self._looked = set[tuple[Drafter, int]]()
        """Drafters that are asked only to see whether they fit."""

    def plan(
        self, bound: BoundMethod, number: int, which: Sequence[int], unread: Callable[[int], int] = lambda i: 0
    ) -> Plan | None:
        """Which of the requests `which` the drafter of this number of a method is asked for; None: for none. `unread`:
        tokens of a request that it has to read before it drafts.
        """
        open_ = [i for i in which if self._load.room[i] > 0]
        reason = NO_CHOICE
        if open_:
            crowded = self._crowd is not None and self._load.crowd >= self._crowd
            reason = LOAD if crowded else MEASURED if self._costs.measures else ""
        if not reason:
            check = bound.method.check_of(number)
            plan = self._weigh(self._source(bound, number), open_, unread) if check is None or check.fits else COST
            if isinstance(plan, Plan):
                return plan
            reason = plan
            if check is not None and check.undecided and self._may_try:
                self._looked.add((bound.method.draft, number))
                self._costs.count_unread(open_, unread)
                return Plan(open_[:TRIAL_REQUESTS], deepest=1)
        if not number:
            self.statistics.undrafted[reason] += len(which)
        return None

    def _source(self, bound: BoundMethod, number: int) -> DraftSource:
        method, count = bound.method, len(bound.method.sources)
        if method.draft not in self._sources:
            names = [f"{method.name} {i}{kind}" for kind in ("", " look") for i in range(count)]
            self._sources[method.draft] = [DraftSource(name) for name in names]
        # Looks are as cheap as they can be: what they take and give says nothing about other drafts.
        return self._sources[method.draft][number + count * ((method.draft, number) in self._looked)]

    def _weigh(self, source: DraftSource, which: list[int], unread: Callable[[int], int]) -> Plan | str:
        """Compare the rate with this drafter's expected drafts with that of what was offered so far."""
        trials = source.trials.setdefault(self._costs.key, Trials())
        # What did not pay for other requests may pay for one whose answer begins.
        if trials.rests(self._step) and all(self._load.accounts[i].tokens > 1 for i in which):
            return COST
        self._costs.count_unread(which, unread)
        before, asked = self._so_far, list[int]()
        for i in which:
            hoped, offered = self._hoped(source, i), before.expected.get(i, 0.0)
            if hoped > offered and self._weights[i] * hoped > before.rate * self._costs.reading(source, [i])[1]:
                asked.append(i)
        best, spent = self._best_cut(source, asked, before)
        is_new = source.steps < FIRST_STEPS and self._may_try
        if not is_new and best.rate < before.rate * READING_GAIN and any(i in self._costs.unread for i in asked):
            asked = [i for i in asked if i not in self._costs.unread]
            best, spent = self._best_cut(source, asked, before)
        pays = best.rate >= before.rate * (OFF if trials.on else ON)
        if is_new:
            asked = asked[:TRIAL_REQUESTS]
        on = bool(asked) and (is_new or pays)
        if not on and before.nodes:
            return COST  # in this step alone: the next one may be offered less before
        if on is not trials.on:
            trials.switch(on, self._step)
            self.statistics.switched_on += on
            self.statistics.switched_off += not on
        if not on:
            trials.rest(self._step)
            asked = self._tried(trials, source, which)
            if not asked:
                return COST
        rate, size = max(before.rate, best.rate), best.nodes
        floor = FLOOR_SLACK * min(best.chance, rate * self._costs.of_a_draft(size), 1.0)
        raw = max(source.acceptance(kind).least_score(floor) for kind in {self._load.sampled[i] for i in asked})
        level = LEVEL_SHARE * (spent - self._spent) / source.levels
        return Plan(asked, raw, min(MOST_EXPANDED, max(raw, rate * level / (CHILD_SHARE * len(asked)))))

    @property
    def _so_far(self) -> "_Offered":
        """The drafts that pay of those that were offered before."""
        if not self._values:
            return _Offered(0, 0.0, self._worth / self._costs.counted(0, self._spent), {}, {})
        values, weights = sorted(self._values, reverse=True), self._weights
        nodes, gained = self._best_of(values)
        least = values[nodes - 1] if nodes else inf
        paying = {i: [c for c in chances if c * weights[i] >= least] for i, chances in self._offered.items()}
        return _Offered(
            nodes,
            gained,
            (self._worth + gained) / self._costs.counted(nodes, self._spent),
            {i: len(chances) for i, chances in paying.items()},
            {i: sum(chances) for i, chances in paying.items()},
        )

    def _hoped(self, source: DraftSource, i: int) -> float:
        """Accepted tokens that are hoped for of this drafter's drafts for a request."""
        return self._load.accounts[i].factor(source.name) * source.acceptance(self._load.sampled[i]).hoped

    def _best_cut(self, source: DraftSource, asked: Sequence[int], before: "_Offered") -> tuple["_Cut", float]:
        """The least chance down to which the drafts that are expected for these requests are best taken, instead of
        those offered to them before; and the seconds of drafting with them.
        """
        load, nodes, tokens = self._load, float(before.nodes), self._worth + before.gained
        weights = dict[bool, list[float]]()
        for i in asked:
            weights.setdefault(load.sampled[i], []).append(load.accounts[i].factor(source.name) * self._weights[i])
            if i in before.kept:
                nodes -= before.kept[i]
                tokens -= before.expected[i] * self._weights[i]
        reading, share = self._costs.reading(source, asked)
        spent = self._spent + self._costs.drafting(source, len(asked)) + share
        # Reading pays only if later steps draft, too, those without prompts.
        costs = self._costs.without_prompts() if reading else self._costs
        drafts = list[tuple[float, float, float]]()
        for kind, own in weights.items():
            acceptance = source.acceptance(kind)
            requests, worth = len(own), sum(own) * acceptance.hope
            drafts += [(chance, n * requests, chance * n * worth) for chance, n in acceptance.promise]
        if len(weights) > 1:
            drafts.sort(reverse=True)
        best = _Cut(inf, nodes, 0.0)
        for chance, count, more in drafts:
            tokens, nodes = tokens + more, nodes + count
            rate = tokens / costs.counted(nodes, spent)
            if rate > best.rate:
                best = _Cut(chance, nodes, rate)
        return best, spent

    def _tried(self, trials: Trials, source: DraftSource, which: list[int]) -> list[int]:
        """The requests that a drafter which does not pay is tried for in this step, so rarely that it costs little."""
        if not trials.left:
            if self._step < trials.next or not self._may_try:
                return []
            plain, reading = self._costs.at(0), self._costs.reading(source, which)[0]
            # The chances of drafts with scores are learned without a verification of those that do not pay.
            forced = 0 if source.scored and not reading else TRIAL_NODES
            lost = self._costs.at(forced) - plain + self._costs.drafting(source, TRIAL_REQUESTS)
            lost += reading * min(1, TRIAL_REQUESTS / len(which))
            if not trials.begin(self._step, lost / plain, forced):
                return []
        trials.left -= 1
        self.statistics.trials += 1
        self._trial_nodes = trials.forced
        start = trials.next % len(which)
        return (which[start:] + which[:start])[:TRIAL_REQUESTS]

    def offer(self, bound: BoundMethod, number: int, indices: list[int], tree: TokenTree) -> TokenTree:
        """Take the trees that a drafter offers to these requests of the step; the same with chances as scores."""
        source, load, costs = self._source(bound, number), self._load, self._costs
        source.scored = tree.score is not None
        read, (seconds, share) = (
            sum(self._costs.unread.get(i, 0) for i in indices),
            self._costs.reading(source, indices),
        )
        offer = _Offer(source, indices, OfferedTree.of(tree), bound.method.check_of(number), read)
        self._offers.append(offer)
        self._spent += costs.drafting(source, len(indices)) + share
        self._ahead += seconds - share
        chances = list[list[float]]()
        for i, rungs, valid in zip(indices, offer.tree.rungs, offer.tree.valid, strict=True):
            table, factor = source.acceptance(load.sampled[i]).chance, load.accounts[i].factor(source.name)
            row = [min(1.0, factor * table[rung]) if yes else 0.0 for rung, yes in zip(rungs, valid, strict=True)]
            row[0] = 1.0
            chances.append(row)
            self._offered[i] = self._offered.get(i, []) + row[1:]
            self._values += [self._weights[i] * chance for chance in row[1:] if chance]
        return replace(tree, score=np.array(chances))

    def _best_of(self, values: Sequence[float]) -> tuple[int, float]:
        """How many of the drafts with these falling values to verify, and their summed value."""
        worth, best = self._worth, (0, 0.0)
        rate, gained = worth / self._costs.counted(0, self._spent), 0.0
        for count, value in enumerate(values, 1):
            gained += value
            now = (worth + gained) / self._costs.counted(count, self._spent)
            if now > rate:
                rate, best = now, (count, gained)
        return best

    def choose(self, parts: Sequence[DraftedTrees]) -> None:
        """Leave in the trees only the drafts that pay, of all requests together; those of methods that are not governed
        stay.
        """
        drafts, weights = list[tuple[float, int, int, int]](), self._weights
        for p, part in enumerate(parts):
            if not part.removable:
                self._fixed += sum(part.tree.drafted_counts)
            elif part.tree.nodes > 1:
                pairs = zip(part.indices, part.chances(), part.tree.valid.tolist(), strict=True)
                drafts += [
                    (weights[i] * chance, p, row, node)
                    for row, (i, chances, valid) in enumerate(pairs)
                    for node, chance in enumerate(chances)
                    if node and valid[node]
                ]
        self._costs.first += self._fixed
        # Stable: of equals the earlier ones stay, so that a node's parent is kept.
        drafts.sort(key=lambda draft: -draft[0])
        count = self._count([value for value, *_ in drafts])
        self.statistics.nodes_drafted += len(drafts)
        self.statistics.nodes_verified += count
        if count < len(drafts):
            for p, part in enumerate(parts):
                left = [(row, node) for _, q, row, node in drafts[count:] if q == p]
                if left:
                    valid = part.tree.valid.copy()
                    rows, nodes = zip(*left, strict=True)
                    valid[rows, nodes] = False
                    part.tree = replace(part.tree, valid=valid)
        self._expected = {i: 0.0 for part in parts if part.removable for i in part.indices}
        for value, p, row, _ in drafts[:count]:
            i = parts[p].indices[row]
            self._expected[i] += value / weights[i]
        tokens, speed = self._costs.requests + sum(self._expected.values()), self.times.speed
        seconds = self._costs.host + self._costs.at(count) + self._spent + self._ahead
        self.last = Forecast(speed * seconds, speed * (self._costs.host + self._costs.at(0)), tokens)

    def _count(self, values: Sequence[float]) -> int:
        """How many of the drafts of these falling values are verified."""
        if self._costs.measures:
            return 0
        return min(len(values), self._best_of(values)[0] + self._trial_nodes)

    def observe(self, step: StepResult, time: StepTime, shared: bool) -> None:
        """Learn from the result of the step that began last; `shared`: several methods drafted in it."""
        load, tree, costs = self._load, step.tree, self._costs
        if load.is_decode:
            drafts = tree.active_count - load.tokens
            plain = costs.host + costs.at(0)
            taken = (costs.host + costs.at(drafts - self._fixed) + self._spent) / plain
            for i, (account, new) in enumerate(zip(load.accounts, step.new_tokens, strict=True)):
                if load.weights[i]:
                    # What was to be expected counts, not luck: else one unlucky request ends the drafts of all.
                    gained = 1 + self._expected.get(i, len(new) - 1) - taken
                    account.count_step(gained, len(new), self._ahead / plain, load.left[i])
            self.statistics.steps += 1
            self.statistics.drafting_steps += drafts > 0
        costs.learn_pass(tree.active_count, time)
        if load.is_decode and not shared:
            costs.learn_drafting([(o.source, o.read) for o in self._offers], time.draft + time.between)
        for offer in self._offers:
            self._learn(offer, step)
        for i, (account, new) in enumerate(zip(load.accounts, step.new_tokens, strict=True)):
            account.tokens += len(new)
            if new and (drafted := step.num_drafted(i)):
                account.count_chain(drafted, step.num_accepted(i))

    def _learn(self, offer: _Offer, step: StepResult) -> None:
        source, tree, load = offer.source, offer.tree, self._load
        source.steps += 1
        levels = 0
        for row, i in enumerate(offer.indices):
            drafted = tree.drafted(row)
            acceptance, new = source.acceptance(load.sampled[i]), step.new_tokens[i]
            acceptance.count_offer(drafted, load.room[i])
            deepest = tree.levels(row)
            levels = max(levels, deepest)
            judged, right = tree.judge(row, new)
            if offer.check is not None and judged:
                offer.check.count(len(right), single=deepest < 2)
            acceptance.count(judged, right, load.room[i])
            predicted = sum(acceptance.chance[rung] for rung in judged)
            load.accounts[i].count(source.name, predicted, len(right))
        if levels:
            source.levels += (levels - source.levels) / min(source.steps, HORIZON)
