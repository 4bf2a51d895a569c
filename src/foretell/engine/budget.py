"""The draft budget: decides in every step which drafters are asked for which requests, and which of the drafts that
they offer the target verifies: those that give the most expected tokens per second over all requests together.

The goal is that of TurboSpec (arXiv 2406.14066), chosen per node and step; requests behind their deadline weigh more,
as AdaServe (arXiv 2501.12162) serves them first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from foretell.core.context import StepResult
from foretell.core.tree import TokenTree
from foretell.draft.base import Drafter, NoDrafter
from foretell.engine.acceptance import OfferedTree
from foretell.engine.asking import Asking, Plan
from foretell.engine.budget_statistics import COST, LOAD, MEASURED, NO_CHOICE, BudgetStatistics, Forecast
from foretell.engine.draft_source import DraftSource, Trials
from foretell.engine.drafted_trees import NO_LIMIT, DraftedTrees, leave_out, removable_drafts
from foretell.engine.drafter_check import DrafterCheck
from foretell.engine.method import BoundMethod
from foretell.engine.offers import Offers
from foretell.engine.pass_times import Key, PassTimes
from foretell.engine.statistics import StepTime
from foretell.engine.step_costs import DraftedStep, StepCosts, StepLoad
from foretell.engine.tuning import TRIAL_REQUESTS
from foretell.shape.chain import Chain


@dataclass
class _Offer:
    step: DraftedStep
    indices: list[int]
    tree: OfferedTree
    check: DrafterCheck | None


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
        self._trials = dict[tuple[str, Key], Trials]()
        self._step, self._drafts_before = 0, False
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
        self._costs = costs = StepCosts(self.times, load)
        deficits = [account.deficit(left) for account, left in zip(load.accounts, load.left, strict=True)]
        # A token is worth the more, the more its request has lost by drafts.
        weights = [w * (1 + costs.requests * d**2) for w, d in zip(load.weights, deficits, strict=True)]
        may_try = all(d < 1 for w, d in zip(load.weights, deficits, strict=True) if w)
        self._offers, self._drafted = Offers(costs, weights), list[_Offer]()
        self._asking = Asking(load, self._offers, self._step, may_try, self.statistics, self._trials)
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
            fits = check is None or check.fits
            plan = self._asking.weigh(self._source(bound, number), open_, unread) if fits else COST
            if isinstance(plan, Plan):
                return plan
            reason = plan
            if check is not None and check.undecided and self._asking.may_try:
                self._looked.add((bound.method.draft, number))
                self._costs.count_unread(open_, unread)
                return Plan(open_[:TRIAL_REQUESTS], deepest=1)
        if not number:
            self.statistics.undrafted[reason] += len(which)
        return None

    def _source(self, bound: BoundMethod, number: int) -> DraftSource:
        method, count = bound.method, len(bound.method.sources)
        if method.draft not in self._sources:
            known_as = " ".join(filter(None, (method.name, method.drafter_key)))
            names = [f"{known_as} {i}{kind}" for kind in ("", " look") for i in range(count)]
            self._sources[method.draft] = [self.times.source(name) for name in names]
        # Looks are as cheap as they can be: what they take and give says nothing about other drafts.
        return self._sources[method.draft][number + count * ((method.draft, number) in self._looked)]

    def offer(self, bound: BoundMethod, number: int, indices: list[int], tree: TokenTree) -> TokenTree:
        """Take the trees that a drafter offers to these requests of the step; the same with chances as scores."""
        source, load, offers = self._source(bound, number), self._load, self._offers
        source.scored = tree.score is not None
        read, (seconds, share) = (
            sum(self._costs.unread.get(i, 0) for i in indices),
            self._costs.reading(source, indices),
        )
        offered = OfferedTree.of(tree)
        drafted = DraftedStep(source, len(indices), read, offered.deepest)
        offer = _Offer(drafted, indices, offered, bound.method.check_of(number))
        self._drafted.append(offer)
        offers.spent += self._costs.drafting(source, len(indices)) + share
        offers.ahead += seconds - share
        chances = list[list[float]]()
        for i, rungs, valid in zip(indices, offer.tree.rungs, offer.tree.valid, strict=True):
            table, factor = source.acceptance(load.sampled[i]).chance, load.accounts[i].factor(source.name)
            row = [min(1.0, factor * table[rung]) if yes else 0.0 for rung, yes in zip(rungs, valid, strict=True)]
            row[0] = 1.0
            chances.append(row)
            offers.add(i, row[1:])
        return replace(tree, score=np.array(chances))

    def choose(self, parts: Sequence[DraftedTrees]) -> None:
        """Leave in the trees only the drafts that pay, of all requests together; those of methods that are not governed
        stay.
        """
        costs, offers = self._costs, self._offers
        self._fixed = sum(sum(part.tree.drafted_counts) for part in parts if not part.removable)
        costs.first += self._fixed
        drafts = removable_drafts(parts, offers.weights)
        count = self._count([draft.value for draft in drafts])
        self.statistics.nodes_drafted += len(drafts)
        self.statistics.nodes_verified += count
        leave_out(parts, drafts[count:])
        self._expected = {i: 0.0 for part in parts if part.removable for i in part.indices}
        for draft in drafts[:count]:
            i = parts[draft.part].indices[draft.row]
            self._expected[i] += draft.value / offers.weights[i]
        tokens, speed = costs.requests + sum(self._expected.values()), self.times.speed
        seconds = costs.host + costs.at(count) + offers.spent + offers.ahead
        self.last = Forecast(speed * seconds, speed * (costs.host + costs.at(0)), tokens)

    def _count(self, values: Sequence[float]) -> int:
        """How many of the drafts of these falling values are verified."""
        if self._costs.measures:
            return 0
        return min(len(values), self._offers.best_of(values)[0] + self._asking.trial_nodes)

    def observe(self, step: StepResult, time: StepTime, shared: bool) -> None:
        """Learn from the result of the step that began last; `shared`: several methods drafted in it."""
        load, tree, costs = self._load, step.tree, self._costs
        if load.is_decode:
            drafts = tree.active_count - load.tokens
            plain = costs.host + costs.at(0)
            taken = (costs.host + costs.at(drafts - self._fixed) + self._offers.spent) / plain
            for i, (account, new) in enumerate(zip(load.accounts, step.new_tokens, strict=True)):
                if load.weights[i]:
                    # What was to be expected counts, not luck: else one unlucky request ends the drafts of all.
                    gained = 1 + self._expected.get(i, len(new) - 1) - taken
                    account.count_step(gained, len(new), self._offers.ahead / plain, load.left[i])
            self.statistics.steps += 1
            self.statistics.drafting_steps += drafts > 0
        # The first step with drafters after others without them, or the reverse, takes longer than those that follow;
        # of a new drafter it is a start. A step that came late followed something else than the engine's own work.
        alike, late = bool(self._drafted) == self._drafts_before, time.between > time.total
        is_new = any(offer.step.source.is_new for offer in self._drafted)
        follows = not load.is_decode or ((alike or is_new) and not late)
        costs.learn_pass(tree.active_count, time, follows)
        if load.is_decode and not shared:
            costs.learn_drafting([offer.step for offer in self._drafted], time.draft + time.between, follows)
        if load.is_decode:
            self._drafts_before = bool(self._drafted)
        for offer in self._drafted:
            self._learn(offer, step)
        for i, (account, new) in enumerate(zip(load.accounts, step.new_tokens, strict=True)):
            account.tokens += len(new)
            if new and (drafted := step.num_drafted(i)):
                account.count_chain(drafted, step.num_accepted(i))

    def _learn(self, offer: _Offer, step: StepResult) -> None:
        source, tree, load = offer.step.source, offer.tree, self._load
        source.count(tree.deepest)
        for row, i in enumerate(offer.indices):
            drafted = tree.drafted(row)
            acceptance, new = source.acceptance(load.sampled[i]), step.new_tokens[i]
            acceptance.count_offer(drafted, load.room[i])
            load.accounts[i].count_offer(source.name, sum(acceptance.chance[rung] for rung in drafted))
            judged, right = tree.judge(row, new)
            if offer.check is not None and judged:
                offer.check.count(len(right), single=tree.levels[row] < 2)
            acceptance.count(judged, right, load.room[i])
            predicted = sum(acceptance.chance[rung] for rung in judged)
            load.accounts[i].count(source.name, predicted, len(right))
