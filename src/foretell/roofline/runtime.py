"""What a runtime adds to the data sheet of a device: the share of its rates that is reached, and fixed times.

A data sheet states rates that no program reaches and says nothing of launches, synchronisation and the host's work.
runtimes.toml holds typical figures of three kinds of runtimes, fitted to published measurements (`fit_runtime`).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from foretell.roofline.linear_cost import Array
from foretell.roofline.names import look_up

Requests = TypeVar("Requests", float, Array)

DEFAULT_RUNTIME = "graphs"
"""What a server does; the runtime of a prediction where none is named."""
_SECONDS_PER_UNIT = 1e-6
_TIMES = (
    "launch", "op_overhead", "pass_overhead", "step_overhead", "request_overhead", "lookup_overhead",
    "collective_latency", "cache_read", "logit_time",
)  # fmt: skip
_FLAGS = ("expansion", "prefill_first")
_SHARES = ("bandwidth", "peak", "host")


@dataclass(frozen=True)
class Runtime:
    """Shares of the data sheet's rates that are reached (0 to 1), and fixed times in seconds.

    bandwidth: of memory. peak: of the matrix rate. host: of the link to host memory. overlap: part of the shorter of
    compute and memory time that is hidden behind the longer; 1 is the classical roofline, 0 adds them. convert: OPs at
    the elementwise rate to widen one weight of at most 8 bits, where the device does not multiply it as it is.
    launch: least time of an operation that the host issues alone. op_overhead, pass_overhead, step_overhead: added per
    operation, per pass of target or drafter, and per speculative step. request_overhead: added per request of a
    speculative step, for what the host does for one after the other. lookup_overhead: likewise where drafts are copied
    from the text. collective_latency: added per exchange between devices. cache_read: seconds per byte of keys and
    values, which attention adds to its compute time in place of the bandwidth's (0: the bandwidth's). logit_time: added
    per logit. error: relative error within which 80 % of the checked measurements lie; 0: unknown. expansion: every
    verified token is a sequence of its own, which reads the cache again. prefill_first: waiting prompts are read whole,
    and running requests wait for them.

    Raises:
        ValueError: a share outside (0, 1], an overlap outside [0, 1] or a negative time.
    """

    name: str
    title: str = ""
    source: str = ""
    bandwidth: float = 1.0
    peak: float = 1.0
    host: float = 1.0
    overlap: float = 1.0
    convert: float = 0.0
    launch: float = 0.0
    op_overhead: float = 0.0
    pass_overhead: float = 0.0
    step_overhead: float = 0.0
    request_overhead: float = 0.0
    lookup_overhead: float = 0.0
    collective_latency: float = 0.0
    cache_read: float = 0.0
    logit_time: float = 0.0
    error: float = 0.0
    expansion: bool = False
    prefill_first: bool = False

    def __post_init__(self) -> None:
        for name in _SHARES:
            if not 0 < (share := getattr(self, name)) <= 1:
                raise ValueError(f"runtime {self.name!r}: {name} must be a share in (0, 1], found {share:g}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"runtime {self.name!r}: overlap must lie between 0 and 1, found {self.overlap:g}")
        for name in (*_TIMES, "convert"):
            if not (seconds := getattr(self, name)) >= 0:
                what = name.replace("_", " ")
                raise ValueError(f"runtime {self.name!r}: the {what} must not be negative, found {seconds:g}")

    def step_seconds(self, requests: Requests, copied: bool) -> Requests:
        """Seconds of a speculative step outside the passes; `copied`: its drafts are found in the text."""
        return self.step_overhead + requests * (self.request_overhead + (self.lookup_overhead if copied else 0.0))


DATASHEET = Runtime("datasheet", "The data sheet's rates, no fixed times", "the definition of the roofline model")


@cache
def known_runtimes() -> Mapping[str, Runtime]:
    """The runtimes by name; `datasheet` adds nothing."""
    table = tomllib.loads(resources.files("foretell.roofline").joinpath("runtimes.toml").read_text("utf-8"))
    return {DATASHEET.name: DATASHEET} | {name: _runtime(name, raw) for name, raw in table.items()}


def _runtime(name: str, raw: Mapping[str, str | float]) -> Runtime:
    figures: dict[str, Any] = {
        f.name: float(raw[f.name]) * (_SECONDS_PER_UNIT if f.name in _TIMES else 1.0)
        for f in fields(Runtime)
        if f.name in (*_SHARES, *_TIMES, "overlap", "convert", "error") and f.name in raw
    }
    flags = {flag: bool(raw.get(flag, False)) for flag in _FLAGS}
    return Runtime(name, str(raw["title"]), str(raw["source"]), **flags, **figures)


def find_runtime(name: str) -> Runtime:
    """A runtime by name.

    Raises:
        ValueError: unknown name.
    """
    return look_up(known_runtimes(), name, "runtime")


def runtime_figures(runtime: Runtime) -> dict[str, float]:
    """The figures of a runtime in the units of runtimes.toml, without those that add nothing."""
    plain = Runtime("")
    return {
        name: getattr(runtime, name) / (_SECONDS_PER_UNIT if name in _TIMES else 1.0)
        for name in (*_SHARES, "overlap", "convert", *_TIMES, "error")
        if getattr(runtime, name) != getattr(plain, name)
    }
