"""Bandwidth, peak rates, capacity and links of devices, each figure with its source."""

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from foretell.roofline.formats import WIDER_CLASSES, NumberFormat, compute_class
from foretell.roofline.names import look_up
from foretell.roofline.runtime import DATASHEET, Runtime

Curve = tuple[tuple[float, float], ...]
"""A measured rate: (rows, OPs/s), rows increasing."""
FORMAT_CLASSES = ("fp32", "fp16", "fp8", "fp4", "int8", "int4", "any")


@dataclass(frozen=True)
class Hardware:
    """One device. Units: bytes/s, bytes, OPs/s, seconds.

    bandwidth: of its memory. peaks: matrix rate per format class. capacity: of its memory; None: not stated.
    vector_rate: of elementwise operations (0: the 16-bit matrix rate). link_bandwidth: to other devices, one direction.
    host_bandwidth: from host memory. matmul_rates: measured matrix rates per format class, which replace the peaks;
    attention_rates: the same of attention. runtime: what is reached of these rates, and the fixed times. kind: `gpu`,
    or `other`, to which the typical runtimes do not apply. drafting: measured figures of a `DraftingTime` by model with
    its dtype and by method.

    Raises:
        ValueError: no peak, or a figure that is not positive.
    """

    name: str
    title: str
    bandwidth: float
    peaks: Mapping[str, float]
    source: str
    capacity: float | None = None
    vector_rate: float = 0.0
    link_bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    matmul_rates: Mapping[str, Curve] = field(default_factory=dict)
    attention_rates: Curve = ()
    runtime: Runtime = DATASHEET
    kind: str = "gpu"
    drafting: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive = [("bandwidth", self.bandwidth / 1e9, "GB/s")]
        positive += [(f"peak {k}", v / 1e12, "TOP/s") for k, v in self.peaks.items()]
        positive += [] if self.capacity is None else [("capacity", self.capacity / 1e9, "GB")]
        for name, value, unit in positive:
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"hardware {self.name!r}: {name} must be a positive number, found {value:g} {unit}")
        for name in ("vector_rate", "link_bandwidth", "host_bandwidth"):
            if not (value := getattr(self, name)) >= 0:
                what = name.replace("_", " ")
                raise ValueError(f"hardware {self.name!r}: the {what} must not be negative, found {value:g}")
        if not self.peaks:
            raise ValueError(f"hardware {self.name!r}: give at least one peak ({', '.join(FORMAT_CLASSES)})")

    def format_class(self, a: NumberFormat, b: NumberFormat) -> str:
        """Format class in which this device multiplies two operands: the narrowest it has that represents both.

        Raises:
            ValueError: the device multiplies no format wide enough.
        """
        wanted = compute_class(a, b)
        for name in WIDER_CLASSES[wanted]:
            if name in self.peaks:
                return name
        raise ValueError(
            f"hardware {self.name!r} states no rate that can multiply {wanted}; it has {', '.join(self.peaks)}"
        )

    def peak(self, a: NumberFormat, b: NumberFormat) -> float:
        """Matrix rate for two operand formats, OPs/s."""
        return self.peaks[self.format_class(a, b)]

    @property
    def takes_runtimes(self) -> bool:
        """Whether the typical runtimes apply: not to a measured device, which has its own, nor to what is no GPU."""
        return not self.matmul_rates and self.kind == "gpu"

    def run_by(self, runtime: Runtime) -> "Hardware":
        """The device under a runtime, where the typical ones apply."""
        return replace(self, runtime=runtime) if self.takes_runtimes else self

    @property
    def elementwise_rate(self) -> float:
        """Rate of elementwise operations, OPs/s."""
        return self.vector_rate or self.peaks.get("fp16") or max(self.peaks.values())


@dataclass(frozen=True)
class MemoryTier:
    """Memory outside the device: bandwidth in bytes/s, and the hardware entry of a processor attached to it, if any."""

    name: str
    title: str
    bandwidth: float
    source: str
    compute: str | None = None


TABLE_KEYS = (
    "title", "source", "kind", "bandwidth", "capacity", "vector", "link", "host", "overhead_us", "start_us", "rates",
    "attend", "cache", "logit_ns", "drafting",
    *FORMAT_CLASSES,
)  # fmt: skip
"""Keys of a table in a hardware file."""


def hardware_from_table(name: str, raw: Mapping[str, Any], where: str) -> Hardware:
    """Hardware from a TOML table in the units of hardware.toml (GB, GB/s, 1e12 OPs/s, microseconds).

    Raises:
        ValueError: bandwidth missing, an unknown key, or a value that is no positive number.
    """
    for key in raw:
        if key not in TABLE_KEYS:
            look_up({k: k for k in TABLE_KEYS}, key, f"hardware key (in {where})")
    if "bandwidth" not in raw:
        raise ValueError(f"{where}: hardware {name!r} has no 'bandwidth' (GB/s)")
    try:
        number = {k: float(raw[k]) for k in raw if k not in ("title", "source", "kind", "rates", "attend", "drafting")}
        rates = {c: _curve(points) for c, points in raw.get("rates", {}).items()}
        attend = _curve(raw.get("attend", ()))
        drafting = {model: _drafting(methods) for model, methods in raw.get("drafting", {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: hardware {name!r} has a value that is no number ({error})") from None
    return Hardware(
        name,
        str(raw.get("title", name)),
        number["bandwidth"] * 1e9,
        _peaks(number),
        str(raw.get("source", where)),
        number["capacity"] * 1e9 if "capacity" in number else None,
        number.get("vector", 0.0) * 1e12,
        number.get("link", 0.0) * 1e9,
        number.get("host", 0.0) * 1e9,
        rates,
        attend,
        _own_runtime(number),
        str(raw.get("kind", "gpu")),
        drafting,
    )


def _drafting(methods: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Four figures in microseconds by method."""
    seconds = {method: tuple(float(x) * 1e-6 for x in figures) for method, figures in methods.items()}
    for method, figures in seconds.items():
        if len(figures) != 4:
            raise ValueError(f"drafting of {method} has 4 figures, found {len(figures)}")
    return seconds


def _peaks(number: Mapping[str, float]) -> dict[str, float]:
    """Stated matrix rates; FP32 is multiplied at the vector rate where the device has one and no matrix rate for it."""
    peaks = {c: number[c] * 1e12 for c in FORMAT_CLASSES if c in number}
    if "vector" in number and "any" not in number:
        peaks.setdefault("fp32", number["vector"] * 1e12)
    return peaks


def _own_runtime(number: Mapping[str, float]) -> Runtime:
    """The measured times of a device, if its table states any; `cache`: GB/s at which attention reads its cache."""
    keys = ("overhead_us", "start_us", "cache", "logit_ns")
    if not any(number.get(key) for key in keys):
        return DATASHEET
    overhead, start, cache_rate, logit = (number.get(key, 0.0) for key in keys)
    return Runtime(
        "measured",
        op_overhead=overhead * 1e-6,
        pass_overhead=start * 1e-6,
        cache_read=1e-9 / cache_rate if cache_rate else 0.0,
        logit_time=logit * 1e-9,
    )


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple((float(rows), float(rate) * 1e12) for rows, rate in points)


CALIBRATED = "this-machine"
"""Name of the entry that `foretell roofline calibrate` writes."""


def user_hardware_file() -> Path:
    """The file of this user's own and calibrated hardware."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "foretell" / "hardware.toml"


def read_hardware_file(path: Path) -> dict[str, Hardware]:
    """Hardware entries of a TOML file with one table per device.

    Raises:
        ValueError: no such file, not TOML, or a bad entry.
    """
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read hardware file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    bare = [k for k, v in raw.items() if not isinstance(v, dict)]
    if bare or not raw:
        raise ValueError(
            f"{path}: expected one table per device, such as [my-gpu], found {', '.join(bare) or 'nothing'}"
        )
    return {name.lower(): hardware_from_table(name.lower(), entry, str(path)) for name, entry in raw.items()}


@cache
def _packaged_table(which: str) -> Mapping[str, Any]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath(which).read_text("utf-8"))


def known_hardware(extra: Path | None = None) -> dict[str, Hardware]:
    """All devices by name: those of the package, then the user's, then those of the file `extra`.

    Raises:
        ValueError: a bad hardware file.
    """
    table = {
        name: hardware_from_table(name, raw, "hardware.toml") for name, raw in _packaged_table("hardware.toml").items()
    }
    if user_hardware_file().is_file():
        table |= read_hardware_file(user_hardware_file())
    return table | read_hardware_file(extra) if extra else table


def memory_tier(name: str) -> MemoryTier:
    """A memory tier by name.

    Raises:
        ValueError: unknown name.
    """
    raw = look_up(_packaged_table("tiers.toml"), name, "memory tier")
    return MemoryTier(name, raw["title"], raw["bandwidth"] * 1e9, raw["source"], raw.get("compute"))


def with_overrides(
    hardware: Hardware, bandwidth: float | None = None, peak: float | None = None, capacity: float | None = None
) -> Hardware:
    """The device with some figures replaced (bytes/s, 16-bit OPs/s with the other peaks in proportion, bytes).

    Raises:
        ValueError: a figure is not positive.
    """
    peaks = dict(hardware.peaks)
    rates = hardware.matmul_rates
    if peak is not None:
        base = peaks.get("fp16") or max(peaks.values())
        peaks = {k: v * peak / base for k, v in peaks.items()}
        rates = {}
    return replace(
        hardware,
        bandwidth=hardware.bandwidth if bandwidth is None else bandwidth,
        peaks=peaks,
        matmul_rates=rates,
        capacity=hardware.capacity if capacity is None else capacity,
    )
