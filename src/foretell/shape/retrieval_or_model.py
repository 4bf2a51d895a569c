"""Per request and step: drafts from retrieval, from the model, or none, whichever is expected to be fastest."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foretell.core.context import Context, StepResult, StepState, TokenBuffer
from foretell.core.engine_bound import BindingEngine, EngineBound
from foretell.core.tree import TokenTree, concatenate_trees, merge_trees
from foretell.draft.base import Predictor
from foretell.draft.hybrid import HybridDrafter
from foretell.shape.base import Shape
from foretell.shape.chain import Chain
from foretell.shape.cost_aware_trie import CostAwareTrie, DraftEstimate, DraftPlan
from foretell.shape.pass_cost import PassCost
from foretell.shape.trie import trie_from_prefixes

_MIN_COPY_PROBABILITY = 0.25
"""Retrieved tokens less likely than this are left out beside the model's drafts, which mostly contain the right ones
anyway.
"""
_PRIOR_ACCEPTED = 1.0
"""Least prior mean of accepted model drafts per step for a new request, however few were accepted in earlier ones."""
_PRIOR_WEIGHT = 8.0
"""Weight of the prior mean, in steps; with a low weight, a few bad steps would turn the model off for the request."""
_MIN_TIMINGS = 3
"""Timed model drafts before their cost decides; the first one often takes ten times as long as the others."""
_TIMINGS = 9
"""Last timings of the model's drafting that are kept."""


class RunningMean:
    """A running mean in which old values fade once `memory` of them have been seen.

    It starts at `value` with the weight of `weight` observations.
    """

    def __init__(self, memory: float = 16.0, value: float = 0.0, weight: float = 0.0) -> None:
        self.value, self._memory, self._weight = value, memory, weight

    def add(self, value: float) -> None:
        """Count one value."""
        self._weight = min(self._weight + 1, self._memory)
        self.value += (value - self.value) / self._weight


@dataclass
class _Drafts:
    """The drafts of a step."""

    plan: DraftPlan
    of_model: dict[int, int] = field(default_factory=dict)
    """Rows that the model drafts for, with their numbers of drafted tokens."""
    is_timed: bool = False
    """Whether the drafting time counts: no row of it had to read a prompt first."""


class RetrievalOrModel(EngineBound, Shape[HybridDrafter]):
    """For each request and step, the drafts with the most expected tokens per second: the retrieved trie, the model's
    chain or tree merged with the likeliest retrieved tokens, or none.

    The cost and the acceptance of the model's drafts are estimated from earlier steps. The first `_MIN_TIMINGS` drafts
    are trials; one is made right after the prompt, so that the model reads the prompt then. A model that does not pay
    is tried again every `retry_interval` steps, on requests that it has read. Since the choice depends on time, use an
    acceptor whose output for a seed does not depend on the drafts (`Match`). It accepts a token chosen by argmax more
    often than a sampled one, so a chain that samples is refused.

    Raises:
        ValueError: `model_shape` is a chain that samples or is empty.
    """

    label = "trie, tree or none, by expected speed"

    drafter_type = HybridDrafter

    def __init__(self, trie: CostAwareTrie, model_shape: Shape[Predictor], retry_interval: int = 128) -> None:
        if isinstance(model_shape, Chain) and (model_shape.draw or model_shape.length < 1):
            raise ValueError("the chain of a hybrid picks one token or more: use Chain(length, draw=False)")
        self.trie, self.model_shape, self._retry_interval = trie, model_shape, retry_interval
        model_shape.share_cost(trie.cost)
        self._accepted = dict[int, RunningMean]()
        """Accepted model drafts per step, by row."""
        self._accepted_overall = RunningMean(memory=64.0, value=_PRIOR_ACCEPTED, weight=_PRIOR_WEIGHT)
        self._model_draft_size = RunningMean()
        """Drafted tokens per request and step."""
        self._retrieval_seconds = RunningMean()
        """Drafting time of steps without the model."""
        self._model_seconds = deque[float](maxlen=_TIMINGS)
        """Last drafting times of the model, per request."""
        self._timings, self._steps_without_model = 0, 0
        self._rows_read: set[int] = set()
        """Rows whose prompt the model has read. Its first draft for a row includes that time and is not counted."""
        self._drafts = StepState[_Drafts | None]()

    def share_cost(self, cost: PassCost | None) -> None:
        """Use the seconds of a pass that something else learns; None: learn them here."""
        self.trie.share_cost(cost)
        self.model_shape.share_cost(self.trie.cost)

    def expect_cost(self, table: Mapping[int, float]) -> None:
        """Begin with these seconds of a pass; see `PassCost.expect`."""
        self.trie.expect_cost(table)

    def grow(self, draft: HybridDrafter, context: Context) -> TokenTree:
        """A trie, the model's tree or only a root for each request."""
        plan = self.trie.plan(draft.retriever, context)
        drafts = _Drafts(plan)
        self._drafts.put(context, drafts)
        limited = replace(context, max_depth=draft.predictor.max_depths(context))
        with_model = []
        if not plan.measures_plain:
            if draft.predictor.hidden_layers or not draft.predictor.reads_prompts:
                # It drafts from what the target has computed and has no prompt to read itself.
                self._rows_read.update(context.rows)
            with_model = [
                i
                for i, estimate in enumerate(plan.estimates)
                if limited.max_depth[i] and self._prefers_model(plan, estimate, limited.sequences[i])
            ]
        tree = self._with_model_drafts(draft, limited, with_model, drafts) if with_model else plan.tree
        self._steps_without_model = 0 if with_model else self._steps_without_model + 1
        return tree

    def _prefers_model(self, plan: DraftPlan, estimate: DraftEstimate, sequence: TokenBuffer) -> bool:
        """Whether the model promises more tokens per second than retrieval does, or is due for a trial."""
        if self._timings < _MIN_TIMINGS or self._steps_without_model >= self._retry_interval:
            return estimate.row in self._rows_read or not len(sequence.generated)
        rows, size = plan.pass_rows, round(self._model_draft_size.value)
        plain, modelled, retrieved = self.trie.cost.seconds_of((rows, rows + size, rows + estimate.size))
        share = plain / rows - plain
        # The least time: longer ones are mostly due to other work on the machine, and a model that seems too expensive
        # is rarely tried again.
        model = (1 + self._accepted_in(estimate.row).value) / (share + modelled + min(self._model_seconds))
        return model > (1 + estimate.expected) / (share + retrieved)

    def _accepted_in(self, row: int) -> RunningMean:
        """Mean accepted model drafts per step of a row; of a new one, the prior."""
        prior = max(_PRIOR_ACCEPTED, self._accepted_overall.value)
        return self._accepted.setdefault(row, RunningMean(value=prior, weight=_PRIOR_WEIGHT))

    def _with_model_drafts(
        self, draft: HybridDrafter, context: Context, with_model: Sequence[int], drafts: _Drafts
    ) -> TokenTree:
        """The model's drafts merged with the likeliest retrieved tokens for the requests `with_model`; for the others
        the retrieved tokens alone.
        """
        part, plan = context.select(with_model), drafts.plan
        tree = self.model_shape.grow(draft.predictor, part)
        if context.origins is not None:
            context.origins.record_tree(part.rows, tree, draft.predictor.origin)
        drafts.is_timed = all(row in self._rows_read for row in part.rows)
        self._rows_read.update(part.rows)
        drafts.of_model = dict(zip(part.rows, tree.drafted_counts, strict=True))
        for size in drafts.of_model.values():
            self._model_draft_size.add(size)
        likely = [[(prefix, p) for prefix, p in plan.candidates[i] if p >= _MIN_COPY_PROBABILITY] for i in with_model]
        if any(likely):
            tree = merge_trees(tree, trie_from_prefixes(part.last_tokens, likely))
        others = [i for i in range(len(context.rows)) if i not in set(with_model)]
        if not others:
            return tree
        both = concatenate_trees([tree, plan.tree.select(np.array(others, np.int64))])
        return both.select(np.argsort([*with_model, *others]))

    def observe(self, step: StepResult) -> None:
        """Update the estimates with the step's times and accepted drafts."""
        drafts = self._drafts.of(step.context, None)
        if drafts is None:
            return
        if drafts.is_timed:
            seconds = max(0.0, step.draft_seconds - self._retrieval_seconds.value)
            self._model_seconds.append(seconds / len(drafts.of_model))
            self._timings += 1
        elif not drafts.of_model and any(estimate.attempted for estimate in drafts.plan.estimates):
            self._retrieval_seconds.add(step.draft_seconds)
        self.trie.learn_cost(step, drafts.plan)
        self.model_shape.observe(step)
        self.trie.update_controllers(step, drafts.plan, self._retrieval_seconds.value, exclude=drafts.of_model)
        for i, row in enumerate(step.context.rows):
            if row in drafts.of_model:
                self._accepted_in(row).add(step.num_accepted(i))
                self._accepted_overall.add(step.num_accepted(i))

    def release(self, row: int) -> None:
        """Forget a row; the costs of passes and of drafting stay known."""
        self._rows_read.discard(row)
        self._accepted.pop(row, None)
        self.trie.release(row)
        self.model_shape.release(row)

    def bind(self, engine: BindingEngine) -> bool:
        """Bind the shapes that this one is made of."""
        return any([super().bind(engine), self.trie.bind(engine), self.model_shape.bind(engine)])
