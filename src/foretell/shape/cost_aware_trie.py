"""Retrieved trees that are only as large as pays: drafting that turns itself off."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import EngineBound
from foretell.core.tree import TokenTree
from foretell.draft.base import Retriever
from foretell.shape.base import Shape
from foretell.shape.pass_cost import PassCost
from foretell.shape.trie import Prefix, rank_prefixes, trie_from_prefixes

Candidates = list[tuple[Prefix, float]]


class DraftController:
    """Whether drafting has paid for one text lately, and how far promises were kept.

    A text whose drafts lost time is left alone for some steps, then tried again; each failure doubles the pause, up to
    `longest`.
    """

    def __init__(self, max_pause: int = 4) -> None:
        self._longest = max_pause
        self._predicted = self._accepted = 8.0
        self._profit, self._seen, self._pause, self._length = 0.0, 0, 0, 1

    def should_draft(self) -> bool:
        """Whether to draft in this step; counts the step."""
        self._pause = max(0, self._pause - 1)
        return self._pause == 0

    @property
    def calibration(self) -> float:
        """By how much promised chances are to be corrected."""
        return min(1.5, self._accepted / self._predicted)

    def update(self, predicted: float, accepted: int, profit: float) -> None:
        """Book a step: the drafts' summed chances before correction, how many stood, and the seconds gained."""
        # Both fade towards the start, so that a text that is promised nothing because promises were broken gets another
        # chance.
        self._predicted = 0.95 * self._predicted + 0.4 + predicted
        self._accepted = 0.95 * self._accepted + 0.4 + accepted
        self._profit, self._seen = 0.97 * self._profit + profit, self._seen + 1
        if self._profit > 0:
            self._length = 1
        elif self._seen >= 24:
            self._length = min(self._longest, 2 * self._length)
            self._pause, self._seen, self._profit = self._length + 1, 22, 0.0


@dataclass(frozen=True)
class DraftEstimate:
    """What drafting offered one text: how many drafts, their summed chances as promised and as expected after
    correction.
    """

    row: int
    attempted: bool
    size: int
    predicted: float
    expected: float


@dataclass(frozen=True)
class DraftPlan:
    """Trees for a step, and the bid behind each. `timing`: nothing was drafted, to see what a plain pass costs."""

    roots: tuple[int, ...]
    candidates: tuple[Candidates, ...]
    """What each tree is planted from."""
    estimates: tuple[DraftEstimate, ...]
    measures_plain: bool

    @cached_property
    def tree(self) -> TokenTree:
        """The offers below their roots."""
        return trie_from_prefixes(self.roots, [[prefix for prefix, _ in offer] for offer in self.candidates])


class CostAwareTrie(EngineBound, Shape[Retriever]):
    """Of all texts' offers, as many of the likeliest tokens as make the most tokens per second; none if that is plain
    decoding.

    Expected tokens are summed chances of acceptance, corrected by how far promises were kept; seconds come from `cost`,
    learned from the run itself unless given. Texts for which drafting did not pay are asked less often. Timing decides
    what is drafted, so only acceptors of which equal seeds give equal text (`Match`) keep answers reproducible.
    """

    label = "trie sized by cost"

    drafter_type = Retriever

    def __init__(self, budget: int = 24, cost: PassCost | None = None) -> None:
        if budget < 0:
            raise ValueError(f"a tree holds 0 or more drafted tokens, found a budget of {budget}")
        self.budget, self.cost = budget, PassCost() if cost is None else cost
        self._controllers: dict[int, DraftController] = {}
        self._plan: DraftPlan | None = None

    def grow(self, draft: Retriever, context: Context) -> TokenTree:
        """The trie per text that pays."""
        self._plan = self.plan(draft, context)
        return self._plan.tree

    def plan(self, draft: Retriever, context: Context) -> DraftPlan:
        """The trees, and what they promise."""
        decoding = all(len(text.generated) for text in context.sequences)
        timing = decoding and self.cost.needs_measurement(len(context.rows))
        asked = [self._controllers.setdefault(row, DraftController()).should_draft() and not timing for row in context.rows]
        offers = self._retrieve_candidates(draft, context, [i for i, yes in enumerate(asked) if yes])
        chosen = [o[:n] for o, n in zip(offers, self._choose_sizes(offers, len(offers)), strict=True)]
        expected = [sum(chance for _, chance in offer) for offer in chosen]
        bids = (
            DraftEstimate(row, yes, len(offer), sum_ / self._controllers[row].calibration, sum_)
            for row, yes, offer, sum_ in zip(context.rows, asked, chosen, expected, strict=True)
        )
        return DraftPlan(tuple(context.last_tokens), tuple(chosen), tuple(bids), timing)

    def _retrieve_candidates(self, draft: Retriever, context: Context, asking: Sequence[int]) -> list[Candidates]:
        """Ranked prefixes with corrected chances per text."""
        offers: list[Candidates] = [[] for _ in context.rows]
        if asking:
            part = context.select(asking)
            for i, max_depth, found in zip(
                asking, part.max_depth.tolist(), draft.retrieve(part, self.budget), strict=True
            ):
                honesty = self._controllers[context.rows[i]].calibration
                offers[i] = [
                    (p, min(1.0, honesty * chance)) for p, chance in rank_prefixes(found, max_depth)[: self.budget]
                ]
        return offers

    def _choose_sizes(self, offers: Sequence[Candidates], b: int) -> list[int]:
        """How much of each offer to take: the common number of likeliest tokens that makes the most tokens per
        second.
        """
        if not any(offers):
            return [0] * b
        pool = sorted(((chance, i) for i, offer in enumerate(offers) for _, chance in offer), key=lambda x: -x[0])
        gain = b + np.concatenate([[0.0], np.cumsum([chance for chance, _ in pool])])
        best = int(np.argmax(gain / self.cost.seconds(b, b + len(pool))))
        return [sum(1 for _, j in pool[:best] if j == i) for i in range(b)]

    def observe(self, step: StepResult) -> None:
        """Book what the step took and gave."""
        if self._plan is not None:
            self.learn_cost(step, self._plan)
            self.update_controllers(step, self._plan, step.draft_seconds)
        self._plan = None

    def learn_cost(self, step: StepResult, plan: DraftPlan) -> None:
        """Learn what a pass costs; one that also read a prompt does not say."""
        if step.context.rows == tuple(bid.row for bid in plan.estimates) and step.tree.is_decode:
            self.cost.update(int(np.count_nonzero(step.tree.active)), step.pass_seconds)

    def update_controllers(self, step: StepResult, plan: DraftPlan, seconds: float, but: Collection[int] = ()) -> None:
        """Learn whether the drafts paid, which took `seconds` to find, `but` of the rows that something else drafted
        for.
        """
        bids = [bid for bid in plan.estimates if bid.attempted and bid.row in step.context.rows and bid.row not in but]
        if not bids:
            return
        b, size = len(plan.estimates), sum(bid.size for bid in plan.estimates)
        first, last = self.cost.seconds(b, b + size)[[0, -1]].tolist()
        for bid in bids:
            stood = num_accepted(step, bid.row)
            profit = (stood * first - seconds) / b - (last - first) * bid.size / max(1, size)
            self._controllers[bid.row].update(bid.predicted, stood, profit)

    def release(self, row: int) -> None:
        """Forget a row; what passes cost stays known."""
        self._controllers.pop(row, None)


def num_accepted(step: StepResult, row: int) -> int:
    """How many drafts of a row stood."""
    i = step.context.rows.index(row)
    return len(step.paths[i]) - int(step.tree.prefix_length[i])
