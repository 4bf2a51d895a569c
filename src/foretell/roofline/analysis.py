"""One question answered in full: every operation, the totals, the memory, and what would still fit."""

from dataclasses import dataclass, replace
from functools import lru_cache

from foretell.model.config import ModelConfig
from foretell.roofline.attention import Fusion
from foretell.roofline.cost import Cost, Line, Rates, lines, rates, total, value
from foretell.roofline.graph_builder import network
from foretell.roofline.hardware import Hardware
from foretell.roofline.memory import Memory, largest, memory
from foretell.roofline.op_graph import Network
from foretell.roofline.workload import Phase, Setting, phases, sizes


@dataclass(frozen=True)
class Model:
    """A named model that can be priced: its configuration, or for drafts and variants a network of its own."""

    name: str
    config: ModelConfig

    def network(self, fusion: Fusion, prompt: bool, square: bool = False) -> Network:
        """Its price list under a fusion; `prompt`: with latent attention expanded."""
        return _network(self, fusion, prompt and self.config.latent is not None, square)


@lru_cache(maxsize=512)
def _network(model: Model, fusion: Fusion, expanded: bool, square: bool) -> Network:
    return network(model.config, model.name, fusion, not expanded, square)


@dataclass(frozen=True)
class Analysis:
    """Answer to a setting: operations in order (per layer, over all passes), their total, memory per device, and what
    fits.
    """

    model: Model
    hardware: Hardware
    setting: Setting
    lines: tuple[Line, ...]
    total: Cost
    memory: Memory
    largest_batch: int | None
    longest_context: int | None

    @property
    def seconds(self) -> float:
        """Time of the setting."""
        return value(self.total.seconds)

    @property
    def tokens(self) -> float:
        """Tokens of output it yields: per pass one per sequence, for verification at most the tokens verified."""
        s = self.setting
        return s.batch * {"chat": s.generate, "prefill": 1, "chunked": 1}.get(s.stage, 1)

    @property
    def fits(self) -> bool | None:
        """Whether memory suffices; None where the device's capacity is not known."""
        capacity = self.hardware.capacity
        return None if capacity is None else value(self.memory.total) <= capacity


def check(model: Model, setting: Setting) -> None:
    """Refuse what the model cannot do.

    Raises:
        ValueError: the number of devices does not divide the heads.
    """
    if model.config.heads % setting.devices:
        raise ValueError(
            f"{setting.devices} devices cannot share the {model.config.heads} heads of {model.name} evenly"
        )


def run(model: Model, setting: Setting) -> list[tuple[Network, Phase]]:
    """The phases of a setting, each with the network that runs it."""
    return [
        (model.network(setting.fusion, phase.prompt, setting.square), phase)
        for phase in phases(setting.stage, sizes(setting))
    ]


def analyse(model: Model, hardware: Hardware, setting: Setting) -> Analysis:
    """Price a setting on a device.

    Raises:
        ValueError: devices that do not divide the heads, no link between them, or a format the hardware cannot
            multiply.
    """
    check(model, setting)
    r = rates(setting, hardware)
    found: list[Line] = []
    for priced, phase in run(model, setting):
        found = _merge(found, lines(priced, phase, r))
    if setting.devices == 1:
        found = [line for line in found if line.op.kind not in ("reduce", "gather")]
    return Analysis(
        model, hardware, setting, tuple(found), total(found), held(model, setting, r),
        _limit("batch", model, setting, r, hardware), _limit("context", model, setting, r, hardware),
    )  # fmt: skip


def held(model: Model, setting: Setting, r: Rates) -> Memory:
    """Memory of a setting."""
    return memory(run(model, setting), r)


def seconds(model: Model, hardware: Hardware, setting: Setting) -> float:
    """Time of a setting, without the rest of the answer."""
    r = rates(setting, hardware)
    return sum(value(total(lines(n, p, r)).seconds) for n, p in run(model, setting))


def _merge(first: list[Line], second: list[Line]) -> list[Line]:
    """Lines of two phases added by operation; an operation that only one has is kept in its place at the end of its
    block.
    """
    merged = list(first)
    for line in second:
        at = next((i for i, m in enumerate(merged) if (m.block, m.op.name) == (line.block, line.op.name)), None)
        if at is None:
            inside = [i for i, m in enumerate(merged) if m.block == line.block]
            merged.insert(inside[-1] + 1 if inside else len(merged), line)
        else:
            merged[at] = replace(merged[at], cost=merged[at].cost + line.cost)
    return merged


def _limit(name: str, model: Model, setting: Setting, r: Rates, hardware: Hardware) -> int | None:
    """Largest batch or context that fits; chat and chunked prefill are judged by their longest moment."""
    capacity = hardware.capacity
    if capacity is None:
        return None

    def fits(size: int) -> bool:
        asked = replace(setting, batch=size) if name == "batch" else replace(setting, context=size)
        if asked.stage == "chat":
            asked = replace(asked, generate=1) if name == "context" else asked
        elif asked.stage == "chunked":
            asked = replace(asked, chunk=max(asked.chunk, asked.context // 64))
        return value(held(model, asked, r).total) <= capacity

    return largest(name, fits)
