"""What a pass runs on: bandwidth, peaks, capacity and links of a device, each figure with its source."""

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from foretell.roofline.formats import LADDER, Format, multiplied_as
from foretell.roofline.names import look_up

Curve = tuple[tuple[float, float], ...]
"""A measured rate: (rows, OPs/s), rows increasing."""
CLASSES = ("fp32", "fp16", "fp8", "fp4", "int8", "int4", "any")


@dataclass(frozen=True)
class Hardware:
    """One device. Units: bytes/s, bytes, OPs/s, seconds.

    peaks: matrix rate per format class. vector: rate of element-wise work (0: the 16-bit matrix rate). link: bytes/s to
    other devices, one direction. host: bytes/s from host memory. overhead: seconds every operation costs before it
    moves a byte; start: the same for a pass. rates: measured matrix rates per format class; where given they replace
    the peak. attend: that of attention.
    """

    name: str
    title: str
    bandwidth: float
    peaks: Mapping[str, float]
    source: str
    capacity: float | None = None
    vector: float = 0.0
    link: float = 0.0
    host: float = 0.0
    overhead: float = 0.0
    rates: Mapping[str, Curve] = field(default_factory=dict)
    attend: Curve = ()
    start: float = 0.0

    def __post_init__(self) -> None:
        positive = {"bandwidth": self.bandwidth, **{f"peak {k}": v for k, v in self.peaks.items()}}
        if self.capacity is not None:
            positive["capacity"] = self.capacity
        for name, value in positive.items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"hardware {self.name!r}: {name} must be a positive number, found {value:g}")
        for name in ("vector", "link", "host", "overhead", "start"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"hardware {self.name!r}: {name} must not be negative, found {getattr(self, name):g}")
        if not self.peaks:
            raise ValueError(f"hardware {self.name!r}: give at least one peak ({', '.join(CLASSES)})")

    def format_class(self, a: Format, b: Format) -> str:
        """Format class in which this device multiplies two operands: the narrowest it has that holds both.

        Raises:
            ValueError: the device multiplies no format wide enough.
        """
        wanted = multiplied_as(a, b)
        for name in LADDER[wanted]:
            if name in self.peaks:
                return name
        raise ValueError(
            f"hardware {self.name!r} states no rate that can multiply {wanted}; it has {', '.join(self.peaks)}"
        )

    def peak(self, a: Format, b: Format) -> float:
        """Matrix rate for two operand formats, OPs/s."""
        return self.peaks[self.format_class(a, b)]

    @property
    def elementwise(self) -> float:
        """Rate of element-wise work, OPs/s."""
        return self.vector or self.peaks.get("fp16") or max(self.peaks.values())


@dataclass(frozen=True)
class Tier:
    """Memory outside the device: bandwidth in bytes/s and, if any, the processor beside it."""

    name: str
    title: str
    bandwidth: float
    source: str
    compute: str | None = None


def from_table(name: str, raw: Mapping[str, Any], where: str) -> Hardware:
    """Hardware from a TOML table in the units of hardware.toml (GB, GB/s, 1e12 OPs/s, microseconds of overhead).

    Raises:
        ValueError: bandwidth missing, an unknown key, or a value that is no positive number.
    """
    plain = {
        "title",
        "source",
        "bandwidth",
        "capacity",
        "vector",
        "link",
        "host",
        "overhead_us",
        "start_us",
        "rates",
        "attend",
    }
    for key in raw:
        if key not in plain | set(CLASSES):
            look_up({k: k for k in sorted(plain | set(CLASSES))}, key, f"hardware key (in {where})")
    if "bandwidth" not in raw:
        raise ValueError(f"{where}: hardware {name!r} has no 'bandwidth' (GB/s)")
    try:
        number = {k: float(raw[k]) for k in raw if k not in ("title", "source", "rates", "attend")}
        rates = {c: _curve(points) for c, points in raw.get("rates", {}).items()}
        attend = _curve(raw.get("attend", ()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: hardware {name!r} has a value that is no number ({error})") from None
    return Hardware(
        name,
        str(raw.get("title", name)),
        number["bandwidth"] * 1e9,
        {c: number[c] * 1e12 for c in CLASSES if c in number},
        str(raw.get("source", where)),
        number["capacity"] * 1e9 if "capacity" in number else None,
        number.get("vector", 0.0) * 1e12,
        number.get("link", 0.0) * 1e9,
        number.get("host", 0.0) * 1e9,
        number.get("overhead_us", 0.0) * 1e-6,
        rates,
        attend,
        number.get("start_us", 0.0) * 1e-6,
    )


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple((float(rows), float(rate) * 1e12) for rows, rate in points)


def user_file() -> Path:
    """Where this user's own and calibrated hardware is kept."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "foretell" / "hardware.toml"


def read_file(path: Path) -> dict[str, Hardware]:
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
    return {name.lower(): from_table(name.lower(), entry, str(path)) for name, entry in raw.items()}


@cache
def _shipped(which: str) -> Mapping[str, Any]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath(which).read_text("utf-8"))


def devices(extra: Path | None = None) -> dict[str, Hardware]:
    """All known devices by name: shipped, then the user's, then those of `extra`.

    Raises:
        ValueError: a bad hardware file.
    """
    table = {name: from_table(name, raw, "hardware.toml") for name, raw in _shipped("hardware.toml").items()}
    if user_file().is_file():
        table |= read_file(user_file())
    return table | read_file(extra) if extra else table


def tier(name: str) -> Tier:
    """An offload tier by name.

    Raises:
        ValueError: unknown name.
    """
    raw = look_up(_shipped("tiers.toml"), name, "memory tier")
    return Tier(name, raw["title"], raw["bandwidth"] * 1e9, raw["source"], raw.get("compute"))


def changed(
    hardware: Hardware, bandwidth: float | None = None, peak: float | None = None, capacity: float | None = None
) -> Hardware:
    """The device with some figures replaced (bytes/s, OPs/s for 16-bit with the other peaks in proportion, bytes).

    Raises:
        ValueError: a figure is not positive.
    """
    peaks = dict(hardware.peaks)
    rates = hardware.rates
    if peak is not None:
        base = peaks.get("fp16") or max(peaks.values())
        peaks = {k: v * peak / base for k, v in peaks.items()}
        rates = {}
    return replace(
        hardware,
        bandwidth=hardware.bandwidth if bandwidth is None else bandwidth,
        peaks=peaks,
        rates=rates,
        capacity=hardware.capacity if capacity is None else capacity,
    )
