"""Retrieved tries sized by the cost of a pass; drafting stops where it does not pay."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from foretell.core.context import Context, StepResult, StepState
from foretell.core.engine_bound import EngineBound
from foretell.core.tree import TokenTree
from foretell.draft.base import Retriever
from foretell.shape.base import Shape
from foretell.shape.pass_cost import PassCost
from foretell.shape.trie import Prefix, rank_prefixes, trie_from_prefixes

Candidates = list[tuple[Prefix, float]]
"""Prefixes with their probabilities of acceptance, the likeliest first."""

_PRIOR_TOKENS = 8.0
"""Weight of the prior of the calibration, in accepted tokens."""
_CALIBRATION_DECAY = 0.95
"""Share of the calibration's counts kept per step."""
_PRIOR_TOKENS_PER_STEP = 0.4
"""Prior added back per step, which holds its weight at `_PRIOR_TOKENS`."""
_MAX_CALIBRATION = 1.5
_PROFIT_DECAY = 0.97
"""Share of the summed profit kept per step."""
_MIN_STEPS_BEFORE_PAUSE = 24
_STEPS_AFTER_PAUSE = 2
"""Steps of drafting after a pause before the next decision."""


class DraftController:
    """Whether drafting has paid for one request lately, and the calibration of its acceptance estimates.

    A request whose drafts lost time pauses for some steps and is then tried again; each failure doubles the pause, up
    to `max_pause` steps.
    """

    def __init__(self, max_pause: int = 4) -> None:
        self._max_pause = max_pause
        self._predicted = self._accepted = _PRIOR_TOKENS
        self._profit, self._steps = 0.0, 0
        self._remaining_pause, self._pause = 0, 1

    def should_draft(self) -> bool:
        """Whether to draft in this step; counts the step."""
        self._remaining_pause = max(0, self._remaining_pause - 1)
        return self._remaining_pause == 0

    @property
    def calibration(self) -> float:
        """Factor from predicted to calibrated acceptance probabilities: accepted over predicted tokens."""
        return min(_MAX_CALIBRATION, self._accepted / self._predicted)

    def update(self, predicted: float, accepted: int, profit: float) -> None:
        """Count a step: the drafts' summed probabilities before calibration, how many were accepted, and the seconds
        gained.
        """
        # Both counts decay towards the prior, so that a request whose estimates were far too high drafts again later.
        self._predicted = _CALIBRATION_DECAY * self._predicted + _PRIOR_TOKENS_PER_STEP + predicted
        self._accepted = _CALIBRATION_DECAY * self._accepted + _PRIOR_TOKENS_PER_STEP + accepted
        self._profit, self._steps = _PROFIT_DECAY * self._profit + profit, self._steps + 1
        if self._profit > 0:
            self._pause = 1
        elif self._steps >= _MIN_STEPS_BEFORE_PAUSE:
            self._pause = min(self._max_pause, 2 * self._pause)
            self._remaining_pause, self._profit = self._pause + 1, 0.0
            self._steps = _MIN_STEPS_BEFORE_PAUSE - _STEPS_AFTER_PAUSE


@dataclass(frozen=True)
class DraftEstimate:
    """What drafting promises one request."""

    row: int
    attempted: bool
    """Whether the retriever was asked."""
    size: int
    """Drafted tokens."""
    predicted: float
    """Summed probabilities of acceptance before calibration."""
    expected: float
    """The same after calibration: expected accepted tokens."""


@dataclass(frozen=True)
class DraftPlan:
    """The tries of a step and the estimate behind each."""

    roots: tuple[int, ...]
    candidates: tuple[Candidates, ...]
    """Prefixes that each trie holds."""
    estimates: tuple[DraftEstimate, ...]
    pass_rows: int
    """Requests that decode in the same pass, those of other methods included."""
    measures_plain: bool
    """Nothing is drafted in this step, so that the cost of a plain pass is measured."""

    @cached_property
    def tree(self) -> TokenTree:
        """The candidates below their roots."""
        return trie_from_prefixes(self.roots, self.candidates)


class CostAwareTrie(EngineBound, Shape[Retriever]):
    """Of the candidates of all requests together, the likeliest ones that maximise expected tokens per second.

    Expected tokens are summed probabilities of acceptance, calibrated by how many drafts were accepted so far. Seconds
    come from `cost`, which is learned during the run unless given. Requests whose drafts did not pay draft less often
    (`DraftController`). Since the choice depends on time, only acceptors whose output for a seed does not depend on the
    drafts (`Match`) keep answers reproducible.

    Raises:
        ValueError: a negative budget.
    """

    label = "trie sized by cost"

    drafter_type = Retriever

    def __init__(self, budget: int = 24, cost: PassCost | None = None) -> None:
        if budget < 0:
            raise ValueError(f"a tree holds 0 or more drafted tokens, found a budget of {budget}")
        self.budget, self.cost = budget, PassCost() if cost is None else cost
        self._learns_cost, self._own_cost = True, self.cost
        self._controllers: dict[int, DraftController] = {}
        self._plan = StepState[DraftPlan | None]()

    def share_cost(self, cost: PassCost | None) -> None:
        """Use the seconds of a pass that something else learns, unless a table was given; None: learn them here."""
        if not self._own_cost.fixed:
            self._learns_cost, self.cost = cost is None, self._own_cost if cost is None else cost

    def expect_cost(self, table: Mapping[int, float]) -> None:
        """Begin with these seconds of a pass; see `PassCost.expect`."""
        self._own_cost.expect(table)

    def grow(self, draft: Retriever, context: Context) -> TokenTree:
        """The trie for each request that maximises expected tokens per second."""
        plan = self.plan(draft, context)
        self._plan.put(context, plan)
        return plan.tree

    def plan(self, draft: Retriever, context: Context) -> DraftPlan:
        """The tries and their estimates."""
        decoding = all(len(sequence.generated) for sequence in context.sequences)
        measures_plain = decoding and self.cost.needs_measurement(context.pass_rows)
        attempted = [
            self._controllers.setdefault(row, DraftController()).should_draft() and not measures_plain
            for row in context.rows
        ]
        candidates = self._retrieve_candidates(draft, context, [i for i, yes in enumerate(attempted) if yes])
        sizes = self._choose_sizes(candidates, context.pass_rows)
        chosen = [part[:size] for part, size in zip(candidates, sizes, strict=True)]
        expected = [sum(probability for _, probability in part) for part in chosen]
        estimates = (
            DraftEstimate(row, yes, len(part), total / self._controllers[row].calibration, total)
            for row, yes, part, total in zip(context.rows, attempted, chosen, expected, strict=True)
        )
        return DraftPlan(tuple(context.last_tokens), tuple(chosen), tuple(estimates), context.pass_rows, measures_plain)

    def _retrieve_candidates(self, draft: Retriever, context: Context, which: Sequence[int]) -> list[Candidates]:
        """Ranked prefixes with calibrated probabilities for the requests `which`; none for the others."""
        candidates: list[Candidates] = [[] for _ in context.rows]
        if which:
            part = context.select(which)
            retrieved = draft.retrieve(part, self.budget)
            for i, max_depth, continuations in zip(which, part.max_depth.tolist(), retrieved, strict=True):
                calibration = self._controllers[context.rows[i]].calibration
                ranked = rank_prefixes(continuations, max_depth)[: self.budget]
                candidates[i] = [(prefix, min(1.0, calibration * probability)) for prefix, probability in ranked]
        return candidates

    def _choose_sizes(self, candidates: Sequence[Candidates], pass_rows: int) -> list[int]:
        """How many candidates to draft per request: the likeliest of all requests together, as many as maximise tokens
        per second.
        """
        if not any(candidates):
            return [0] * len(candidates)
        pool = sorted(((p, i) for i, part in enumerate(candidates) for _, p in part), key=lambda x: -x[0])
        plain, *further = self.cost.seconds_of(range(pass_rows, pass_rows + len(pool) + 1))
        accepted, best, most = 0.0, 0, pass_rows / plain
        for count, ((probability, _), seconds) in enumerate(zip(pool, further, strict=True), 1):
            accepted += probability
            if (pass_rows + accepted) / seconds > most:
                best, most = count, (pass_rows + accepted) / seconds
        return [sum(1 for _, j in pool[:best] if j == i) for i in range(len(candidates))]

    def observe(self, step: StepResult) -> None:
        """Update the cost of a pass and the controllers."""
        plan = self._plan.of(step.context, None)
        if plan is not None:
            self.learn_cost(step, plan)
            self.update_controllers(step, plan, step.draft_seconds)

    def learn_cost(self, step: StepResult, plan: DraftPlan) -> None:
        """Learn the cost of a pass, unless it also read a prompt."""
        tree = step.whole.tree
        rows = tuple(estimate.row for estimate in plan.estimates)
        if self._learns_cost and step.context.rows == rows and tree.is_decode:
            self.cost.update(tree.active_count, step.pass_seconds)

    def update_controllers(
        self, step: StepResult, plan: DraftPlan, draft_seconds: float, exclude: Collection[int] = ()
    ) -> None:
        """Tell the controllers whether retrieval, which took `draft_seconds`, paid; `exclude`: rows with drafts from
        elsewhere.
        """
        index = {row: i for i, row in enumerate(step.context.rows)}
        estimates = [e for e in plan.estimates if e.attempted and e.row in index and e.row not in exclude]
        if not estimates:
            return
        rows, size = plan.pass_rows, sum(estimate.size for estimate in plan.estimates)
        plain, drafted = self.cost.seconds_of((rows, rows + size))
        for estimate in estimates:
            accepted = step.num_accepted(index[estimate.row])
            shared = accepted * plain / rows - draft_seconds / len(plan.estimates)
            profit = shared - (drafted - plain) * estimate.size / max(1, size)
            self._controllers[estimate.row].update(estimate.predicted, accepted, profit)

    def release(self, row: int) -> None:
        """Forget a row; the cost of a pass stays known."""
        self._controllers.pop(row, None)
