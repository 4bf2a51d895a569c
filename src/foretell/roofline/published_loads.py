"""Simulations of the published measurements under load of published_loads.toml."""

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from foretell.roofline.analysis import builtin_model
from foretell.roofline.arrivals import LoadComparison, Request, StepCosts, simulate
from foretell.roofline.hardware import known_hardware
from foretell.roofline.method_profiles import cost_of_profile, find_method
from foretell.roofline.runtime import Runtime, find_runtime
from foretell.roofline.speculation import DraftShape
from foretell.roofline.workload import Workload

SEEDS = (0, 1, 2)
"""Of the arrivals; a prediction is the mean over them."""
MICROSECOND = 1e-6
NO_LIMIT = 1e9
"""Seconds to the first token, where a source limits only the time per further token."""


@dataclass(frozen=True)
class RequestKind:
    """Requests of one kind: their share, tokens, and what is promised per further token: `tpot` seconds, or
    `tpot_of_plain` times those of a single request without drafts (0: nothing). fixed: every output has that length,
    else it is the mean of an exponential distribution.
    """

    share: float
    prompt: int
    output: int
    tpot: float = 0.0
    tpot_of_plain: float = 0.0
    fixed: bool = False

    def promised(self, plain: StepCosts) -> "RequestKind":
        """The kind with its promise in seconds."""
        return replace(self, tpot=self.tpot_of_plain * plain.seconds(1, self.prompt, 0)) if self.tpot_of_plain else self


@dataclass(frozen=True)
class LoadSetting:
    """A published setting; published_loads.toml describes the fields."""

    name: str
    source: str
    model: str
    hardware: str
    devices: int
    runtime: str
    measure: Literal["latency", "goodput"]
    requests: int
    prompt_tokens: int
    kinds: tuple[RequestKind, ...]
    basis: str
    method: str
    drafted: int
    tau: float
    points: tuple[tuple[float, float, bool], ...]
    tau_basis: str = ""
    draft: str = ""
    draft_vocab: int = 0
    draft_devices: int = 0
    request_overhead: float | None = None


@dataclass(frozen=True)
class ComparedLoad:
    """One rate of a setting: the published ratio and the simulated one. fit: a figure was fitted to it."""

    setting: LoadSetting
    rate: float
    published: float
    predicted: float
    fit: bool

    @property
    def error(self) -> float:
        """Relative to the published ratio."""
        return self.predicted / self.published - 1


@cache
def load_settings() -> Mapping[str, LoadSetting]:
    """The settings by name."""
    text = resources.files("foretell.roofline").joinpath("published_loads.toml").read_text("utf-8")
    return {name: _setting(name, raw) for name, raw in tomllib.loads(text).items()}


def _setting(name: str, raw: Mapping[str, Any]) -> LoadSetting:
    kinds = tuple(RequestKind(**kind) for kind in raw["kinds"])
    points = tuple((float(rate), float(ratio), bool(fit)) for rate, ratio, fit in raw["points"])
    return LoadSetting(name, **(dict(raw) | {"kinds": kinds, "points": points}))


def mixed_requests(kinds: Sequence[RequestKind], rate: float, count: int, seed: int) -> list[Request]:
    """`count` requests with exponential gaps, `rate` a second on average, of kinds drawn by their shares."""
    draw, at, requests = random.Random(seed), 0.0, list[Request]()
    shares = [kind.share for kind in kinds]
    for _ in range(count):
        at += draw.expovariate(rate)
        (kind,) = draw.choices(kinds, shares)
        output = kind.output if kind.fixed else 1 + int(draw.expovariate(1 / kind.output))
        requests.append(Request(at, kind.prompt, output, kind.tpot or None))
    return requests


def _costs(setting: LoadSetting, runtime: Runtime) -> tuple[StepCosts, StepCosts]:
    """Steps without and with drafts."""
    target = builtin_model(setting.model)
    hardware = known_hardware()[setting.hardware].run_by(runtime)
    workload, shape = Workload(devices=setting.devices), DraftShape(setting.drafted + 1, setting.drafted, setting.tau)
    draft = None
    if setting.draft:
        draft = builtin_model(setting.draft)
        draft = replace(draft, config=replace(draft.config, vocab=setting.draft_vocab or draft.config.vocab))
    drafter = cost_of_profile(find_method(setting.method), target, draft)
    drafted = StepCosts(target, hardware, workload, shape, drafter, setting.draft_devices or None)
    return StepCosts(target, hardware, workload), drafted


def compare_loads(
    settings: Sequence[LoadSetting], runtime: Runtime | None = None, seeds: Sequence[int] = SEEDS
) -> list[ComparedLoad]:
    """Every point of the settings beside its simulation; `runtime`: in place of their own. seeds: of the arrivals."""
    compared = list[ComparedLoad]()
    for setting in settings:
        ran = runtime or find_runtime(setting.runtime)
        if setting.request_overhead is not None:
            ran = replace(ran, request_overhead=setting.request_overhead * MICROSECOND)
        costs = _costs(setting, ran)
        for rate, published, fit in setting.points:
            ratios = [_ratio(setting, costs, rate, seed) for seed in seeds]
            compared.append(ComparedLoad(setting, rate, published, sum(ratios) / len(ratios), fit))
    return compared


def _ratio(setting: LoadSetting, costs: tuple[StepCosts, StepCosts], rate: float, seed: int) -> float:
    kinds = [kind.promised(costs[0]) for kind in setting.kinds]
    requests = mixed_requests(kinds, rate, setting.requests, seed)
    pair = LoadComparison(
        *(simulate(requests, c, prompt_tokens=setting.prompt_tokens, ttft_limit=NO_LIMIT, seed=seed) for c in costs)
    )
    if setting.measure == "latency":
        return pair.speedup
    return pair.drafted.good_tokens / max(pair.plain.good_tokens, 1e-9)
