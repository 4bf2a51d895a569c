"""Switches drafting on and off by measured speed: for every load, steps with drafts beside steps without.

What a step costs is measured as a whole, with all that the host does for drafting, so that no model of the machine is
needed: a load where drafts do not pay is decoded plainly. The idea of switching by load is that of vLLM's
`speculative_disable_by_batch_size`; here no number is given.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import fmean, median
from typing import NamedTuple

_FIRST_STEPS = 12
"""Steps of a load before its first trial."""
_FIRST_PLAIN_STEPS = 64
"""The same of a load that is expected to be decoded plainly."""
_COMPARED = 8
"""Last steps that are compared with those of a trial."""
_PLAIN_TRIAL, _DRAFT_TRIAL, _LARGE_TRIAL = 3, 8, 5
"""Steps of a trial without drafts, with drafts, and with drafts for `_LARGE` requests or more."""
_LARGE = 8
_SKIPPED = {False: 1, True: 2}
"""First steps of a trial that are not compared: caches are cold, and drafters read what they have not read yet."""
_TRIAL_SHARE = 0.01
"""Share of the time that trials take at most, in the long run."""
_MIN_INTERVAL, _MAX_INTERVAL = 24, 2048
"""Steps between two trials."""
_PRIOR_TOKENS, _PRIOR_ROWS = 2.0, 12.0
"""Expected tokens of a drafting step per request before any is seen, and the weight of this, in requests."""
_MEMORY = 768.0
"""Requests times steps after which older ones begin to fade in the mean number of tokens."""
_RATIO_SHARE = 0.25
"""Least weight of the newest comparison in the mean ratio of times."""
_GAIN_BY_LOAD = 0.9
"""Expected gain of twice as many requests over that of so many, before it is measured."""
_OFF, _ON = 0.99, 1.02
"""Gains below which drafting is switched off, and from which on it is switched on."""
_MOST_GROWTH = 8
"""Most times by which the least interval grows with the number of trials."""
_FINE = 2.0
"""Loads per factor of two."""
_FRESH = 64
"""Steps after which others are too old to be compared with, and a trial that is not over, or has nothing left to be
compared with, is given up.
"""
_MOST = 2.0
"""A step counts as at most this many times the median of those that it is compared with."""


class _Step(NamedTuple):
    number: int
    seconds: float
    """Per request."""
    tokens: float
    """New ones per request."""


@dataclass
class _Load:
    """What is known of a number of requests that decode together."""

    drafting: bool = True
    tokens: float = _PRIOR_TOKENS
    """Mean new tokens of a drafting step, per request."""
    weight: float = _PRIOR_ROWS
    ratio: float = 1.0
    """Time of a drafting step over that of a plain one."""
    comparisons: int = 0
    """Trials so far."""
    steps: int = 0
    next_trial: int = _FIRST_STEPS
    """Number of the step from which on one is due."""
    trial: list[_Step] = field(default_factory=list)
    """Steps of the present trial."""
    trial_from: int | None = None
    """Number of the step with which it began."""
    recent: deque[_Step] = field(default_factory=lambda: deque(maxlen=_COMPARED))
    """Last steps outside trials."""

    @property
    def gain(self) -> float:
        """Speed with drafts over that without."""
        return self.tokens / self.ratio


class DraftSwitch:
    """Decides before every step whether the engine's method drafts.

    For each number of decoding requests the time of steps with drafts and without is compared: now and then a few steps
    in a row are done the other way (a trial), and their times are compared with those of the steps right before, so
    that the machine's present speed does not matter. Trials are the rarer the more time they lose. A new number of
    requests begins with what is known of the nearest one. Use it where the text of a seed does not depend on drafts.
    """

    def __init__(self) -> None:
        self._loads = dict[int, _Load]()
        self._key: int | None = None
        """Of the step that began last; None: it is not measured."""
        self._step = 0
        self.drafting = True
        """Whether the last step drafted, or would have."""
        self.switched_on = 0
        """How often a load was switched on."""
        self.switched_off = 0

    def begin(self, requests: int, is_measured: bool = True) -> bool:
        """Whether to draft in a step in which so many requests decode. `is_measured`: nothing else happens in it."""
        key = round(_FINE * log2(max(1, requests)))
        load = self._load_of(key)
        self._key = key if is_measured else None
        if is_measured:
            self._step += 1
            self._begin_trial(load)
        self.drafting = load.drafting is (load.trial_from is None)
        return self.drafting

    def skip(self) -> None:
        """Begin a step to which the switch does not apply."""
        self._key = None

    def _begin_trial(self, load: _Load) -> None:
        while load.recent and self._step - load.recent[0].number > _FRESH:
            load.recent.popleft()
        if load.trial_from is not None and (self._step - load.trial_from > _FRESH or not load.recent):
            load.trial_from = None
            load.trial.clear()
        if load.trial_from is None and load.steps >= load.next_trial and len(load.recent) > _COMPARED // 2:
            load.trial_from = self._step

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        """Count the step that began last: its requests, new tokens and time in all."""
        if self._key is None:
            return
        load, step = self._loads[self._key], _Step(self._step, seconds / requests, tokens / requests)
        load.steps += 1
        if self.drafting:
            load.weight = min(load.weight + requests, _MEMORY)
            load.tokens += (step.tokens - load.tokens) * min(1.0, requests / load.weight)
        if load.trial_from is None:
            load.recent.append(step)
            return
        load.trial.append(step)
        length = _PLAIN_TRIAL if not self.drafting else _DRAFT_TRIAL if requests < _LARGE else _LARGE_TRIAL
        if len(load.trial) == length:
            self._compare(load)

    def _load_of(self, key: int) -> _Load:
        if key not in self._loads:
            self._loads[key] = self._new_load(key)
        return self._loads[key]

    def _new_load(self, key: int) -> _Load:
        known = [k for k, load in self._loads.items() if load.comparisons]
        if not known:
            return _Load()
        nearest = min(known, key=lambda k: abs(k - key))
        load = self._loads[nearest]
        ratio = max(1.0, load.ratio / _GAIN_BY_LOAD ** ((key - nearest) / _FINE))
        on = load.tokens / ratio >= (_OFF if load.drafting else _ON)
        first = _FIRST_STEPS if on else _FIRST_PLAIN_STEPS
        return _Load(on, load.tokens, min(load.weight, _MEMORY / 8), ratio, next_trial=first)

    def _compare(self, load: _Load) -> None:
        """End a trial."""
        usual = _clipped_mean([step.seconds for step in load.recent])
        tried = _clipped_mean([step.seconds for step in load.trial[_SKIPPED[self.drafting] :]])
        ratio = max(1.0, tried / usual if self.drafting else usual / tried)
        load.comparisons += 1
        load.ratio += (ratio - load.ratio) * max(_RATIO_SHARE, 1 / load.comparisons)
        # What the trial has lost: its time less that of its tokens otherwise.
        otherwise = load.tokens if load.drafting else 1.0
        most = _MOST * max(usual, tried)
        lost = sum(min(step.seconds, most) - step.tokens / otherwise * usual for step in load.trial)
        interval = max(lost / (_TRIAL_SHARE * usual), _MIN_INTERVAL * min(load.comparisons, _MOST_GROWTH))
        load.next_trial = load.steps + int(min(interval, _MAX_INTERVAL))
        load.trial_from = None
        load.trial.clear()
        on = load.gain >= (_OFF if load.drafting else _ON)
        if on is not load.drafting:
            load.drafting = on
            load.recent.clear()
            self.switched_on += on
            self.switched_off += not on


def _clipped_mean(seconds: Sequence[float]) -> float:
    """The mean, in which no value counts more than `_MOST` times the median."""
    most = _MOST * median(seconds)
    return fmean(min(each, most) for each in seconds)
