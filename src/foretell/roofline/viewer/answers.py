"""What the page asks and is answered: each answer is computed by the functions of the command line, and kept."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from foretell.roofline.arrivals import LoadComparison, StepCosts
from foretell.roofline.names import look_up
from foretell.roofline.viewer.methods import arrival_costs, compare_rate, gain_answer, load_answer, methods_answer
from foretell.roofline.viewer.passes import Answer, pass_answer, sweeps_answer
from foretell.roofline.viewer.settings import (
    DEFAULTS,
    Arrivals,
    Known,
    Setting,
    read_arrivals,
    read_drafts,
    read_parts,
    read_question,
    read_setting,
)

TOPICS = ("pass", "sweeps", "methods", "gain", "load")
KEPT = 128
"""Answers that are kept."""


class Answers:
    """The answers of a page about known devices and models."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self._kept = lru_cache(KEPT)(self._compute)
        self._analysed = lru_cache(16)(self._analyse)
        self._costs = lru_cache(8)(self._arrival_costs)
        self._compared = lru_cache(KEPT)(self._compare)

    def answer(self, topic: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer on a topic: `pass`, `sweeps`, `methods`, `gain` or `load`.

        asked: `now`, a setting, and where it applies `compared`, another one, `method`, the one that is drawn, and
        `count`, how many of the rates are simulated.

        Raises:
            ValueError: an unknown topic, or a question that is none; `SettingError` names the setting.
        """
        look_up({t: t for t in TOPICS}, topic, "topic")
        now, compared = asked.get("now"), asked.get("compared")
        if not isinstance(now, dict) or not isinstance(compared, dict | None):
            raise ValueError("a question holds the setting `now`, an object, and perhaps `compared`, another one")
        settings = [read_setting(s) for s in (now, compared) if s is not None]
        method, count = asked.get("method", ""), asked.get("count", 0)
        if not isinstance(method, str) or not isinstance(count, int):
            raise ValueError("a question names a method by a text and counts rates by a whole number")
        return self._kept(topic, tuple(json.dumps(s, sort_keys=True) for s in settings), method, count)

    def _compute(self, topic: str, settings: tuple[str, ...], method: str, count: int) -> dict[str, Any]:
        if topic == "pass":
            return pass_answer([self._analysed(s) for s in settings], [json.loads(s) for s in settings])
        if topic == "sweeps":
            return sweeps_answer([self._analysed(s) for s in settings])
        setting = json.loads(settings[0])
        question, drafts = self._analysed(settings[0]).question, read_drafts(setting, self.known)
        if topic == "methods":
            return methods_answer(question, drafts, read_parts(setting))
        if method not in drafts.profiles:
            raise ValueError(f"there is no method called {method!r}; known: {', '.join(drafts.profiles)}")
        return gain_answer(question, drafts, method) if topic == "gain" else self._load(setting, method, count)

    def _analyse(self, setting: str) -> Answer:
        return Answer(read_question(json.loads(setting), self.known))

    def _load(self, setting: Setting, method: str, count: int) -> dict[str, Any]:
        """The simulated load of the first `count` rates: how many are left, and the charts where none is; or why the
        method cannot be used.
        """
        rates = self._arrivals(json.dumps(setting)).rates
        # Steps and results do not depend on the other rates: they are kept under a setting without them.
        key = json.dumps({**setting, "rates": DEFAULTS["rates"]}, sort_keys=True)
        try:
            drafted = self._costs(key, method)[1]
        except ValueError as error:
            return {"left": 0, "of": len(rates), "unavailable": str(error)}
        compared = [self._compared(key, method, rate) for rate in rates[:count]]
        if len(compared) < len(rates):
            return {"left": len(rates) - len(compared), "of": len(rates)}
        return {"left": 0} | load_answer(rates, compared, drafted, method)

    def _arrivals(self, setting: str) -> Arrivals:
        s = json.loads(setting)
        return read_arrivals(s, read_question(s, self.known), read_drafts(s, self.known).shape)

    def _arrival_costs(self, setting: str, method: str) -> tuple[StepCosts, StepCosts]:
        return arrival_costs(self._arrivals(setting), read_drafts(json.loads(setting), self.known), method)

    def _compare(self, setting: str, method: str, rate: float) -> LoadComparison:
        return compare_rate(self._arrivals(setting), self._costs(setting, method), rate)
