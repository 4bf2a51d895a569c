"""Many settings at once: the product of several ranges, priced as arrays."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.roofline.analysis import Model, check
from foretell.roofline.cost import Cost, lines, rates, total
from foretell.roofline.formats import parse
from foretell.roofline.hardware import Hardware, changed
from foretell.roofline.linear_cost import Array, Number
from foretell.roofline.memory import memory
from foretell.roofline.names import look_up
from foretell.roofline.workload import LIMITS, Setting, Sizes, phases

LENGTHS = ("batch", "context", "tokens", "chunk", "generate")
FORMATS = ("weights", "activations", "kv")
RATES = ("bandwidth", "peak")
AXES = (*LENGTHS, *FORMATS, *RATES, "devices")
MOST = 200_000
WORK = 1_000_000
"""Passes priced in one go, to bound memory."""

Axis = tuple[float, ...] | tuple[str, ...]


def parse_axis(text: str) -> tuple[str, Axis]:
    """Read `batch=1:256`, `batch=1:256:5` (step), `context=128:65536*2` (factor), or `weights=16,8,4`.

    bandwidth is in GB/s and peak in 1e12 OPs/s. Raises:
        ValueError: unknown axis, no values, or values that make no sense.
    """
    name, equals, values = text.partition("=")
    if not equals:
        raise ValueError(f"a sweep looks like batch=1:256 or weights=16,8,4; found {text!r}")
    name = look_up({a: a for a in AXES}, name, "sweep axis")
    if name in FORMATS:
        formats = tuple(parse(v).name for v in values.split(",") if v.strip())
        if not formats:
            raise ValueError(f"the sweep {text!r} is empty")
        return name, formats
    numbers = _numbers(values, text)
    if name in RATES:
        if min(numbers) <= 0:
            raise ValueError(f"{name} must be positive, found {min(numbers):g} in the sweep {text!r}")
        return name, numbers
    for number in numbers:
        least = 0 if name == "context" else 1
        if number != int(number) or not least <= number <= LIMITS[name]:
            raise ValueError(
                f"{name} must be a whole number between {least} and {LIMITS[name]}, found {number:g} in {text!r}"
            )
    return name, numbers


def _numbers(values: str, text: str) -> tuple[float, ...]:
    match = re.fullmatch(r"\s*([-+.\deE]+):([-+.\deE]+)(?:([:*])([-+.\deE]+))?\s*", values)
    try:
        if not match:
            numbers = tuple(float(v) for v in values.split(",") if v.strip())
        else:
            low, high, step = float(match[1]), float(match[2]), float(match[4] or 1)
            if match[3] == "*":
                numbers = _growing(low, high, step, text)
            else:
                count = (high - low) / step if step else np.inf
                if not count < MOST:
                    raise ValueError(f"the sweep {text!r} is too large: at most {MOST} settings")
                numbers = (
                    tuple(float(v) for v in low + step * np.arange(np.floor(count + 1e-9) + 1)) if count >= 0 else ()
                )
    except ValueError as error:
        raise (
            error if "sweep" in str(error) else ValueError(f"the sweep {text!r} has a value that is no number")
        ) from None
    if not numbers:
        raise ValueError(f"the sweep {text!r} is empty")
    if not all(np.isfinite(numbers)):
        raise ValueError(f"the sweep {text!r} has a value that is no number")
    return numbers


def _growing(low: float, high: float, factor: float, text: str) -> tuple[float, ...]:
    if factor <= 1 or low <= 0:
        raise ValueError(f"the sweep {text!r} never ends: start above 0 and use a factor above 1")
    count = math.log(high / low) / math.log(factor) if high >= low else -1.0
    if not count < MOST:
        raise ValueError(f"the sweep {text!r} is too large: at most {MOST} settings")
    return tuple(low * factor**i for i in range(math.floor(count + 1e-9) + 1))


@dataclass(frozen=True)
class Sweep:
    """Priced settings: `axes` in the order of the product (the last varies fastest), and one array per figure,
    [settings].
    """

    axes: Mapping[str, Axis]
    seconds: Array
    ops: Array
    bytes: Array
    memory: Array
    tokens: Array

    def settings(self) -> Sequence[tuple[float | str, ...]]:
        """The axis values of every setting."""
        return list(itertools.product(*self.axes.values()))


def sweep(model: Model, hardware: Hardware, setting: Setting, axes: Mapping[str, Axis]) -> Sweep:
    """Price the product of the axes around a setting.

    Raises:
        ValueError: no axis, more than MOST settings, or a setting that cannot be.
    """
    size = int(np.prod([len(v) for v in axes.values()], dtype=np.float64)) if axes else 0
    if not 1 <= size <= MOST:
        what = "is empty" if size < 1 else f"has {size} settings, at most {MOST} are allowed"
        raise ValueError(f"the sweep {what}")
    found = {name: np.empty(size) for name in ("seconds", "ops", "bytes", "memory", "tokens")}
    apart = [n for n in axes if n in (*FORMATS, *RATES, "devices")]
    grid = np.indices([len(v) for v in axes.values()]).reshape(len(axes), -1)
    where = list(axes)
    for combination in itertools.product(*(range(len(axes[n])) for n in apart)):
        chosen = np.ones(size, dtype=bool)
        for name, index in zip(apart, combination, strict=True):
            chosen &= grid[where.index(name)] == index
        device, asked = _fixed(hardware, setting, {n: axes[n][i] for n, i in zip(apart, combination, strict=True)})
        check(model, asked)
        at = np.flatnonzero(chosen)
        lengths = {n: np.asarray(axes[n], dtype=np.float64)[grid[where.index(n)][at]] for n in LENGTHS if n in axes}
        for name, values in _priced(model, device, asked, lengths, len(at)).items():
            found[name][at] = values
    return Sweep(axes, found["seconds"], found["ops"], found["bytes"], found["memory"], found["tokens"])


def _fixed(hardware: Hardware, setting: Setting, chosen: Mapping[str, float | str]) -> tuple[Hardware, Setting]:
    rate = {n: float(v) for n, v in chosen.items() if n in RATES}
    device = changed(
        hardware,
        rate["bandwidth"] * 1e9 if "bandwidth" in rate else None,
        rate["peak"] * 1e12 if "peak" in rate else None,
    )
    w, a, kv = (parse(str(chosen[n])) if n in chosen else getattr(setting, n) for n in FORMATS)
    return device, replace(
        setting, weights=w, activations=a, kv=kv, devices=int(chosen.get("devices", setting.devices))
    )


def _priced(
    model: Model, hardware: Hardware, setting: Setting, lengths: Mapping[str, Array], count: int
) -> dict[str, Array]:
    """Figures of settings that differ in lengths alone, a slice at a time."""
    given = {n: lengths.get(n, np.full(count, float(getattr(setting, n)))) for n in LENGTHS}
    passes = given["generate"].max() if setting.stage == "chat" else 1.0
    if setting.stage == "chunked":
        passes = float(np.ceil(given["context"] / given["chunk"]).max())
    step = max(1, int(WORK / passes))
    parts: dict[str, list[Array]] = {n: [] for n in ("seconds", "ops", "bytes", "memory", "tokens")}
    r = rates(setting, hardware)
    for start in range(0, count, step):
        piece = Sizes(*(given[n][start : start + step] for n in LENGTHS))
        shape = piece.batch.shape
        run = [(model.network(setting.fusion, p.prompt, setting.square), p) for p in phases(setting.stage, piece)]
        cost = Cost()
        for network, phase in run:
            cost = cost + total(lines(network, phase, r))
        figures: dict[str, Number] = {
            "seconds": cost.seconds,
            "ops": cost.ops,
            "bytes": cost.bytes,
            "memory": memory(run, r).total,
            "tokens": piece.batch * (piece.generate if setting.stage == "chat" else 1),
        }
        for name, figure in figures.items():
            parts[name].append(np.broadcast_to(np.asarray(figure, dtype=np.float64), shape))
    return {name: np.concatenate(part) for name, part in parts.items()}
