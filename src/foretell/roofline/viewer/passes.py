"""The answer about a pass: headline, totals, memory, the operation graph, the roofline, and the curves over sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foretell.roofline.analysis import Analysis, analyse
from foretell.roofline.cost import CostBreakdown, OpCost, scalar
from foretell.roofline.offload import OffloadResult, PlacedOp, apply_offload, place_op, resident_memory
from foretell.roofline.records import op_record, to_csv
from foretell.roofline.report import format_number, format_seconds, memory_warning
from foretell.roofline.sweep import sweep
from foretell.roofline.viewer.charts import Axes, Curve, Point, chart, roofline
from foretell.roofline.viewer.settings import Question, Setting
from foretell.roofline.workload import LIMITS

Row = list[str]
"""A label, the term of the glossary that explains it, and the figure of each setting."""


@dataclass(frozen=True)
class Answer:
    """The analysis of a question, with what offloading changes."""

    question: Question

    @cached_property
    def analysis(self) -> Analysis:
        """The pass with everything on the device."""
        return analyse(self.question.model, self.question.hardware, self.question.workload)

    @cached_property
    def offload(self) -> OffloadResult | None:
        """The pass under offloading."""
        placed = self.question.offload
        return None if placed is None else apply_offload(self.analysis, placed)

    @cached_property
    def ops(self) -> dict[str, tuple[OpCost, PlacedOp]]:
        """The operations by key, and what each comes to."""
        return {key_of(c): (c, self._placed(c)) for c in self.analysis.op_costs}

    def _placed(self, c: OpCost) -> PlacedOp:
        if self.question.offload is None:
            return PlacedOp(scalar(c.cost.seconds), 0.0, c.bound)
        return place_op(c, self.question.offload)

    @property
    def seconds(self) -> float:
        """Time of the workload."""
        return self.offload.seconds if self.offload else self.analysis.seconds

    @property
    def resident(self) -> float:
        """Bytes on a device."""
        return self.offload.resident if self.offload else scalar(self.analysis.memory.total)


def key_of(c: OpCost) -> str:
    """The name of an operation in a graph."""
    return f"{c.group}/{c.op.name}"


def pass_answer(answers: Sequence[Answer], settings: Sequence[Setting]) -> dict[str, Any]:
    """What the page shows of a pass; of two answers the second is the compared one."""
    first, a = answers[0], answers[0].analysis
    warning = memory_warning(a, first.offload)
    return {
        "warning": f"{warning}." if warning else "",
        "headline": _headline(first),
        "pair": _pair(answers, settings) if len(answers) > 1 else None,
        "totals": _totals(answers),
        "memory": _memory(first),
        "lines": [_line(answers, key) for key in first.ops],
        "groups": _groups(first),
        "roof": roofline([x.analysis for x in answers], key_of),
        "csv": to_csv([op_record(c) for c in a.op_costs]),
        "name": f"{a.model.name}-{a.workload.stage}",
    }


def _rate_unit(stage: str) -> str:
    return "prompt tokens/s" if stage == "prefill" else "tokens/s"


def _headline(answer: Answer) -> list[Row]:
    """Figures and their units."""
    a = answer.analysis
    per = {"chat": "per chat", "chunked": "per prompt"}.get(a.workload.stage, "per pass")
    return [
        [format_seconds(answer.seconds), f"{per}, offloaded" if answer.offload else per],
        [format_number(a.tokens / answer.seconds), _rate_unit(a.workload.stage)],
        [format_number(scalar(a.total.ops)), "OPs"],
        [format_number(scalar(a.total.bytes), "B"), "moved"],
    ]


def _rows(
    answers: Sequence[Any], rows: Sequence[tuple[str, str, Callable[[Any], str]]], kept: Sequence[str] = ()
) -> list[Row]:
    """Rows of what each function says of the answers; one without figures is left out, unless it is `kept`."""
    table = [[label, term, *(text(x) for x in answers)] for label, term, text in rows]
    return [row for row in table if any(figure not in ("", "–") for figure in row[2:]) or row[0] in kept]


def _totals(answers: Sequence[Answer]) -> list[Row]:
    def of_total(text: Callable[[CostBreakdown], str]) -> Callable[[Answer], str]:
        return lambda x: text(x.analysis.total)

    def largest(size: int | None) -> str:
        return "–" if size is None else f"{size:,}"

    return _rows(
        answers,
        [
            ("time", "", lambda x: format_seconds(x.seconds)),
            ("OPs", "ops", of_total(lambda t: format_number(scalar(t.ops)))),
            ("weights read", "", of_total(lambda t: format_number(scalar(t.weights), "B"))),
            ("activations moved", "", of_total(lambda t: format_number(scalar(t.read) + scalar(t.write), "B"))),
            ("cache moved", "cache", of_total(lambda t: format_number(scalar(t.kv_read) + scalar(t.kv_write), "B"))),
            ("between devices", "devices", of_total(lambda t: _bytes_or_dash(scalar(t.link)))),
            ("fetched", "offload", lambda x: format_number(x.offload.fetched, "B") if x.offload else "–"),
            ("bound by", "bound", lambda x: x.offload.bound if x.offload else "–"),
            ("largest batch", "largestBatch", lambda x: largest((x.offload or x.analysis).largest_batch)),
            ("longest context", "context", lambda x: largest((x.offload or x.analysis).longest_context)),
        ],
        ("largest batch", "longest context"),
    )


def _bytes_or_dash(count: float) -> str:
    return format_number(count, "B") if count else "–"


def _memory(answer: Answer) -> dict[str, Any]:
    """The bar of the memory: its parts as shares of its length, and where the capacity lies."""
    memory, capacity = answer.analysis.memory, answer.question.hardware.capacity
    if answer.question.offload is not None:
        memory = resident_memory(memory, answer.question.offload.offload)
    length = max(answer.resident, capacity or 0.0) or 1.0
    parts = {"weights": scalar(memory.weights), "cache": scalar(memory.kv), "activations": scalar(memory.activations)}
    of = f" of {format_number(capacity, 'B')}" if capacity else ""
    return {
        "parts": [[name, format_number(size, "B"), size / length] for name, size in parts.items()],
        "capacity": capacity / length if capacity else None,
        "note": of.strip() or "capacity not stated",
        "label": f"memory {format_number(answer.resident, 'B')}{of}",
    }


def _line(answers: Sequence[Answer], key: str) -> dict[str, Any]:
    """An operation: what its node says, and the rows of its table."""
    (c, op), total = answers[0].ops[key], answers[0].seconds
    others = [x.ops[key] for x in answers[1:] if key in x.ops]
    versus = [f"{_short(o[1].seconds / op.seconds, 2)}×" for o in others if op.seconds]
    took = format_seconds(op.seconds)
    moved = format_number(scalar(c.cost.link if c.bound == "link" else c.cost.bytes), "B")
    label = f"{c.op.name}, {op.bound} bound, {took}, {format_number(scalar(c.cost.ops))} OPs, {moved}"
    return {
        "key": key, "name": c.op.name, "bound": op.bound, "share": op.seconds * c.count / total,
        "title": f"{c.op.name} · {c.group} × {_short(c.count, 4)}", "took": took, "moved": moved,
        "versus": versus[0] if versus else "",
        "label": label + (f", {versus[0]} as fast as compared" if versus else ""),
        "rows": _rows([answers[0].ops[key], *others], _OPERATION, ("shape",)),
    }  # fmt: skip


def _of_cost(name: str) -> Callable[[tuple[OpCost, PlacedOp]], str]:
    return lambda x: format_number(scalar(getattr(x[0].cost, name)), "" if name == "ops" else "B")


_OPERATION: list[tuple[str, str, Callable[[tuple[OpCost, PlacedOp]], str]]] = [
    ("shape", "", lambda x: x[0].op.shape),
    ("OPs", "ops", _of_cost("ops")),
    ("bytes", "", _of_cost("bytes")),
    ("weights", "", _of_cost("weights")),
    ("read", "", _of_cost("read")),
    ("written", "", _of_cost("write")),
    ("cache read", "cache", _of_cost("kv_read")),
    ("cache written", "cache", _of_cost("kv_write")),
    ("between devices", "devices", lambda x: _bytes_or_dash(scalar(x[0].cost.link))),
    ("intensity", "intensity", lambda x: f"{_short(x[0].intensity, 4)} OPs/B"),
    ("attainable", "attainable", lambda x: format_number(x[0].attainable, "OP/s")),
    ("time in one layer", "", lambda x: format_seconds(x[1].seconds)),
    ("bound by", "bound", lambda x: x[1].bound),
]


def _short(number: float, digits: int) -> str:
    """A number of few digits."""
    return f"{float(f'{number:.{digits}g}'):g}"


def _groups(answer: Answer) -> list[dict[str, Any]]:
    """The layer groups in order: keys of operations in rows, each below the last of its inputs, and their inputs."""
    a, groups = answer.analysis, list[dict[str, Any]]()
    for name in dict.fromkeys(c.group for c in a.op_costs):
        costs = [c for c in a.op_costs if c.group == name]
        framed = costs[0].count != 1 or any(c.op.name == "attn_norm" for c in costs)
        inputs = _inputs(answer, name)
        groups.append(
            {
                "title": f"{name} × {_short(costs[0].count, 4)}" if framed else "",
                "rows": _in_rows([c.op.name for c in costs], inputs) if framed else [[c.op.name for c in costs]],
                "inputs": inputs,
                "name": name,
            }
        )
    return groups


def _inputs(answer: Answer, group: str) -> dict[str, list[str]]:
    """The operations that each one reads; those that only move data between devices are passed over on one device."""
    workload, inputs = answer.question.workload, dict[str, list[str]]()
    passed: dict[str, str] = {}
    graphs = (answer.question.model.graph(workload.fusion, prefill, workload.square) for prefill in (True, False))
    for op in (op for graph in graphs for g in graph.groups if g.name == group for op in g.ops):
        sources = [passed.get(name, name) for name in op.inputs]
        if workload.devices == 1 and op.is_collective:
            passed[op.name] = sources[0]
        inputs.setdefault(op.name, sources)
    return inputs


def _in_rows(names: Sequence[str], inputs: dict[str, list[str]]) -> list[list[str]]:
    depth: dict[str, int] = {}
    for name in names:
        depth[name] = 1 + max((depth[i] for i in inputs.get(name, ()) if i in depth), default=-1)
    return [[name for name in names if depth[name] == row] for row in sorted(set(depth.values()))]


def _pair(answers: Sequence[Answer], settings: Sequence[Setting]) -> dict[str, Any]:
    """Both settings in words, what differs marked, and the ratio of their speeds."""
    mine, theirs = (describe(x.question, s) for x, s in zip(answers, settings, strict=True))
    ratio = _short(answers[1].seconds / answers[0].seconds, 3)
    return {
        "mine": [[x, x != y] for x, y in zip(mine, theirs, strict=True) if x],
        "theirs": [[y, x != y] for x, y in zip(mine, theirs, strict=True) if y],
        "ratio": f"This setting is {ratio}× as fast as the compared one.",
    }


def describe(question: Question, s: Setting) -> list[str]:
    """What the figures of a pass depend on, in words; an empty text where a part does not apply."""
    w, outside = question.workload, question.offload
    own = [f"{s[name]} {unit}" for name, unit in (("bandwidth", "GB/s"), ("peak", "TOP/s"), ("capacity", "GB"))
           if str(s[name]).strip()]  # fmt: skip
    sizes = {
        "verify": f"{w.tokens} tokens verified",
        "chunked": f"chunks of {w.chunk}",
        "chat": f"{w.generate} generated",
    }
    offloaded = ""
    if outside is not None:
        o = outside.offload
        parts = [f"{part:g} of {name}" for part, name in ((o.weights, "weights"), (o.kv, "cache")) if part]
        offloaded = f"offloaded: {', '.join(parts)} in {o.tier.name}, {o.compute} computes"
    return [
        question.model.name,
        ", ".join([question.hardware.title, *own]),
        w.stage,
        f"batch {w.batch}",
        f"{'prompt' if w.stage in ('prefill', 'chunked', 'chat') else 'context'} {w.context}",
        sizes.get(w.stage, ""),
        f"weights {w.weights.name}",
        f"activations {w.activations.name}",
        f"cache {w.kv.name}",
        f"head {w.head.name}" if w.head else "",
        f"fusion {w.fusion}",
        "1 device" if w.devices == 1 else f"{w.devices} devices",
        f"runtime {s['runtime']}",
        offloaded,
        "full square" if w.square else "",
    ]


MOST_PASSES = 1_000_000
"""Passes that the curve of a sweep evaluates; where each point has many, it has fewer points."""


def _powers(low: int, high: int, step: float, passes: Callable[[float], float]) -> tuple[float, ...]:
    values = sorted({float(round(2 ** (low + step * i))) for i in range(int((high - low) / step) + 1)})
    stride = max(1, -int(-len(values) * passes(values[-1]) // MOST_PASSES))
    return tuple(values[::stride])


def sweeps_answer(answers: Sequence[Answer]) -> dict[str, Any]:
    """Throughput by batch, and time and memory by length; of two answers the second is the compared one."""
    first, w = answers[0], answers[0].question.workload

    def passes(context: float) -> float:
        return {"chat": float(w.generate), "chunked": context / w.chunk}.get(w.stage, 1.0)

    batches = _powers(0, 8, 0.25, lambda _: passes(w.context))
    lengths = _powers(4, 17, 0.5, passes)
    capacity = first.question.hardware.capacity
    by_batch = [_sweep(x, "batch", batches) for x in answers]
    by_length = [_sweep(x, "context", lengths) for x in answers]

    def curves(swept: Sequence[_Swept], y: str) -> list[Curve]:
        labels = ("this", "compared") if len(answers) > 1 else ("",)
        return [Curve(s.points(y), label, i > 0) for i, (s, label) in enumerate(zip(swept, labels, strict=True))]

    here = w.batch if w.batch <= batches[-1] else None
    length = w.context if lengths[0] <= w.context <= lengths[-1] else None
    return {
        "bybatch": chart(
            curves(by_batch, "rate"),
            Axes(
                "batch",
                _rate_unit(w.stage),
                format_number,
                None if here is None else (here, first.analysis.tokens / first.seconds),
            ),
        ),
        "bylength": chart(
            curves(by_length, "seconds"),
            Axes(
                "tokens",
                "time per chat" if w.stage == "chat" else "time",
                lambda v: format_seconds(v) if v else "0",
                None if length is None else (length, first.seconds),
            ),
        ),
        "memorybylength": chart(
            curves(by_length, "memory"),
            Axes(
                "tokens",
                "memory, capacity dashed" if capacity else "memory",
                lambda v: format_number(v, "B"),
                None if length is None else (length, first.resident),
                capacity,
            ),
        ),
    }


@dataclass(frozen=True)
class _Swept:
    """Figures over one size: seconds, memory in bytes, tokens per second, and what fits."""

    values: Sequence[float]
    figures: dict[str, np.ndarray[Any, np.dtype[np.float64]]]
    capacity: float | None

    def points(self, y: str) -> list[Point]:
        memory = self.figures["memory"]
        fits = np.full(len(memory), True) if self.capacity is None else memory <= self.capacity
        return [(x, float(v), bool(f)) for x, v, f in zip(self.values, self.figures[y], fits, strict=True)]


def _sweep(answer: Answer, axis: str, values: tuple[float, ...]) -> _Swept:
    q = answer.question
    values = tuple(v for v in values if v <= LIMITS[axis])
    result = sweep(q.model, q.hardware, q.workload, {axis: values}, q.offload)
    figures = {"seconds": result.seconds, "memory": result.memory, "rate": result.tokens / result.seconds}
    return _Swept(values, figures, q.hardware.capacity)
