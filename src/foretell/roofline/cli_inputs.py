"""The command line's options as objects: stage, hardware, offload, methods with acceptance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretell.roofline.acceptance import AcceptanceByRank, geometric_acceptance
from foretell.roofline.analysis import Analysis, AnalyzedModel
from foretell.roofline.attention import Fusion
from foretell.roofline.cost import scalar
from foretell.roofline.formats import NumberFormat, parse_format
from foretell.roofline.hardware import Hardware, hardware_from_table, known_hardware, memory_tier, with_overrides
from foretell.roofline.method_profiles import MethodProfile, find_method, method_profiles, with_acceptance
from foretell.roofline.names import look_up
from foretell.roofline.offload import Offload, PlacedOffload, place_offload, share_outside
from foretell.roofline.plan import drafter_costs, estimates_by_batch, profiles_for, profitable_batches
from foretell.roofline.runtime import DEFAULT_RUNTIME, find_runtime, known_runtimes
from foretell.roofline.speculation import DraftShape
from foretell.roofline.workload import FUSIONS, STAGES, Stage, Workload
from foretell.utils.assignments import split_assignment
from foretell.utils.options import Option
from foretell.utils.validation import Fields, read_json

_PROFILE = '{"eagle2": {"ranks": [0.7, 0.1]}}'
_BITS = "Format: 1 to 16, 32, fp8, fp4; 4g128 counts a scale per 128, 4g128z a zero point too."
AUTO = "auto"
"""Weights in the format of the file."""


def parse_stage(name: str) -> Stage:
    """A stage by name.

    Raises:
        ValueError: no such stage.
    """
    return look_up({s: s for s in STAGES}, name, "stage")


def parse_fusion(name: str) -> Fusion:
    """A degree of fusion by name.

    Raises:
        ValueError: no such degree.
    """
    return look_up({f: f for f in FUSIONS}, name, "fusion")


@dataclass(frozen=True)
class GivenWorkload:
    """A workload as options state it."""

    batch: Annotated[int, Option("Number of sequences.", name="--batch -b")] = 1
    context: Annotated[int, Option("Cached tokens; for prefill, chunked and chat the prompt.", name="--context -s")] = (
        1024
    )
    weights: Annotated[str, Option("As --kv; auto: the bits of a GGUF file, 16 of other sources.")] = AUTO
    activations: Annotated[str, Option(_BITS)] = "16"
    kv: Annotated[str, Option(_BITS)] = "16"
    head: Annotated[
        str | None, Option("Format of embedding and LM head, as 16 in AWQ and GPTQ; by default as --weights.")
    ] = None
    fusion: Annotated[
        str, Option(f"One of {', '.join(FUSIONS)}: flash fuses attention, full also element-wise work.")
    ] = "flash"
    devices: Annotated[int, Option("Devices that share every layer (tensor parallelism).")] = 1

    def of_stage(self, stage: str, own: tuple[NumberFormat, NumberFormat] | None = None) -> Workload:
        """The workload of a stage. `own`: the formats of blocks and head that weights `auto` stand for (None: 16 bits).

        Raises:
            ValueError: a text or a size is invalid.
        """
        given = "16" if self.weights == AUTO else self.weights
        blocks, head = own if own and self.weights == AUTO else (parse_format(given), None)
        return Workload(
            parse_stage(stage),
            self.batch,
            self.context,
            weights=blocks,
            activations=parse_format(self.activations),
            kv=parse_format(self.kv),
            fusion=parse_fusion(self.fusion),
            devices=self.devices,
            head=parse_format(self.head) if self.head else head,
        )


@dataclass(frozen=True)
class GivenDevice:
    """What options say of a device beside its name."""

    hardware_file: Annotated[Path | None, Option("TOML file with more devices.")] = None
    bandwidth: Annotated[float | None, Option("Memory bandwidth in GB/s, in place of the device's.")] = None
    peak: Annotated[float | None, Option("16-bit peak in 1e12 OPs/s; the other peaks follow in proportion.")] = None
    capacity: Annotated[float | None, Option("Memory in GB, in place of the device's.")] = None
    runtime: Annotated[
        str, Option(f"What is reached of the data sheet: {', '.join(known_runtimes())}. Not for CPUs.")
    ] = DEFAULT_RUNTIME

    def named(self, name: str) -> Hardware:
        """A device by name with these figures, under the runtime; `custom` has these figures alone.

        Raises:
            ValueError: an unknown device or runtime, a bad file, or a figure that is not positive.
        """
        if name != "custom":
            return self.changed(look_up(known_hardware(self.hardware_file), name, "hardware"))
        chosen = find_runtime(self.runtime)
        if self.bandwidth is None or self.peak is None:
            raise ValueError("custom hardware needs --bandwidth (GB/s) and --peak (1e12 OPs/s)")
        figures: dict[str, Any] = {"title": "custom hardware", "source": "given"}
        figures |= {"bandwidth": self.bandwidth, "any": self.peak}
        figures |= {} if self.capacity is None else {"capacity": self.capacity}
        return hardware_from_table("custom", figures, "the command line").run_by(chosen)

    def changed(self, hardware: Hardware) -> Hardware:
        """The device under the runtime, with the figures that are given in place of its own.

        Raises:
            ValueError: an unknown runtime, or a figure that is not positive.
        """
        chosen = find_runtime(self.runtime)
        figures = ((self.bandwidth, 1e9), (self.peak, 1e12), (self.capacity, 1e9))
        changed = (None if figure is None else figure * unit for figure, unit in figures)
        return with_overrides(hardware, *changed).run_by(chosen)


def parse_shape(
    tokens: int | None,
    tree: str | None,
    tau: float | None,
    names: tuple[str, str, str] = ("--tokens", "--tree", "--tau"),
) -> DraftShape | None:
    """The chain of `tokens` drafted tokens, or the tree "60x6" (drafted nodes x depth); `tau`: its tokens per pass.

    names: what a message calls the three.

    Raises:
        ValueError: a chain and a tree, tokens per pass of neither, or not of this form.
    """
    chain_name, tree_name, tau_name = names
    if tokens is None and tree is None:
        if tau is not None:
            raise ValueError(f"{tau_name} states what a chain or tree yields: give it with {chain_name} or {tree_name}")
        return None
    if tokens is not None:
        if tree is not None:
            raise ValueError(f"{chain_name} and {tree_name} were given; leave out one of them")
        if tokens < 1:
            raise ValueError(f"{chain_name} must be at least 1, found {tokens}")
        return DraftShape(tokens + 1, tokens, tau)
    drafted, cross, depth = (tree or "").lower().partition("x")
    if not cross or not drafted.isdigit() or not depth.isdigit():
        raise ValueError(f"{tree_name} looks like 60x6 (drafted nodes x depth), found {tree!r}")
    return DraftShape(int(drafted) + 1, int(depth), tau)


def parse_offload(text: str) -> tuple[float, float]:
    """Parse `weights=1,kv=0.5`: the parts of weights and KV cache that are offloaded.

    Raises:
        ValueError: not of this form.
    """
    parts = {"weights": 0.0, "kv": 0.0}
    for piece in text.split(","):
        name, number = split_assignment(piece, "--offload", "weights=1,kv=0.5")
        if not number.replace(".", "", 1).isdigit():
            raise ValueError(f"--offload looks like weights=1,kv=0.5, found {text!r}")
        parts[look_up({k: k for k in parts}, name, "offloaded part")] = float(number)
    return parts["weights"], parts["kv"]


def select_offload(
    text: str | None, tier: str, compute: str, analysis: Analysis, file: Path | None
) -> PlacedOffload | None:
    """The offload of a workload: parts as `parse_offload` reads them, or `auto`, the weights that do not fit.

    Raises:
        ValueError: not of this form, an unknown tier, or a device that cannot fetch or compute it.
    """
    if text is None:
        return None
    device = analysis.hardware
    if text == "auto":
        weights, kv = share_outside(scalar(analysis.memory.weights), device), 0.0
    else:
        weights, kv = parse_offload(text)
    return place_offload(Offload(memory_tier(tier), weights, kv, compute), device, known_hardware(file))


def select_methods(
    names: Sequence[str] | None,
    accept: float | None,
    file: Path | None,
    measured: Mapping[str, MethodProfile] | None = None,
) -> Mapping[str, MethodProfile]:
    """The named methods, all by default, with acceptance from the literature, from one number, or from a file.

    The file is a JSON object from methods to {"ranks": [...], "decay": 1, "by_depth": [], "source": "..."}.
    `measured`: profiles of a run, which are then all methods by default.

    Raises:
        ValueError: an unknown method, one that was not measured, a file of another form, or two sources of acceptance.
    """
    if sum(x is not None for x in (accept, file, measured)) > 1:
        raise ValueError("acceptance comes from one of --accept, --acceptance and --measured; leave out the others")
    if measured is not None:
        wanted = [find_method(name).name for name in names or measured]
        if missing := [name for name in wanted if name not in measured]:
            raise ValueError(f"{missing[0]} was not measured; the run has {', '.join(measured)}")
        return {name: measured[name] for name in wanted}
    chosen = {m.name: m for m in map(find_method, names or ())} or dict(method_profiles())
    if accept is not None:
        given = {n: geometric_acceptance(accept, "given", m.shape == "chain") for n, m in chosen.items()}
        return {n: with_acceptance(m, given[n], "given") for n, m in chosen.items()}
    if file is None:
        return chosen
    profiles = Fields(
        read_json(file, f"an acceptance profile looks like {_PROFILE}"), f"{file} is no acceptance profile"
    )
    for name in profiles.raw:
        method, entry = find_method(name), profiles.fields(name)
        acceptance = AcceptanceByRank(
            entry.numbers("ranks"), entry.text("source", default=str(file)), entry.number("decay", default=1.0),
            entry.numbers("by_depth") if "by_depth" in entry.raw else (),
        )  # fmt: skip
        if method.name in chosen:
            chosen[method.name] = with_acceptance(method, acceptance, "measured")
    return chosen


def speedup_curves(
    target: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    profiles: Mapping[str, MethodProfile],
    draft_model: AnalyzedModel | None,
    offload: PlacedOffload | None = None,
) -> list[dict[str, Any]]:
    """Speed-up of every method by batch size, and the batch sizes at which it is profitable, as records.

    Raises:
        ValueError: none of the methods can be used.
    """
    profiles = profiles_for(target, profiles, draft_model)
    costs, unavailable = drafter_costs(target, profiles, draft_model)
    if not costs:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in unavailable.items()))
    records = []
    for name, cost in costs.items():
        estimates = estimates_by_batch(profiles[name], cost, target, hardware, workload, offload)
        ranges = profitable_batches(profiles[name], cost, target, hardware, workload, offload)
        profitable = ", ".join(f"{a}-{b}" for a, b in ranges) or "never"
        speedups = {f"b={e.batch}": round(e.speedup, 4) for e in estimates}
        records.append({"method": name} | speedups | {"profitable at batch": profitable})
    return records


def parse_rates(text: str, name: str = "--rate") -> list[float]:
    """Parse `0.5,1,2,4`: requests a second; `name`: what a message calls them.

    Raises:
        ValueError: not positive numbers.
    """
    try:
        rates = [float(piece) for piece in text.split(",") if piece.strip()]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise ValueError(f"{name} takes requests a second, as 1,4,16; found {text!r}")
    return rates
