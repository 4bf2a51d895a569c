"""Retrieval first, the model where retrieval finds too little, nothing where neither pays."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.engine_bound import EngineBound
from foretell.core.tree import TokenTree, concatenate_trees, merge_trees
from foretell.draft.base import Predictor
from foretell.draft.hybrid import HybridDrafter
from foretell.shape.base import Shape
from foretell.shape.chain import Chain
from foretell.shape.cost_aware_trie import CostAwareTrie, DraftEstimate, DraftPlan, num_accepted
from foretell.shape.trie import trie_from_prefixes


class RunningMean:
    """A running mean; old values fade once `memory` of them have been seen.

    `value` is believed as if `weight` values had been so.
    """

    def __init__(self, memory: float = 16.0, value: float = 0.0, weight: float = 0.0) -> None:
        self.value, self._memory, self._weight = value, memory, weight

    def add(self, value: float) -> None:
        """Count one value."""
        self._weight = min(self._weight + 1, self._memory)
        self.value += (value - self.value) / self._weight


_BESIDE = 0.25
"""Chance of a copy that is worth its place beside the model's guesses: where it is right, these mostly are as well."""
_HOPED = 1.0
"""Guesses per step that are expected to stand in a new text, at the least: another kind of text may gain nothing, and
say nothing of this one.
"""
_DOUBT = 8.0
"""Steps that what is expected of a text counts as: few say little, and a model that is thought too little of is hardly
asked again.
"""
_TRIALS = 3
"""Guesses before it is decided whether they pay; the first of them often takes as long as ten others."""


class RetrievalOrModel(EngineBound, Shape[HybridDrafter]):
    """Per text and step, what promises most tokens per second: the retriever's tree, the model's chain or tree beside
    it, or no drafts.

    What the model's guesses give a text, and what they take, is known from the last ones. The first few are trials, one
    of them while the target still reads the prompt, so that the model reads it then too; when it does not pay, it is
    tried again every `again` steps on texts that it has read. Timing decides who drafts, so the acceptor should be one
    of which equal seeds give equal text (`Match`); it accepts picked tokens more often than drawn ones, and a chain
    that draws is refused.
    """

    label = "trie, tree or none, by expected speed"

    drafter_type = HybridDrafter

    def __init__(
        self,
        trie: CostAwareTrie,
        model_shape: Shape[Predictor],
        retry_interval: int = 128,
    ) -> None:
        if isinstance(model_shape, Chain) and (model_shape.draw or model_shape.length < 1):
            raise ValueError("the chain of a hybrid picks one token or more: use Chain(length, draw=False)")
        self.trie, self.model_shape, self._again = trie, model_shape, retry_interval
        self._stood, self._size = dict[int, RunningMean](), RunningMean()
        self._usual = RunningMean(memory=64.0, value=_HOPED, weight=_DOUBT)
        """What stood of the guesses at all texts."""
        self._retrieval = RunningMean()
        """Seconds of a step's drafting without guesses."""
        self._times = deque[float](maxlen=9)
        """Seconds of the last guesses, per text."""
        self._timed = False
        """Whether what guessing takes in this step is to be noted."""
        self._tries, self._idle = 0, 0
        self._read: set[int] = set()
        """Rows that the model has drafted for: its first guess at a text pays for reading the prompt, and does not
        count.
        """
        self._guessed: dict[int, int] = {}
        """Rows that the model drafts for in this step, and how many tokens."""
        self._plan: DraftPlan | None = None

    def grow(self, draft: HybridDrafter, context: Context) -> TokenTree:
        """A trie, a guess or a root per text."""
        self._plan, self._guessed, self._timed = self.trie.plan(draft.retriever, context), {}, False
        able = replace(context, max_depth=draft.predictor.max_depths(context))
        weak = []
        if not self._plan.measures_plain:
            if draft.predictor.hidden_layers:
                # It lives on what the target has read, and has nothing to read itself.
                self._read.update(context.rows)
            weak = [
                i
                for i, bid in enumerate(self._plan.estimates)
                if able.max_depth[i] and self._weak(bid, able.sequences[i])
            ]
        tree = self._with_guesses(draft, able, weak, self._plan) if weak else self._plan.tree
        self._idle = 0 if weak else self._idle + 1
        return tree

    def _weak(self, bid: DraftEstimate, text: TokenBuffer) -> bool:
        """Whether the model promises this text more tokens per second than retrieval does, or is to be tried."""
        if self._tries < _TRIALS or self._idle >= self._again:
            return bid.row in self._read or not len(text.generated)
        assert self._plan is not None
        b, size = len(self._plan.estimates), round(self._size.value)
        cost = self.trie.cost.seconds(b, b + max(size, bid.size))
        share = cost[0] / b - cost[0]
        stood = self._stood_at(bid.row).value
        # The quickest: what took longer was mostly the machine's other work, and a guess that seems too dear is hardly
        # tried again.
        model = (1 + stood) / (share + cost[size] + min(self._times))
        return bool(model > (1 + bid.expected) / (share + cost[bid.size]))

    def _stood_at(self, row: int) -> RunningMean:
        """What stood of the guesses at a text; of a new one, what is thought of it."""
        return self._stood.setdefault(row, RunningMean(value=max(_HOPED, self._usual.value), weight=_DOUBT))

    def _with_guesses(self, draft: HybridDrafter, context: Context, weak: Sequence[int], plan: DraftPlan) -> TokenTree:
        """The model's guesses beside what was retrieved for the `weak` texts, for the others the latter alone."""
        asking = context.select(weak)
        guesses = self.model_shape.grow(draft.predictor, asking)
        self._timed = all(context.rows[i] in self._read for i in weak)
        self._read.update(context.rows[i] for i in weak)
        self._guessed = {context.rows[i]: int(n) - 1 for i, n in zip(weak, guesses.valid.sum(1), strict=True)}
        for size in self._guessed.values():
            self._size.add(size)
        likely = [[prefix for prefix, chance in plan.candidates[i] if chance >= _BESIDE] for i in weak]
        if any(likely):
            guesses = merge_trees(guesses, trie_from_prefixes(asking.last_tokens, likely))
        others = [i for i in range(len(context.rows)) if i not in set(weak)]
        if not others:
            return guesses
        both = concatenate_trees([guesses, plan.tree.select(np.array(others, np.int64))])
        return both.select(np.argsort([*weak, *others]))

    def observe(self, step: StepResult) -> None:
        """Book what the step took and gave."""
        if self._plan is None:
            return
        if self._timed:
            self._times.append(max(0.0, step.draft_seconds - self._retrieval.value) / len(self._guessed))
            self._tries += 1
        elif not self._guessed and any(bid.attempted for bid in self._plan.estimates):
            self._retrieval.add(step.draft_seconds)
        self.trie.learn_cost(step, self._plan)
        self.trie.update_controllers(step, self._plan, self._retrieval.value, but=self._guessed)
        for row in self._guessed.keys() & set(step.context.rows):
            stood = num_accepted(step, row)
            self._stood_at(row).add(stood)
            self._usual.add(stood)
        self._plan, self._guessed = None, {}

    def release(self, row: int) -> None:
        """Forget a row; what passes and guesses cost stays known."""
        self._read.discard(row)
        self._stood.pop(row, None)
        self.trie.release(row)
