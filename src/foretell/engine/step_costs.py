"""What a step takes: its pass, the drafting and a drafter's reading, by the measured times, which learn from it."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from foretell.engine.draft_account import DraftAccount
from foretell.engine.draft_source import DraftSource
from foretell.engine.pass_times import PassTimes, load_key
from foretell.engine.statistics import StepTime
from foretell.engine.tuning import (
    EXPECTED_TIMES,
    HORIZON,
    LEAST_PROMPT,
    LEAST_UNREAD,
    LEVEL_SHARE,
    PRIOR_DRAFT,
    PRIOR_READING,
    TOKENS_A_STEP,
)

_MARGIN = 4
"""Drafts by which the time of a further one is told."""
_HOST, _PROMPT = "engine", "prompt"
"""Stand for what a step without drafts takes beside the pass, and for a token of a pass that reads prompts."""


@dataclass(frozen=True)
class StepLoad:
    """What a step reads before any draft; lists have an entry per request."""

    tokens: int
    """Tokens of the pass without drafts, those of prompts included."""
    is_decode: bool
    """Whether no prompt is read."""
    weights: Sequence[float]
    """What a token of each request is worth; 0: it gets none in this step."""
    room: Sequence[int]
    """How deep its drafts may be; 0: it may have none."""
    left: Sequence[int]
    """Its tokens to come."""
    sampled: Sequence[bool]
    accounts: Sequence[DraftAccount]
    context: float = 0.0
    """Mean tokens of the sequences."""
    crowd: int = 0
    """Other requests that wait or run, beside each."""


class DraftedStep(NamedTuple):
    """What a drafter did in a step."""

    source: DraftSource
    requests: int
    """For which it drafted."""
    read: int
    """Tokens that it had to read before."""
    levels: int
    """Of its deepest tree."""


class StepCosts:
    """Seconds that a step takes, as a function of its drafts."""

    def __init__(self, times: PassTimes, load: StepLoad) -> None:
        self.times, self._load = times, load
        self.requests = sum(w > 0 for w in load.weights)
        self.first = load.tokens - max(1, self.requests)
        """Tokens beside the first of each request: of prompts, and drafts that are verified whatever they cost."""
        self.key = load_key(self.requests, load.context)
        self._seconds = times.seconds(self.key, max(1, self.requests))
        self.host = times.draft_seconds(_HOST, self.requests, 0.0)
        self._known, reads = times.is_known, self.first >= LEAST_PROMPT
        self._token = times.draft_seconds(_PROMPT, 1, 0.0) if self._known and reads else 0.0
        """Seconds of a token where mostly prompts are read; 0: they are not, or unknown."""
        self.measures = times.needs_plain(self.key) if load.is_decode else reads and not self._known
        """Whether the step is verified without drafts, so that its time is known."""
        self.unread = dict[int, int]()
        """Tokens of requests that the drafter asked last has to read before it drafts."""

    @property
    def needs_drafted(self) -> bool:
        """Whether drafts are verified in a trial, so that the time of such a pass is known."""
        return self._load.is_decode and self.times.needs_drafted(self.key)

    def without_prompts(self) -> "StepCosts":
        """Those of a step of these requests that reads no prompt."""
        later = copy(self)
        later.first, later._token = 0, 0.0
        return later

    def counted(self, drafts: float, spent: float) -> float:
        """Seconds of the step with so many drafts and so long a drafting, as they count for the choice."""
        # What prompts take is no reason to draft more: tokens that come later come at the usual rate.
        return self.before_drafts(spent) + self.at(drafts)

    def before_drafts(self, spent: float) -> float:
        """What `counted` adds to the seconds of the pass."""
        return self.host + self._seconds[0] - self.at(0) + spent

    def at(self, drafts: float) -> float:
        """Seconds of the pass with so many drafts."""
        if self._token:
            return (self.requests + self.first + drafts) * self._token
        extra, table = self.first + drafts, self._seconds
        low = int(extra)
        if low + 1 < len(table):
            return table[low] + (extra - low) * (table[low + 1] - table[low])
        return table[-1] * (self.requests + extra) / (self.requests + len(table) - 1)

    def of_a_draft(self, drafts: float) -> float:
        """Seconds of a further draft beside so many."""
        # Where the time of a pass has a step, further drafts cost more than those that lead up to it are worth.
        return (self.at(drafts + _MARGIN) - self.at(drafts)) / _MARGIN

    def drafting(self, source: DraftSource, requests: int) -> float:
        """Seconds in which a drafter drafts for so many requests."""
        expected = PRIOR_DRAFT * self._seconds[0]
        return self.times.draft_seconds(source.name, requests, expected, source.levels)

    def of_a_level(self, source: DraftSource, requests: int) -> float:
        """Seconds of a further level of its trees for so many requests."""
        expected = LEVEL_SHARE * self.drafting(source, requests) / max(1.0, source.levels)
        return self.times.level_seconds(source.name, requests, expected)

    def count_unread(self, which: Sequence[int], unread: Callable[[int], int]) -> None:
        """Note what the drafter that is asked has to read of requests; less than is told from drafting counts as 0."""
        self.unread = {i: count for i in which if (count := unread(i)) >= LEAST_UNREAD}

    def reading(self, source: DraftSource, which: Sequence[int]) -> tuple[float, float]:
        """Seconds in which a drafter reads what it has not read of requests, and those of them that count for this
        step: the drafts of all tokens to come pay for it.
        """
        if not self.unread:
            return 0.0, 0.0
        token = self._read_seconds(source)
        seconds = [token * self.unread.get(i, 0) for i in which]
        steps = [max(1, min(self._load.left[i], HORIZON) / TOKENS_A_STEP) for i in which]
        return sum(seconds), sum(s / n for s, n in zip(seconds, steps, strict=True))

    def learn_pass(self, tokens: int, time: StepTime, follows: bool) -> None:
        """Learn the time of the pass, which had so many tokens. `follows`: its like; another time is a bound."""
        seconds = time.total - time.draft
        if self._load.is_decode:
            if follows or seconds < self.times.speed * self.at(tokens - self.requests - self.first):
                self.times.observe_pass(self.key, self.requests, tokens, seconds)
        elif self.first >= LEAST_PROMPT:
            expected = self.at(0) / (self.requests + self.first)
            self.times.observe_draft(_PROMPT, 1, seconds / tokens, expected)

    def learn_drafting(self, asked: Sequence[DraftedStep], seconds: float, follows: bool = True) -> None:
        """Learn the time of the drafter that was asked last, or of its reading: other times are known. `follows`: as
        in `learn_pass`.
        """
        if not self._known:
            return
        if not asked:
            if follows:
                self.times.observe_draft(_HOST, self.requests, seconds, 0.0)
            return
        speed = self.times.speed
        seconds /= speed
        *before, (source, requests, read, levels) = asked
        if any(other.read for other in before):
            return
        seconds -= self.host + sum(self.drafting(other.source, other.requests) for other in before)
        if not read:
            guess = PRIOR_DRAFT * self._seconds[0]
            if follows or seconds < self.times.draft_seconds(source.name, requests, guess, levels):
                self.times.observe_draft(source.name, requests, speed * seconds, guess, levels)
            return
        reading = seconds - self.drafting(source, requests)
        if reading < seconds / 2:
            # It took mostly the drafting: this says only that reading takes no longer.
            reading = seconds
            if reading >= read * self._read_seconds(source):
                return
        # A single disturbed reading is not believed: after a time too long nothing is read, and nothing corrects it.
        guess = self._read_seconds(source)
        if follows or reading < read * guess:
            self.times.observe_draft(source.reading, 1, speed * max(0.0, reading) / read, guess, guesses=EXPECTED_TIMES)

    def _read_seconds(self, source: DraftSource) -> float:
        """Seconds in which a drafter reads a token."""
        plain = self.times.seconds(load_key(1, self._load.context), 1)[0]
        return self.times.draft_seconds(source.reading, 1, PRIOR_READING * plain)
