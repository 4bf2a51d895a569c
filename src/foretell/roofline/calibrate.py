"""Calibration of a hardware entry: rates and overheads fitted to timed passes of small random models.

Stream bandwidth is timed by itself. The rest are the terms of the cost model and come from one non-negative
least-squares fit: the time of a pass = start + operations × overhead + weights × c(rows) + attention OPs × a(rows) +
bytes of keys and values × k + logits × g. The networks differ in width, depth, vocabulary and context so that the terms
can be told apart, and none has the shape of a model that predictions are later checked on.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.model.config.model import ModelConfig
from foretell.roofline.analysis import AnalyzedModel, predict_seconds
from foretell.roofline.cost import scalar
from foretell.roofline.formats import NumberFormat, compute_class, parse_format
from foretell.roofline.hardware import FORMAT_CLASSES, Hardware
from foretell.roofline.linear_cost import Array
from foretell.roofline.runtime import Runtime
from foretell.roofline.workload import Phase, SequenceGroup, Workload, phase_extents

PassTimer = Callable[[int, int], float]
"""Seconds of one pass over `tokens` new tokens after `context` cached ones."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 2048)
CHECK_CONTEXTS = (64, 512, 2048)
_CACHE_BYTES = 2.0
"""Of an element of keys and values."""
ROUNDS = 2
"""Rounds of timing each probe model."""
MAX_SPREAD = 0.1
"""Median spread of the rounds above which the machine changed too much to be calibrated."""
MIN_SECONDS = 1e-18
"""Lower bound of fitted seconds, which may be zero."""
OUTLIER, ITERATIONS = 0.05, 12
"""Relative error beyond which a timed pass gets less weight, and iterations of the robust fit."""


def _probe(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> ModelConfig:
    return ModelConfig("llama", vocab, hidden, layers, heads, kv_heads, head_dim, ffn, context=4096)


PROBES: tuple[ModelConfig, ...] = (
    _probe(512, 24, 8, 4, 64, 1536, 8192),
    _probe(1024, 6, 16, 4, 64, 4096, 16384),
    _probe(256, 64, 4, 2, 64, 768, 1024),
    _probe(768, 12, 12, 4, 64, 2048, 32768),
)
"""Deep and narrow; shallow and wide; very deep, for the overhead per operation; with many logits. None is so small that
its weights stay in the caches of a processor.
"""


@dataclass(frozen=True)
class PassTiming:
    """The measured time of a pass: the fastest of several rounds; `spread`: of the slowest over it, relative."""

    config: ModelConfig
    tokens: int
    context: int
    seconds: float
    spread: float = 0.0


def time_probes(timers: Iterable[tuple[ModelConfig, PassTimer]]) -> list[PassTiming]:
    """Time every probe model at all ROWS and CONTEXTS, in several rounds, so that a change of the machine is seen."""
    timings = list[PassTiming]()
    for config, timed in timers:
        sizes = [(n, s) for s in CONTEXTS for n in ROWS]
        rounds = [[timed(n, s) for n, s in sizes] for _ in range(ROUNDS)]
        for (n, s), times in zip(sizes, zip(*rounds, strict=True), strict=True):
            timings.append(PassTiming(config, n, s, min(times), max(times) / min(times) - 1))
    return timings


def timing_spread(timings: Sequence[PassTiming]) -> float:
    """Median spread of the rounds."""
    return statistics.median(t.spread for t in timings)


def pass_workload(weight_format: NumberFormat, tokens: int, context: int) -> Workload:
    """The workload of a timed pass; the KV cache has 16 bits, or 32 where the weights have 32."""
    kv_format = weight_format if weight_format.bits > 16 else parse_format("16")
    return Workload(
        "verify", 1, context, tokens, weights=weight_format, activations=weight_format, kv=kv_format, fusion="full"
    )


@dataclass(frozen=True)
class CalibrationFit:
    """Fitted costs in seconds: per pass, per operation, per byte of keys and values, per logit, and, at each of ROWS,
    per weight element and attention OP.

    median_error: relative, over the timed passes.
    """

    pass_overhead: float
    op_overhead: float
    cache_read: float
    logit_time: float
    seconds_per_weight: tuple[float, ...]
    seconds_per_attention_op: tuple[float, ...]
    median_error: float


@dataclass(frozen=True)
class CostTerms:
    """Terms of the cost model of a pass: number of operations, weight elements multiplied, attention OPs, elements of
    keys and values read and written, logits.
    """

    ops: float
    weights: float
    attention: float
    cache: float
    logits: float


def cost_terms(config: ModelConfig, tokens: int, context: int) -> CostTerms:
    """Terms of the cost model of a pass over `tokens` tokens after `context`."""
    graph = AnalyzedModel("probe", config).graph("full", False)
    phase = Phase((SequenceGroup(1.0, float(tokens), float(context)),), float(tokens), 1.0, False)
    count = weights = attention = cache = logits = 0.0
    for group in graph.groups:
        extents = phase_extents(graph, group, phase)
        for op in group.ops:
            if op.kind != "lookup" and not op.is_collective:
                count += group.count
            weights += group.count * scalar(op.weights.evaluate(extents)) if op.kind == "matmul" else 0.0
            if op.kind == "attention":
                attention += group.count * scalar(op.work.evaluate(extents))
                cache += group.count * scalar(op.kv_read.evaluate(extents) + op.kv_write.evaluate(extents))
            if op.kind == "matmul" and op.is_vocabulary:
                logits += scalar(op.write.evaluate(extents))
    return CostTerms(count, weights, attention, cache, logits)


def fit_costs(timings: Sequence[PassTiming]) -> CalibrationFit:
    """Fit the cost terms to timed passes; errors are relative, so that short passes count as much as long ones.

    Raises:
        ValueError: too few samples.
    """
    if len(timings) < 2 * len(ROWS) + 4:
        raise ValueError(f"calibration needs at least {2 * len(ROWS) + 4} timed passes, found {len(timings)}")
    table = np.zeros((len(timings), 4 + 2 * len(ROWS)))
    for i, s in enumerate(timings):
        terms = cost_terms(s.config, s.tokens, s.context)
        at = 4 + ROWS.index(s.tokens)
        table[i, :4] = 1.0, terms.ops, terms.cache * _CACHE_BYTES, terms.logits
        table[i, at], table[i, at + len(ROWS)] = terms.weights, terms.attention
        table[i] /= s.seconds
    scale = table.max(0)
    scale[scale == 0] = 1.0
    coefficients = robust_nnls(table / scale) / scale
    misfit = float(np.median(np.abs(table @ coefficients - 1)))
    per_weight, per_attention_op = coefficients[4 : 4 + len(ROWS)], coefficients[4 + len(ROWS) :]
    per_pass, per_op, per_byte, per_logit = map(float, coefficients[:4])
    return CalibrationFit(per_pass, per_op, per_byte, per_logit, tuple(per_weight), tuple(per_attention_op), misfit)


def robust_nnls(table: Array) -> Array:
    """Non-negative least squares with lower weight for outliers, such as interrupted passes (Huber, by reweighting)."""
    # Half a second of import that only calibration needs.
    from scipy.optimize import nnls

    weights = np.ones(len(table))
    coefficients: Array = np.zeros(table.shape[1])
    for _ in range(ITERATIONS):
        coefficients = np.asarray(nnls(table * weights[:, None], weights)[0])
        weights = 1 / np.sqrt(np.maximum(1.0, np.abs(table @ coefficients - 1) / OUTLIER))
    return coefficients


def calibrated_hardware(
    name: str, title: str, source: str, stream: float, capacity: float, fits: Mapping[str, CalibrationFit]
) -> Hardware:
    """A hardware entry from one fit per weight format.

    stream: measured bandwidth in bytes/s; a kernel that reads weights faster raises it.

    Raises:
        ValueError: no format was measured.
    """
    if not fits:
        raise ValueError("nothing was measured: name at least one --dtype")
    rates, peaks, bandwidth = {}, {}, stream
    for text, f in fits.items():
        form = parse_format(text)
        kind = compute_class(form, form)
        curve = tuple((float(n), 2 * n / max(c, MIN_SECONDS)) for n, c in zip(ROWS, f.seconds_per_weight, strict=True))
        rates[kind], peaks[kind] = curve, max(rate for _, rate in curve)
        bandwidth = max(bandwidth, form.bytes / max(f.seconds_per_weight[0], MIN_SECONDS))
    peaks.setdefault("fp16", max(peaks.values()))
    chosen = fits.get("16") or next(iter(fits.values()))
    attention_rates = tuple(
        (float(n), 1 / a if a > 0 else max(peaks.values()))
        for n, a in zip(ROWS, chosen.seconds_per_attention_op, strict=True)
    )
    return Hardware(
        name, title, bandwidth, peaks, source, capacity, matmul_rates=rates, attention_rates=attention_rates,
        runtime=Runtime(
            "measured",
            **{
                name: statistics.median(getattr(f, name) for f in fits.values())
                for name in ("op_overhead", "pass_overhead", "cache_read", "logit_time")
            },
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class PredictionCheck:
    """Predicted and measured seconds of a pass."""

    tokens: int
    context: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured time."""
        return self.predicted / self.measured - 1


def check_predictions(
    model: AnalyzedModel,
    device: Hardware,
    weight_format: NumberFormat,
    timer: PassTimer,
) -> list[PredictionCheck]:
    """Predicted and measured pass times of a model at 1 to 64 tokens and several contexts."""
    sizes = [(s, n) for s in CHECK_CONTEXTS for n in ROWS]
    return [
        PredictionCheck(n, s, predict_seconds(model, device, pass_workload(weight_format, n, s)), timer(n, s))
        for s, n in sizes
    ]


def to_toml(device: Hardware) -> dict[str, Any]:
    """The entry of a hardware file that `hardware_from_table` reads back."""
    entry: dict[str, Any] = {"title": device.title, "source": device.source, "bandwidth": device.bandwidth / 1e9}
    if device.capacity:
        entry["capacity"] = device.capacity / 1e9
    entry |= {c: device.peaks[c] / 1e12 for c in FORMAT_CLASSES if c in device.peaks}
    figures = {
        "vector": device.vector_rate / 1e12,
        "link": device.link_bandwidth / 1e9,
        "host": device.host_bandwidth / 1e9,
    }
    entry |= {key: figure for key, figure in figures.items() if figure}
    entry |= {"kind": device.kind} if device.kind != "gpu" else {}
    entry |= {
        "overhead_us": device.runtime.op_overhead * 1e6,
        "start_us": device.runtime.pass_overhead * 1e6,
        "logit_ns": device.runtime.logit_time * 1e9,
    }
    entry |= {"cache": 1e-9 / device.runtime.cache_read} if device.runtime.cache_read else {}
    entry["attend"] = [[n, rate / 1e12] for n, rate in device.attention_rates]
    entry["rates"] = {c: [[n, rate / 1e12] for n, rate in curve] for c, curve in device.matmul_rates.items()}
    if device.drafting:
        entry["drafting"] = {
            model: {method: [x * 1e6 for x in figures] for method, figures in methods.items()}
            for model, methods in device.drafting.items()
        }
    return entry


def add_to_file(path: Path, device: Hardware, others: Mapping[str, Hardware]) -> None:
    """Write a hardware file with the device and those it already has."""
    entries = {name: to_toml(h) for name, h in others.items()} | {device.name: to_toml(device)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'["{name}"]\n{_toml_lines(entry)}\n' for name, entry in entries.items()), "utf-8")


def _toml_lines(entry: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_toml_value(v)}\n" for key, v in entry.items())


def _toml_value(v: Any) -> str:
    if isinstance(v, str):
        return '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(v, Mapping):
        return "{" + ", ".join(f'"{k}" = {_toml_value(x)}' for k, x in v.items()) + "}"
    if isinstance(v, list):
        return "[" + ", ".join(_toml_value(x) for x in v) + "]"
    return repr(float(v))
