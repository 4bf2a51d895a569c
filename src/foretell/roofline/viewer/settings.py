"""The settings of the page, and what they describe: a model on a device under a workload, drafts, and arrivals."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from foretell.roofline.analysis import AnalyzedModel, builtin_model, check_devices
from foretell.roofline.arrivals import Request, poisson_requests
from foretell.roofline.cli_inputs import parse_fusion, parse_rates, parse_shape, parse_stage, select_methods
from foretell.roofline.cost import device_rates
from foretell.roofline.formats import NumberFormat, parse_format
from foretell.roofline.hardware import Hardware, memory_tier, with_overrides
from foretell.roofline.method_profiles import MethodProfile
from foretell.roofline.model_configs import builtin_models, read_config
from foretell.roofline.model_variants import check_part
from foretell.roofline.names import look_up
from foretell.roofline.offload import Offload, PlacedOffload, place_offload
from foretell.roofline.runtime import DEFAULT_RUNTIME, Runtime, known_runtimes
from foretell.roofline.speculation import MAX_NODES, DraftShape
from foretell.roofline.workload import Workload, check_size

Setting = Mapping[str, Any]
"""Values by the names of DEFAULTS: numbers, or texts as they were typed."""
DEFAULTS: Setting = {
    "model": "llama-3-8b", "hardware": "a6000", "stage": "decode", "batch": 1, "context": 1024, "tokens": 8,
    "chunk": 512, "generate": 256, "weights": "16", "activations": "16", "kv": "16", "head": "", "fusion": "flash",
    "devices": 1, "runtime": DEFAULT_RUNTIME, "square": False, "bandwidth": "", "peak": "", "capacity": "",
    "offloadWeights": "", "offloadKv": "", "tier": "ddr", "offloadCompute": "device", "accept": "", "draft": "",
    "chain": "", "tree": "", "tau": "", "nodes": "", "share": 0.5, "density": 0.2, "rates": "1,2,4,8,16",
    "requests": 300, "prompt": 512, "output": 200, "running": 256, "ttft": 1, "tpot": 0.05, "config": "",
}  # fmt: skip
PASTED = "pasted"
"""Name of the model that the setting `config` describes."""
MAX_CONFIG = 1_000_000
"""Characters of a config.json that is accepted."""
MAX_PASSES = 1 << 17
"""Most passes of a workload: more would keep the page waiting."""
LOAD_LIMITS = {"requests": 2000, "prompt": 100_000, "output": 4000, "running": 1024}
MAX_RATES = 12
MAX_CHAIN = 1000


class SettingError(ValueError):
    """A setting that cannot be used; `field`: its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Errors of what is called name the field."""
    try:
        yield
    except SettingError:
        raise
    except (ValueError, OverflowError) as error:
        raise SettingError(field, str(error)) from None


def page_runtimes() -> dict[str, Runtime]:
    """The runtimes that the page offers."""
    return {name: runtime for name, runtime in known_runtimes().items() if not runtime.expansion}


@lru_cache(maxsize=16)
def pasted_model(text: str) -> AnalyzedModel:
    """The model that a config.json describes.

    Raises:
        ValueError: not JSON, too long, or no configuration that can be analysed.
    """
    if len(text) > MAX_CONFIG:
        raise ValueError("a config.json has at most a megabyte")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the configuration is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError("a config.json holds one object")
    return AnalyzedModel(PASTED, read_config(raw, "the configuration"))


@dataclass(frozen=True)
class Known:
    """The devices, and the models beside the built-in ones, that a page offers."""

    devices: Mapping[str, Hardware]
    extra: Mapping[str, AnalyzedModel]

    def defaults(self) -> dict[str, Any]:
        """The settings that a page begins with."""
        first = {"model": next(iter(self.extra), DEFAULTS["model"])}
        if DEFAULTS["hardware"] not in self.devices:
            first["hardware"] = next(iter(self.devices))
        return {**DEFAULTS, **first}

    def model(self, s: Setting, field: str) -> AnalyzedModel:
        """The model that the setting `field` names.

        Raises:
            SettingError: there is none.
        """
        name = str(s[field])
        if name == PASTED:
            with _about("config"):
                return pasted_model(str(s["config"]))
        with _about(field):
            names = {n: n for n in (*self.extra, *builtin_models())}
            known = look_up(names, name, "draft model" if field == "draft" else "model")
            return self.extra[known] if known in self.extra else builtin_model(known)

    def device(self, s: Setting) -> Hardware:
        """The device with the figures that the settings replace, under a runtime.

        Raises:
            SettingError: an unknown name, or a figure that is not positive.
        """
        with _about("hardware"):
            device = look_up(self.devices, str(s["hardware"]), "hardware")
        for field, unit in (("bandwidth", 1e9), ("peak", 1e12), ("capacity", 1e9)):
            if _is_given(s, field):
                figure = _number(s, field, field) * unit
                with _about(field):
                    device = with_overrides(device, **{field: figure})
        with _about("runtime"):
            return device.run_by(look_up(page_runtimes(), str(s["runtime"]), "runtime"))


@dataclass(frozen=True)
class Question:
    """A model on a device under a workload; `offload`: of weights and cache."""

    model: AnalyzedModel
    hardware: Hardware
    workload: Workload
    offload: PlacedOffload | None


@dataclass(frozen=True)
class Drafts:
    """The methods with their acceptance, and what the settings say of their drafts."""

    profiles: Mapping[str, MethodProfile]
    draft_model: AnalyzedModel | None
    max_nodes: int
    shape: DraftShape | None


@dataclass(frozen=True)
class Arrivals:
    """Requests that arrive over time: the rates, the limits, and the workload of one request."""

    rates: tuple[float, ...]
    requests: int
    output: int
    running: int
    ttft: float
    tpot: float
    question: Question
    shape: DraftShape

    def at(self, rate: float) -> list[Request]:
        """The requests that arrive at a rate, in requests a second."""
        return poisson_requests(rate, self.requests, self.question.workload.context, self.output)


def read_setting(raw: Setting) -> dict[str, Any]:
    """A complete setting of what a page sends.

    Raises:
        ValueError: an unknown name, or a value that is neither a text, a number nor a flag.
    """
    for name, value in raw.items():
        look_up({n.lower(): n for n in DEFAULTS}, name, "setting")
        if not isinstance(value, str | int | float):
            raise SettingError(name, f"{name} must be a text or a number, found {value!r}")
    return {**DEFAULTS, **raw}


def read_question(s: Setting, known: Known) -> Question:
    """The model, device and workload of a setting.

    Raises:
        SettingError: a value is invalid, or the device cannot run the workload.
    """
    model, device = known.model(s, "model"), known.device(s)
    with _about("stage"):
        stage = parse_stage(str(s["stage"]))
    with _about("fusion"):
        fusion = parse_fusion(str(s["fusion"]))
    sizes = {"batch", "context", "devices"} | _SIZES_OF_STAGE.get(stage, set())
    numbers = {name: _whole(s, name, name) for name in sizes}
    for name, value in numbers.items():
        with _about(name):
            check_size(name, value, stage)
    workload = Workload(
        stage,
        weights=_format(s, "weights"),
        activations=_format(s, "activations"),
        kv=_format(s, "kv"),
        head=_format(s, "head") if _is_given(s, "head") else None,
        fusion=fusion,
        square=s["square"] in (True, "true"),
        **numbers,
    )
    if stage == "chunked" and -(-workload.context // workload.chunk) > MAX_PASSES:
        raise SettingError("chunk", f"chunks of {workload.chunk} make more than {MAX_PASSES} passes; use larger ones")
    with _about("devices"):
        check_devices(model, workload)
    with _about("activations"):
        device_rates(replace(workload, devices=1), device)
    with _about("devices"):
        device_rates(workload, device)
    return Question(model, device, workload, _read_offload(s, device, known))


_SIZES_OF_STAGE = {"verify": {"tokens"}, "chunked": {"chunk"}, "chat": {"generate"}}


def _read_offload(s: Setting, device: Hardware, known: Known) -> PlacedOffload | None:
    with _about("tier"):
        tier = memory_tier(str(s["tier"]))
    weights, kv = (
        _number(s, field, "the offloaded part") if _is_given(s, field) else 0.0
        for field in ("offloadWeights", "offloadKv")
    )
    if not weights and not kv:
        return None
    with _about("offloadWeights"):
        offload = Offload(tier, weights, 0.0)
    with _about("offloadKv"):
        offload = replace(offload, kv=kv)
    with _about("offloadCompute"):
        offload = replace(offload, compute=str(s["offloadCompute"]))
    with _about("tier"):
        return place_offload(offload, device, known.devices)


def read_drafts(s: Setting, known: Known) -> Drafts:
    """The methods of a setting.

    Raises:
        SettingError: a value is invalid.
    """
    accept = _number(s, "accept", "acceptance") if _is_given(s, "accept") else None
    with _about("accept"):
        profiles = select_methods(None, accept, None)
    nodes = _whole(s, "nodes", "the largest tree") if _is_given(s, "nodes") else MAX_NODES
    if not 1 <= nodes <= MAX_NODES:
        raise SettingError("nodes", f"the largest tree must have 1 to {MAX_NODES} nodes, found {nodes}")
    draft_model = known.model(s, "draft") if _is_given(s, "draft") else None
    return Drafts(profiles, draft_model, nodes, _read_shape(s))


def _read_shape(s: Setting) -> DraftShape | None:
    chain = _whole(s, "chain", "a chain") if _is_given(s, "chain") else None
    tree = str(s["tree"]).strip().replace("×", "x").replace(" ", "") if _is_given(s, "tree") else None
    tau = _number(s, "tau", "the tokens per pass") if _is_given(s, "tau") else None
    with _about("tree" if tree is not None else "chain"):
        shape = parse_shape(chain, tree, None, _SHAPE_NAMES)
    with _about("tau"):
        shape = parse_shape(chain, tree, tau, _SHAPE_NAMES)
    if shape is not None and shape.nodes > MAX_CHAIN + 1:
        field = "chain" if tree is None else "tree"
        raise SettingError(field, f"at most {MAX_CHAIN} tokens can be drafted, found {shape.nodes - 1}")
    return shape


_SHAPE_NAMES = ("a chain", "a tree", "tokens per pass")


def read_parts(s: Setting) -> tuple[float, float]:
    """The share of the layers and the density of the variants with cheaper passes.

    Raises:
        SettingError: one lies outside (0, 1].
    """
    parts = []
    for field, name in (("share", "share of layers"), ("density", "density")):
        parts.append(_number(s, field, f"the {name}"))
        with _about(field):
            check_part(name, parts[-1])
    return parts[0], parts[1]


def read_arrivals(s: Setting, question: Question, shape: DraftShape | None) -> Arrivals:
    """The arrivals of a setting; without a `shape`, chains of 3 are drafted.

    Raises:
        SettingError: a value is invalid.
    """
    counts = {name: _whole(s, name, name) for name in LOAD_LIMITS}
    for name, most in LOAD_LIMITS.items():
        if not 1 <= counts[name] <= most:
            raise SettingError(name, f"{name} must lie between 1 and {most}, found {counts[name]}")
    with _about("rates"):
        rates = parse_rates(str(s["rates"]), "this field")
        if len(rates) > MAX_RATES:
            raise ValueError(f"give 1 to {MAX_RATES} rates, as 1,4,16; found {len(rates)}")
    limits = {name: _number(s, name, "a limit") for name in ("ttft", "tpot")}
    for name, limit in limits.items():
        if limit <= 0:
            raise SettingError(name, f"a limit must be positive, found {limit:g}")
    workload = replace(question.workload, stage="decode", batch=1, context=counts["prompt"])
    return Arrivals(
        tuple(rates),
        counts["requests"],
        counts["output"],
        counts["running"],
        limits["ttft"],
        limits["tpot"],
        replace(question, workload=workload),
        shape or DraftShape(4, 3),
    )


def _is_given(s: Setting, field: str) -> bool:
    return bool(str(s[field]).strip())


def _number(s: Setting, field: str, what: str, kind: str = "number") -> float:
    text = str(s[field]).strip()
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (kind != "number" and not (number.is_integer() and abs(number) < _MOST_DIGITS)):
        raise SettingError(field, f"{what} must be a {kind}" + (f", found {text!r}" if text else "; it is empty"))
    return number


def _whole(s: Setting, field: str, what: str) -> int:
    return int(_number(s, field, what, "whole number"))


_MOST_DIGITS = 1e15
"""Whole numbers are below it, so that messages do not hold hundreds of digits."""


def _format(s: Setting, field: str) -> NumberFormat:
    with _about(field):
        return parse_format(str(s[field]))
