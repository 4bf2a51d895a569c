"""This machine as hardware: rates and overheads fitted to timed passes of small random networks.

Stream bandwidth is timed by itself. The rest are the terms of the cost model and come from one non-negative
least-squares fit: the time of a pass = start + operations × overhead + weights × c(rows) + attention OPs × a(rows). The
networks differ in width, depth and context so that the terms can be told apart, and none has the shape of a model that
predictions are later checked on.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.model.config import ModelConfig
from foretell.roofline.analysis import Model, seconds
from foretell.roofline.cost import value
from foretell.roofline.formats import Format, multiplied_as, parse
from foretell.roofline.hardware import CLASSES, Hardware
from foretell.roofline.linear_cost import Array
from foretell.roofline.workload import Group, Phase, Setting, extents

Measure = Callable[[int, int], float]
"""Seconds of one pass over `tokens` new tokens after `context` cached ones."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 1024)
CHECK_CONTEXTS = (64, 512, 2048)


def _probe(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> ModelConfig:
    return ModelConfig("llama", vocab, hidden, layers, heads, kv_heads, head_dim, ffn, context=4096)


PROBES: tuple[ModelConfig, ...] = (
    _probe(512, 24, 8, 4, 64, 1536, 8192),
    _probe(1024, 6, 16, 4, 64, 4096, 16384),
    _probe(512, 2, 8, 2, 64, 1024, 1024),
)
"""Deep and narrow, shallow and wide, and next to nothing: what they cost apart is overhead, weights and start."""


@dataclass(frozen=True)
class Sample:
    """A timed pass."""

    config: ModelConfig
    tokens: int
    context: int
    seconds: float


def sample(measures: Iterable[tuple[ModelConfig, Measure]]) -> list[Sample]:
    """Time every probe at all widths and contexts."""
    return [Sample(c, n, s, timed(n, s)) for c, timed in measures for s in CONTEXTS for n in ROWS]


def setting(form: Format, tokens: int, context: int) -> Setting:
    """The setting that a timed pass is: weights and activations in a format, the cache in 16 bits (32 where the weights
    have 32).
    """
    kept = form if form.bits > 16 else parse("16")
    return Setting("verify", 1, context, tokens, weights=form, activations=form, kv=kept, fusion="full")


@dataclass(frozen=True)
class Fit:
    """Seconds per pass, per operation, and per weight element and attention OP at each of ROWS; and the median relative
    misfit.
    """

    start: float
    overhead: float
    weight: tuple[float, ...]
    attention: tuple[float, ...]
    misfit: float


def terms(config: ModelConfig, tokens: int, context: int) -> tuple[float, float, float]:
    """Operations with overhead, weight elements multiplied, and attention OPs of a pass."""
    network = Model("probe", config).network("full", False)
    phase = Phase((Group(1.0, float(tokens), float(context)),), float(tokens), 1.0, False)
    count = weights = attention = 0.0
    for block in network.blocks:
        at = extents(network, block, phase)
        for op in block.ops:
            if op.kind not in ("lookup", "reduce", "gather"):
                count += block.count
            weights += block.count * value(op.weights.at(at)) if op.kind == "matmul" else 0.0
            attention += block.count * value(op.work.at(at)) if op.kind == "attend" else 0.0
    return count, weights, attention


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit the terms to timed passes, each weighted by its own time so that short passes count as much as long ones.

    Raises:
        ValueError: too few samples.
    """
    if len(samples) < 2 * len(ROWS) + 2:
        raise ValueError(f"calibration needs at least {2 * len(ROWS) + 2} timed passes, found {len(samples)}")
    table = np.zeros((len(samples), 2 + 2 * len(ROWS)))
    for i, s in enumerate(samples):
        count, weights, attention = terms(s.config, s.tokens, s.context)
        at = ROWS.index(s.tokens)
        table[i, 0], table[i, 1], table[i, 2 + at], table[i, 2 + len(ROWS) + at] = 1.0, count, weights, attention
        table[i] /= s.seconds
    scale = table.max(0)
    scale[scale == 0] = 1.0
    found = _robust(table / scale) / scale
    misfit = float(np.median(np.abs(table @ found - 1)))
    return Fit(found[0], found[1], tuple(found[2 : 2 + len(ROWS)]), tuple(found[2 + len(ROWS) :]), misfit)


def _robust(table: Array) -> Array:
    """Non-negative least squares with rows far off given less say (a pass that something interrupted)."""
    # Half a second of import that only calibration needs.
    from scipy.optimize import nnls

    say = np.ones(len(table))
    found: Array = np.zeros(table.shape[1])
    for _ in range(12):
        found = np.asarray(nnls(table * say[:, None], say)[0])
        say = 1 / np.sqrt(np.maximum(1.0, np.abs(table @ found - 1) / 0.05))
    return found


def hardware(name: str, title: str, source: str, stream: float, capacity: float, fits: Mapping[str, Fit]) -> Hardware:
    """The machine as hardware: per weight format a fit. Bandwidth is the stream's, or more where a kernel reached more.

    Raises:
        ValueError: no format was measured.
    """
    if not fits:
        raise ValueError("nothing was measured: name at least one --dtype")
    rates, peaks, bandwidth = {}, {}, stream
    for text, f in fits.items():
        form = parse(text)
        kind = multiplied_as(form, form)
        curve = tuple((float(n), 2 * n / max(c, 1e-18)) for n, c in zip(ROWS, f.weight, strict=True))
        rates[kind], peaks[kind] = curve, max(rate for _, rate in curve)
        bandwidth = max(bandwidth, form.bytes / max(f.weight[0], 1e-18))
    peaks.setdefault("fp16", max(peaks.values()))
    chosen = fits.get("16") or next(iter(fits.values()))
    attend = tuple(
        (float(n), 1 / a if a > 0 else max(peaks.values())) for n, a in zip(ROWS, chosen.attention, strict=True)
    )
    return Hardware(
        name, title, bandwidth, peaks, source, capacity, overhead=statistics.median(f.overhead for f in fits.values()),
        start=statistics.median(f.start for f in fits.values()), rates=rates, attend=attend,
    )  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A pass predicted and measured."""

    tokens: int
    context: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured time."""
        return self.predicted / self.measured - 1


def check(
    model: Model, device: Hardware, form: Format, measure: Measure, contexts: Sequence[int] = CHECK_CONTEXTS
) -> list[Check]:
    """Predicted and measured pass times of a model at 1 to 64 tokens and several contexts."""
    asked = [(s, n) for s in contexts for n in ROWS]
    return [Check(n, s, seconds(model, device, setting(form, n, s)), measure(n, s)) for s, n in asked]


def to_toml(device: Hardware) -> dict[str, Any]:
    """The entry of a hardware file that `from_table` reads back."""
    entry: dict[str, Any] = {"title": device.title, "source": device.source, "bandwidth": device.bandwidth / 1e9}
    if device.capacity:
        entry["capacity"] = device.capacity / 1e9
    entry |= {c: device.peaks[c] / 1e12 for c in CLASSES if c in device.peaks}
    entry |= {"overhead_us": device.overhead * 1e6, "start_us": device.start * 1e6}
    entry["attend"] = [[n, rate / 1e12] for n, rate in device.attend]
    entry["rates"] = {c: [[n, rate / 1e12] for n, rate in curve] for c, curve in device.rates.items()}
    return entry


def add_to_file(path: Path, device: Hardware, others: Mapping[str, Hardware]) -> None:
    """Write the device into a hardware file beside those it holds already."""
    entries = {name: to_toml(h) for name, h in others.items()} | {device.name: to_toml(device)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'["{name}"]\n{_lines(entry)}\n' for name, entry in entries.items()), "utf-8")


def _lines(entry: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(v)}\n" for key, v in entry.items())


def _value(v: Any) -> str:
    if isinstance(v, str):
        return '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(v, Mapping):
        return "{" + ", ".join(f"{k} = {_value(x)}" for k, x in v.items()) + "}"
    if isinstance(v, list):
        return "[" + ", ".join(_value(x) for x in v) + "]"
    return repr(float(v))
