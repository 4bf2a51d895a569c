"""Seconds of passes and of drafting for a model on a machine, given or fitted from the engine's own steps."""

import json
import logging
import os
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from foretell.engine.draft_source import DraftSource
from foretell.engine.measured import FINE, DraftTimes, Times, load_of, low, requests_of
from foretell.engine.tuning import (
    DRIFT_WINDOW,
    EXPECTED_TIMES,
    FOLLOWED,
    MOST_DISTURBED,
    MOST_UNSURE,
    PLAIN_INTERVALS,
    PRIOR_SLOPE,
    WINDOW,
)

log = logging.getLogger(__name__)
_FORMAT = "foretell pass times 3"
_KNOTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of further tokens with times of their own."""
_LARGEST = _KNOTS[-1]
_SIZES = np.arange(_LARGEST + 1)
_MOST_TOKENS = 512
"""Largest pass with a prior of its own; the time of larger ones grows in proportion."""
_KNOWN = 12
"""Times of a size after which it tells how fast the machine is."""
_CONTEXT_BITS = 10
"""Contexts of fewer than `1 << _CONTEXT_BITS` tokens are one kind; then each factor of two is one."""
_REFIT = 8
"""Passes of a load between two fits, after the first ones of a size."""
_FIRST_SAVED = 256
"""Passes after which the times are written first; then after each doubling."""
_LEAST_SAVED = 32
"""Passes of a process from which on its end writes them: those of a shorter one are mostly of cold caches."""

Key = tuple[int, int]
"""Of a load: number of requests and length of their contexts, both by powers of two."""


def load_key(requests: int, context: float) -> Key:
    """The key of so many requests with this mean context, in tokens."""
    return load_of(requests), (int(context) >> _CONTEXT_BITS).bit_length()


@dataclass
class _Curve:
    """Measured over prior seconds of the passes of one load, by their tokens beyond one per request."""

    start: list[float] | None
    """Where it begins, by knot: those of the nearest load. None: none is known, and the first pass tells the unit."""
    windows: dict[int, Times] = field(default_factory=dict)
    """The last ones by knot."""
    steps: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    """The step of the last pass by knot; that of plain ones is 0."""
    ratios: Float[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0))
    """Fitted, by number of further tokens."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """Fitted seconds by number of requests, and by number of further tokens."""
    plain: float = 0.0
    """Of plain passes when it was fitted last; 0: few were seen."""

    def __post_init__(self) -> None:
        self.fit()

    @property
    def knows_unit(self) -> bool:
        """Whether a plain pass was measured, of this load or of the one where it begins."""
        return 0 in self.windows or self.start is not None

    def add(self, extra: int, ratio: float) -> bool:
        """Count a pass; whether the curve was fitted anew."""
        self.steps += 1
        knot, expected, knows_unit = _nearest(extra), float(self.ratios[extra]), self.knows_unit
        if not knot and not knows_unit:
            # The first plain pass tells whether the few before it were disturbed.
            for window in self.windows.values():
                if not window.is_believed:
                    window.limit(MOST_UNSURE * ratio)
            self.windows[0] = Times()
        elif knot not in self.windows:
            # What the sizes around it say counts as some times of its own: a single one may be disturbed.
            self.windows[knot] = Times([expected] * EXPECTED_TIMES if self.windows else ())
        window = self.windows[knot]
        if self._is_rare(knot):
            # Of long ago, when the machine was another: what makes all sizes slower alike is not all that changes.
            window.keep(_KNOWN)
        # After a time far too long drafts may seem not to pay, and then nothing would correct it.
        window.add(min(ratio, MOST_DISTURBED * expected) if knows_unit else ratio)
        self.seen[knot] = self.steps
        refits = len(window.last) < _REFIT or self.steps % _REFIT == 0
        if refits:
            self.fit()
        return refits

    def _is_rare(self, knot: int) -> bool:
        return self.steps - self.seen.get(knot, 0) > WINDOW

    def fit(self) -> None:
        """Interpolate the deviations from the start between the knots that were measured."""
        self._follow_plain()
        start = [1.0] * len(_KNOTS) if self.start is None else self.start
        at, ratios = sorted(self.windows), np.array(start)
        if at:
            deviation = [self.windows[knot].low / start[knot] for knot in at]
            ratios = ratios * np.interp(_KNOTS, [_KNOTS[k] for k in at], deviation)
        self.ratios = np.interp(_SIZES, _KNOTS, ratios)
        self.seconds.clear()

    def _follow_plain(self) -> None:
        """Keep the times of drafted passes that are rare over those of plain ones: the speed wanders with what is seen,
        and would leave behind what is not.
        """
        seen = self.windows.get(0)
        if seen is None or len(seen.last) < _KNOWN:
            return
        if self.plain and seen.low != self.plain:
            for knot, window in self.windows.items():
                if knot and self._is_rare(knot):
                    window.scale(seen.low / self.plain)
        self.plain = seen.low


class PassTimes:
    """Seconds of a pass by requests, tokens and context, and of a drafter's step by the requests that it drafts for.

    `table`: seconds of a pass by its tokens, interpolated; then nothing is learned about passes. `expected`: the same
    as a prior, of which quotients alone matter; without it, every further token is first assumed to cost `PRIOR_SLOPE`
    times the first one. `file`: where the times are kept for the next start; one that cannot be read, or is of
    something else than `identity`, is ignored.

    Times are quantiles of the last ones of a size, and what makes all sizes slower alike counts for none of them: they
    are seconds of the machine at the speed of its first passes. So only their quotients mean something.

    Raises:
        ValueError: an empty table, or values that are not positive.
    """

    def __init__(
        self,
        table: Mapping[int, float] | None = None,
        expected: Mapping[int, float] | None = None,
        file: Path | None = None,
        identity: str = "",
    ) -> None:
        self.fixed = table is not None
        prior = expected if table is None else table
        self._prior = _filled({1: 1.0, 101: 1 + 100 * PRIOR_SLOPE} if prior is None else prior)
        self._curves, self._guessed = dict[Key, _Curve](), dict[Key, _Curve]()
        """Of measured loads, and of others since a curve was fitted last."""
        self._drafts = defaultdict[str, DraftTimes](DraftTimes)
        self._sources = dict[str, DraftSource]()
        self._deviations = deque[float](maxlen=DRIFT_WINDOW)
        self.speed = 1.0
        """Seconds of the last passes over those of the first ones."""
        self.passes = 0
        self._file, self._identity = file, identity
        if file is not None:
            self._read(file)

    def seconds(self, key: Key, requests: int) -> list[float]:
        """Seconds of passes over `requests` and 0, 1, … further tokens; they do not fall."""
        curve = self._curve(key)
        if requests not in curve.seconds:
            seconds = self._prior_of(requests + _SIZES) * curve.ratios
            # A smaller pass takes at most the time of a larger one: what exceeds that was disturbed.
            curve.seconds[requests] = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
        return curve.seconds[requests]

    @property
    def is_known(self) -> bool:
        """Whether any pass without prompts was measured: before, seconds mean something among themselves alone."""
        return self.fixed or bool(self._curves)

    def needs_plain(self, key: Key) -> bool:
        """Whether a plain pass should be measured: none was for long."""
        curve = self._curves.get(key)
        if self.fixed or curve is None:
            return False
        plain_at = curve.seen.get(0, 0)
        if plain_at == curve.steps and len(curve.windows[0].last) < 2 * EXPECTED_TIMES:
            return True  # what was expected still counts for as much as what was measured
        return curve.steps - plain_at >= PLAIN_INTERVALS[0 in curve.windows]

    def needs_drafted(self, key: Key) -> bool:
        """Whether a pass over drafts should be measured: none was for long, and earlier ones may be disturbed."""
        curve = self._curves.get(key)
        if self.fixed or curve is None:
            return False
        drafted_at = max((step for knot, step in curve.seen.items() if knot), default=0)
        return curve.steps - drafted_at >= PLAIN_INTERVALS[1]

    def source(self, name: str) -> DraftSource:
        """What is known of a drafter."""
        return self._sources.setdefault(name, DraftSource(name))

    def draft_seconds(self, drafter: str, requests: int, expected: float, levels: float = 0.0) -> float:
        """Seconds of a drafter's step for so many requests, whose trees have so many levels; `expected`: before any
        was measured.
        """
        return self._drafts[drafter].seconds(requests, levels, expected)

    def level_seconds(self, drafter: str, requests: int, expected: float) -> float:
        """Seconds of a further level of its trees; `expected`: before trees of several depths were measured."""
        return self._drafts[drafter].of_a_level(requests, expected)

    def observe_pass(self, key: Key, requests: int, tokens: int, seconds: float) -> None:
        """Count a pass that read no prompt."""
        if seconds <= 0:
            return
        if not self.fixed and 0 <= tokens - requests <= _LARGEST:
            curve, extra = self._curve(key), tokens - requests
            prior = float(self._prior[min(tokens, _MOST_TOKENS) - 1]) * max(1.0, tokens / _MOST_TOKENS)
            ratio, known = seconds / prior, curve.windows.get(_nearest(extra))
            if known is not None and len(known.last) >= _KNOWN:
                self._follow_speed(ratio / known.low)
            if not extra and not curve.knows_unit:
                for times in self._drafts.values():
                    times.limit(seconds)  # the first guesses were quotients of passes that may have been disturbed
            self._curves[key] = curve
            if curve.add(extra, ratio / self.speed):
                self._guessed.clear()
        self.passes += 1
        if self._file is not None and self.passes >= _FIRST_SAVED and self.passes & (self.passes - 1) == 0:
            self.save()

    def observe_draft(
        self, drafter: str, requests: int, seconds: float, expected: float, levels: int = 0, guesses: int = 1
    ) -> None:
        """Count a drafter's step for so many requests; negative: less than is measurable. `expected`, `levels`: as in
        `draft_seconds`; `guesses`: as in `DraftTimes.add`.
        """
        expected = self.draft_seconds(drafter, requests, expected, levels)
        self._drafts[drafter].add(requests, levels, seconds / self.speed, expected, guesses)

    def _follow_speed(self, deviation: float) -> None:
        self._deviations.append(deviation)
        # A change that lasts goes slowly into the times: nothing else holds the speed, which would wander off.
        self.speed = low(self._deviations) ** FOLLOWED

    def _curve(self, key: Key) -> _Curve:
        """That of a load; before any of its passes was measured, a new one by the nearest known load."""
        known = self._curves.get(key) or self._guessed.get(key)
        if known is not None:
            return known
        start, known_units = None, [key for key, curve in self._curves.items() if curve.knows_unit]
        if known_units:
            nearest = min(known_units, key=lambda k: abs(k[0] - key[0]) + FINE * abs(k[1] - key[1]))
            further = round(requests_of(key[0])) - round(requests_of(nearest[0]))
            places = np.clip(np.array(_KNOTS) + further, 0, _LARGEST)
            start = self._curves[nearest].ratios[places].tolist()
        self._guessed[key] = guessed = _Curve(start)
        return guessed

    def _prior_of(self, tokens: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        prior: Float[np.ndarray, " n"] = self._prior[np.minimum(tokens, _MOST_TOKENS) - 1]
        return prior * np.maximum(1.0, tokens / _MOST_TOKENS)

    def close(self) -> None:
        """Write the file at the end of a process, if it learned enough."""
        if self.passes >= _LEAST_SAVED:
            self.save()

    def save(self) -> None:
        """Write the file; a failure is logged."""
        if self._file is None:
            return
        curves = [[*key, {k: list(w.last) for k, w in curve.windows.items()}] for key, curve in self._curves.items()]
        known = {
            "format": _FORMAT,
            "identity": self._identity,
            "curves": curves,
            "drafts": {name: times.state() for name, times in self._drafts.items()},
            "sources": {name: source.state() for name, source in self._sources.items()},
        }
        unfinished = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(known), "utf-8")
            unfinished.replace(self._file)
        except OSError as error:
            log.warning("%s: the times of passes cannot be kept: %s", self._file, error)
            with suppress(OSError):
                unfinished.unlink()

    def _read(self, file: Path) -> None:
        try:
            known: Any = json.loads(file.read_text("utf-8"))
            if known["format"] != _FORMAT or known["identity"] != self._identity:
                return
            curves = {(int(r), int(c)): {int(k): Times(w) for k, w in ws.items()} for r, c, ws in known["curves"]}
            drafts = {str(name): DraftTimes.from_state(state) for name, state in known["drafts"].items()}
            sources = {str(name): DraftSource.from_state(name, state) for name, state in known["sources"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            log.warning("%s holds no times of passes: it is written anew", file)
            return
        for key, windows in curves.items():
            kept = {k: window for k, window in windows.items() if window.is_believed and 0 <= k < len(_KNOTS)}
            if 0 in kept:
                self._curves[key] = _Curve(None, kept)
        self._drafts.update(drafts)
        self._sources = sources


def _nearest(extra: int) -> int:
    """Index of the knot next to a number of further tokens."""
    above = min(bisect_left(_KNOTS, extra), len(_KNOTS) - 1)
    return above - (above > 0 and extra - _KNOTS[above - 1] < _KNOTS[above] - extra)


def _filled(table: Mapping[int, float]) -> Float[np.ndarray, " n"]:
    """The seconds of all sizes; beyond the last known one they grow as between the last two."""
    if not table or min(table) < 1 or min(table.values()) <= 0:
        raise ValueError("a cost table needs positive seconds for pass sizes of 1 token or more")
    known, sizes = sorted(table), np.arange(1, _MOST_TOKENS + 1)
    seconds = np.interp(sizes, known, [table[k] for k in known])
    if len(known) > 1:
        before, last = known[-2:]
        slope = max(0.0, (table[last] - table[before]) / (last - before))
        seconds += slope * np.maximum(0, sizes - last)
    return seconds
