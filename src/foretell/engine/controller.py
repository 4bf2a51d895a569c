"""Chooses in every step which drafts the target verifies: those that give the most expected tokens per second over all
requests together, from calibrated chances of acceptance and the measured times of passes and of drafting.

The goal is that of TurboSpec (arXiv 2406.14066), chosen per node and step; requests behind their deadline weigh more,
as AdaServe (arXiv 2501.12162) serves them first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float

from foretell.core.context import StepResult
from foretell.draft.base import NoDrafter, Predictor
from foretell.engine.draft_estimate import DraftEstimate
from foretell.engine.drafted_trees import NO_LIMIT, DraftedTrees
from foretell.engine.method import BoundMethod
from foretell.shape.pass_cost import PassCost

LATE_WEIGHT = 4.0
"""How many tokens of other requests a token of a request near its deadline is worth."""
_MIN_PASSES = 3
"""Measured passes before their times decide."""
_SPEEDUP_SHARE = 0.2
"""Weight of the newest step in the mean of the expected speed-up."""
_SWITCH_OFF, _SWITCH_ON = 0.99, 1.03
"""Expected speed-ups below which a method is switched off, and from which on it drafts again."""
_PROBE_ROWS = 2
"""Requests for which drafts are probed."""
_PROBE_STEPS = 4
"""Steps of a probe: some drafters need a pass before they draft again, and the first draft is not timed."""
_PROBE_NODES = 8
"""Nodes that a probe verifies beyond those that pay."""
_PROBE_DEPTH = 2
"""Levels that a probe drafts beyond those that pay."""
_PROBE_SHARE = 0.01
"""Share of the time that probes take at most."""


@dataclass
class ControllerStatistics:
    """Sums over the steps that decoded, without those that also read a prompt and the first ones, before times are
    known. Rates are differences of two readings over time.
    """

    steps: int = 0
    drafting_steps: int = 0
    """Steps with drafts to verify."""
    probes: int = 0
    """Probes of methods that were switched off, or of larger trees."""
    switched_on: int = 0
    """How often a method was switched on again."""
    switched_off: int = 0
    nodes_drafted: int = 0
    nodes_verified: int = 0
    nodes_accepted: int = 0
    predicted_tokens: float = 0.0
    predicted_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    """Of drafting, passes and acceptance."""
    plain_seconds: float = 0.0
    """Expected seconds of the plain steps that would have given `tokens`."""
    predicted_plain_seconds: float = 0.0
    """The same of `predicted_tokens`."""

    @property
    def switches(self) -> int:
        """How often a method was switched off or on."""
        return self.switched_on + self.switched_off

    @property
    def predicted_speedup(self) -> float:
        """Expected tokens per second over those of plain decoding."""
        return self.predicted_plain_seconds / self.predicted_seconds if self.predicted_seconds else 1.0

    @property
    def realised_speedup(self) -> float:
        """Tokens per second over those expected of plain decoding."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class StepLoad:
    """What a step reads before any draft."""

    tokens: int
    """Tokens of the pass without drafts, those of prompts included."""
    is_decode: bool
    """Whether no prompt is read."""
    weights: Float[np.ndarray, " b"]
    """What a token of each request is worth; 0: it gets none in this step."""


@dataclass
class _MethodState:
    """What the controller knows of a method."""

    estimate: DraftEstimate = field(default_factory=DraftEstimate)
    active: bool = True
    speedup: float = 1.0
    """Running mean of the expected one."""
    next_probe: int = 0
    """Step of the next probe."""
    probe_left: int = 0
    """Steps of the present probe that are left."""
    probe_start: int = 0
    """Index of the first request of the present probe."""
    drafted_rows: frozenset[int] = frozenset()
    """Rows for which it drafted last: its drafter has read what came before."""


class Controller:
    """Decides in every step which methods draft, how deep, and which of the drafted nodes are verified.

    All drafted nodes compete by their chance of acceptance; as many are verified as give the most expected tokens per
    second. A method whose drafts do not pay is not asked, until they pay by the estimates for the present load, or by a
    probe: every `probe_interval` steps or more rarely, a few nodes of two requests are drafted for some steps. It
    observes all steps. Drafts of acceptors that keep the seed's text (`Match`) are chosen after drafting, which cannot
    change a token. For other lossless acceptors only the depth of drafts is limited, before drafting and from earlier
    steps alone, so that no choice depends on what is sampled. A lossy method always drafts in full: what it drafts is
    its answer, which no measured time may change.

    `cost`: seconds of a pass by its tokens; None: learned. A controller serves one engine.

    Raises:
        ValueError: a probe interval below 1.
    """

    def __init__(self, cost: PassCost | None = None, probe_interval: int = 8) -> None:
        if probe_interval < 1:
            raise ValueError(f"a controller probes at most every step, found an interval of {probe_interval}")
        self.cost = PassCost() if cost is None else cost
        self.statistics = ControllerStatistics()
        self._probe_interval = probe_interval
        self._states: WeakKeyDictionary[BoundMethod, _MethodState] = WeakKeyDictionary()
        self._load = StepLoad(0, False, np.zeros(0))
        self._step, self._passes = 0, 0
        self._measures_plain, self._probed_nodes, self._drafted_nodes = False, 0, 0
        self._expected_tokens, self._expected_seconds = 0.0, 0.0
        self._parts: Sequence[DraftedTrees] = ()

    @property
    def _knows_cost(self) -> bool:
        return self.cost.fixed or self._passes >= _MIN_PASSES

    @property
    def _decoding(self) -> int:
        """Requests that get tokens in this step."""
        return int(np.count_nonzero(self._load.weights))

    def asks(self, bound: BoundMethod) -> bool:
        """Whether a method drafts in this step or will soon."""
        state = self._states.get(bound)
        return state is None or state.active or state.probe_left > 0

    def begin(self, load: StepLoad) -> None:
        """Begin a step; the one before may have failed."""
        self._load, self._parts, self._step = load, (), self._step + 1
        self._probed_nodes = self._drafted_nodes = 0
        self._measures_plain = load.is_decode and self.cost.needs_measurement(load.tokens)
        self._expected_tokens = float(self._decoding)
        self._expected_seconds = self.cost.seconds_of([load.tokens])[0]

    def depths(self, bound: BoundMethod, count: int) -> list[int]:
        """Greatest depth of the drafts of each of `count` requests of a method; 0: the method is not asked."""
        if bound not in self._states:
            self._states[bound] = _MethodState()
        state = self._states[bound]
        estimate = state.estimate
        if isinstance(bound.method.draft, NoDrafter) or not bound.method.lossless:
            return [NO_LIMIT] * count
        if self._measures_plain:
            return [0] * count
        if not (estimate.known and self._knows_cost):
            return [NO_LIMIT] * count
        speedup, depth = self._forecast(bound, estimate, count)
        self._switch(state, speedup)
        by_depth = not estimate.scored and (
            isinstance(bound.method.draft, Predictor) or not bound.method.accept.same_seed
        )
        depths = [(depth if by_depth else NO_LIMIT) if state.active else 0] * count
        for i in self._probed(state, count):
            depths[i] = depth + _PROBE_DEPTH if by_depth else NO_LIMIT
        return depths

    def _forecast(self, bound: BoundMethod, estimate: DraftEstimate, count: int) -> tuple[float, int]:
        """Expected speed-up by the best choice among the nodes that a method drafts on the mean, and how many kinds of
        nodes it takes: the depth, where nodes have no scores.
        """
        load, plain = self._load, self._decoding
        nodes = count * np.cumsum(estimate.nodes)
        sizes = np.ceil(nodes).astype(np.int64)
        undrafted, *drafted = self.cost.seconds_of([load.tokens, *(load.tokens + sizes).tolist()])
        levels = np.arange(1, len(nodes) + 1) if _counts_levels(bound, estimate) else np.ones(len(nodes))
        tokens = plain + count * np.cumsum(estimate.chance * estimate.nodes)
        rate = tokens / (np.array(drafted) + estimate.seconds(count) * levels)
        best = int(np.argmax(rate))
        return float(rate[best] * undrafted / plain), best + 1

    def _switch(self, state: _MethodState, speedup: float) -> None:
        state.speedup += _SPEEDUP_SHARE * (speedup - state.speedup)
        active = state.speedup >= (_SWITCH_OFF if state.active else _SWITCH_ON)
        self.statistics.switched_on += active > state.active
        self.statistics.switched_off += active < state.active
        state.active = active

    def _probed(self, state: _MethodState, count: int) -> list[int]:
        """Which of `count` requests are probed in this step."""
        if not state.probe_left:
            if self._step < state.next_probe:
                return []
            state.probe_left = 1 if state.active else _PROBE_STEPS
            state.probe_start += _PROBE_ROWS
            state.next_probe = self._step + self._interval(state)
            self.statistics.probes += 1
        state.probe_left -= 1
        self._probed_nodes += _PROBE_NODES
        return [(state.probe_start + i) % count for i in range(min(_PROBE_ROWS, count))]

    def _interval(self, state: _MethodState) -> int:
        """Steps from this probe to the next, so that probes take `_PROBE_SHARE` of the time."""
        first = self._load.tokens
        plain, larger = self.cost.seconds_of((first, first + _PROBE_NODES))
        draft = 0.0 if state.active else state.estimate.seconds(_PROBE_ROWS)
        return max(self._probe_interval, int(state.probe_left * (larger - plain + draft) / (_PROBE_SHARE * plain)))

    def prune(self, parts: Sequence[DraftedTrees]) -> None:
        """Leave in the trees only the nodes that pay, of all requests together."""
        self._parts = parts
        if all(part.tree.nodes == 1 for part in parts):
            return
        chances = [self._chances(part) for part in parts]
        weights = [self._load.weights[part.indices][:, None] for part in parts]
        free = [part.removable() for part in parts]
        self._drafted_nodes = sum(int(np.count_nonzero(part.drafts)) for part in parts)
        kept = [part.drafts & ~f for part, f in zip(parts, free, strict=True)]
        worth = sum(float((c * w)[k].sum()) for c, w, k in zip(chances, weights, kept, strict=True))
        first = self._load.tokens + sum(int(np.count_nonzero(k)) for k in kept)
        value = np.concatenate([(c * w * f).ravel() for c, w, f in zip(chances, weights, free, strict=True)])
        draft_seconds = sum(part.seconds for part in parts)
        chosen = self._choose(value, first, float(self._load.weights.sum()) + worth, draft_seconds)
        start = 0
        for part, chance, mask, must in zip(parts, chances, free, kept, strict=True):
            left = must | (mask & chosen[start : start + mask.size].reshape(mask.shape))
            start += mask.size
            self._expected_tokens += float(chance[left].sum())
            if not left[mask].all():
                left[:, 0] = part.tree.valid[:, 0]
                part.own = part.own or part.tree
                part.tree = replace(part.tree, valid=left)
        size = first + int(np.count_nonzero(chosen))
        self._expected_seconds = self.cost.seconds_of([size])[0] + draft_seconds

    def _chances(self, part: DraftedTrees) -> Float[np.ndarray, "b n"]:
        """Probability of acceptance of every node."""
        chance = np.zeros(part.tree.token.shape)
        if part.bound is not None:
            own = part.own or part.tree
            chance[:, : own.nodes] = self._states[part.bound].estimate.chances(own)
        return chance if part.predicted is None else np.maximum(chance, part.predicted)

    def _choose(
        self, value: Float[np.ndarray, " m"], first: int, worth: float, draft_seconds: float
    ) -> Bool[np.ndarray, " m"]:
        """The nodes that are verified, by their values (0: no node), for a pass of `first` tokens without them, which
        is worth `worth` tokens.
        """
        if self._measures_plain:
            return np.zeros(len(value), bool)
        chosen, candidates = value > 0, int(np.count_nonzero(value > 0))
        if not candidates or not self._knows_cost:
            return chosen
        # Stable: of equals the earlier ones stay, so that a node's parent is kept.
        order = np.argsort(-value, kind="stable")[:candidates]
        gained = np.concatenate([[0.0], np.cumsum(value[order])])
        pass_seconds = np.array(self.cost.seconds_of(range(first, first + candidates + 1)))
        rate = (worth + gained) / (pass_seconds + draft_seconds)
        chosen[order[int(np.argmax(rate)) + self._probed_nodes :]] = False
        return chosen

    def observe(self, step: StepResult) -> None:
        """Learn from the result of the step that began last."""
        for part in self._parts:
            self._learn(part, step)
        if step.tree.is_decode:
            if self._knows_cost:
                self._count(step)
            self.cost.update(int(np.count_nonzero(step.tree.active)), step.pass_seconds)
            self._passes += step.pass_seconds > 0

    def _learn(self, part: DraftedTrees, step: StepResult) -> None:
        if part.bound is None or isinstance(part.bound.method.draft, NoDrafter):
            return
        state, own = self._states[part.bound], part.own or part.tree
        rows = frozenset(part.rows)
        # The first draft of a row includes reading what came before.
        if rows <= state.drafted_rows:
            levels = int(own.depth.max()) if _counts_levels(part.bound, state.estimate) else 1
            state.estimate.count_time(len(rows), part.seconds, levels)
        state.drafted_rows = rows
        accepted = list[tuple[int, int]]()
        for i, index in enumerate(part.indices):
            prefix = int(step.tree.prefix_length[index])
            nodes = [node - prefix + 1 for node in step.paths[index][prefix:]]
            accepted += [(i, node) for node in nodes if node < own.nodes]
        state.estimate.count_nodes(own, part.tree.valid[:, : own.nodes], accepted, part.depths)

    def _count(self, step: StepResult) -> None:
        s, requests = self.statistics, range(len(step.paths))
        verified, tokens = sum(map(step.num_drafted, requests)), sum(map(len, step.new_tokens))
        plain = self.cost.seconds_of([self._load.tokens])[0] / len(step.paths)
        s.steps += 1
        s.drafting_steps += verified > 0
        s.nodes_drafted += self._drafted_nodes
        s.nodes_verified += verified
        s.nodes_accepted += sum(map(step.num_accepted, requests))
        s.tokens += tokens
        s.seconds += step.draft_seconds + step.pass_seconds
        s.plain_seconds += tokens * plain
        s.predicted_tokens += self._expected_tokens
        s.predicted_seconds += self._expected_seconds
        s.predicted_plain_seconds += self._expected_tokens * plain


def _counts_levels(bound: BoundMethod, estimate: DraftEstimate) -> bool:
    """Whether the time of drafting grows with the depth, which then is the kind of a node."""
    return isinstance(bound.method.draft, Predictor) and not estimate.scored
