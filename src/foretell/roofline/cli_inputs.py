"""Reading what a user asks for: devices on the spot, parts to offload, acceptance profiles."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.roofline import method_profiles
from foretell.roofline.acceptance import Acceptance, profile
from foretell.roofline.analysis import Model
from foretell.roofline.attention import Fusion
from foretell.roofline.hardware import Hardware, changed, devices, from_table
from foretell.roofline.method_profiles import Method, catalogue, with_acceptance
from foretell.roofline.names import look_up
from foretell.roofline.plan import by_batch, drafts, paying_batches
from foretell.roofline.workload import FUSIONS, STAGES, Setting, Stage
from foretell.utils.validation import Fields, read_json

_PROFILE = '{"eagle2": {"ranks": [0.7, 0.1]}}'


def stage(name: str) -> Stage:
    """A stage by name, or a hint."""
    return look_up({s: s for s in STAGES}, name, "stage")


def fusion(name: str) -> Fusion:
    """A degree of fusion by name, or a hint."""
    return look_up({f: f for f in FUSIONS}, name, "fusion")


def device(
    name: str, file: Path | None, bandwidth: float | None, peak: float | None, capacity: float | None
) -> Hardware:
    """The device asked for with figures replaced (GB/s, 1e12 OPs/s, GB); `custom` is made of these alone.

    Raises:
        ValueError: an unknown device, a bad file, or a figure that is not positive.
    """
    if name == "custom":
        if bandwidth is None or peak is None:
            raise ValueError("custom hardware needs --bandwidth (GB/s) and --peak (1e12 OPs/s)")
        figures: dict[str, Any] = {"title": "custom hardware", "source": "given", "bandwidth": bandwidth, "any": peak}
        return from_table("custom", figures | ({} if capacity is None else {"capacity": capacity}), "the command line")
    giga = [None if figure is None else figure * 1e9 for figure in (bandwidth, capacity)]
    return changed(look_up(devices(file), name, "hardware"), giga[0], None if peak is None else peak * 1e12, giga[1])


def offloaded_parts(text: str) -> tuple[float, float]:
    """Read `weights=1,kv=0.5`: the parts of weights and of the cache kept outside the device."""
    found = {"weights": 0.0, "kv": 0.0}
    for piece in text.split(","):
        name, equals, number = piece.partition("=")
        if not equals or not number.replace(".", "", 1).isdigit():
            raise ValueError(f"--offload looks like weights=1,kv=0.5, found {text!r}")
        found[look_up({k: k for k in found}, name, "offloaded part")] = float(number)
    return found["weights"], found["kv"]


def methods(names: Sequence[str] | None, accept: float | None, file: Path | None) -> Mapping[str, Method]:
    """The methods asked for, all by default, with acceptance from the literature, one given number, or a measured file.

    The file maps methods to {"ranks": [...], "decay": 1, "source": "..."}. Raises:
        ValueError: an unknown method, or a file that is no such thing.
    """
    found = [method_profiles.method(m) for m in names or ()]
    chosen = {m.name: m for m in found} or dict(catalogue())
    if accept is not None:
        return {n: with_acceptance(m, profile(accept, "given", m.shape == "chain"), "given") for n, m in chosen.items()}
    if file is None:
        return chosen
    profiles = Fields(
        read_json(file, f"an acceptance profile looks like {_PROFILE}"), f"{file} is no acceptance profile"
    )
    for name in profiles.raw:
        method, entry = method_profiles.method(name), profiles.fields(name)
        measured = Acceptance(
            entry.numbers("ranks"), entry.text("source", default=str(file)), entry.number("decay", default=1.0)
        )
        if method.name in chosen:
            chosen[method.name] = with_acceptance(method, measured, "measured")
    return chosen


def curves(
    target: Model, on: Hardware, asked: Setting, chosen: Mapping[str, Method], other: Model | None
) -> list[dict[str, Any]]:
    """Speed-up of every method by batch size, and the batch sizes at which it pays.

    Raises:
        ValueError: none of the methods can be used.
    """
    ready, refused = drafts(target, chosen, other)
    if not ready:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    rows = []
    for name, guess in ready.items():
        gains = by_batch(chosen[name], guess, target, on, asked)
        pays = ", ".join(f"{a}-{b}" for a, b in paying_batches(chosen[name], guess, target, on, asked)) or "never"
        rows.append({"method": name} | {f"b={g.batch}": round(g.speedup, 4) for g in gains} | {"pays at batch": pays})
    return rows
