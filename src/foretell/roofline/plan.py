"""Which method to use: all of them ranked by predicted gain, and where each stops paying."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foretell.roofline.analysis import Model, analyse
from foretell.roofline.cost import value
from foretell.roofline.drafter_cost import Draft, make
from foretell.roofline.hardware import Hardware
from foretell.roofline.method_profiles import Method, catalogue
from foretell.roofline.speculation import MOST_NODES, Gain, best
from foretell.roofline.workload import Setting

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Plan:
    """Methods ranked by speed-up at a setting; `refused` says why the others cannot be used; memory for target and
    draft.
    """

    gains: tuple[Gain, ...]
    refused: Mapping[str, str]
    plain: Gain
    fits: Mapping[str, bool | None]

    @property
    def advice(self) -> str:
        """One sentence: which method, or not to speculate."""
        if not self.gains or self.gains[0].nodes == 1:
            why = "no method gains more tokens than its pass and its drafting cost"
            return f"Do not speculate: at batch {self.plain.batch} {why}."
        top = self.gains[0]
        shape = (
            f"a chain of {top.nodes - 1}"
            if top.method.shape == "chain"
            else f"a tree of {top.nodes - 1} nodes, depth {top.depth}"
        )
        if top.method.shape == "fixed":
            shape = f"its {top.nodes - 1} fixed nodes"
        return f"Use {top.method.name} with {shape}: {top.speedup:.2f}× predicted ({top.tokens:.2f} tokens a pass)."


def drafts(
    target: Model, methods: Mapping[str, Method], other: Model | None
) -> tuple[dict[str, Draft | None], dict[str, str]]:
    """The drafter of every method for a target, and the reason where there is none."""
    ready: dict[str, Draft | None] = {}
    refused: dict[str, str] = {}
    for name, method in methods.items():
        try:
            ready[name] = make(method.draft, target, other, method.share, method.heads)
        except ValueError as error:
            refused[name] = str(error)
    return ready, refused


def plan(
    target: Model,
    hardware: Hardware,
    setting: Setting,
    methods: Mapping[str, Method] | None = None,
    other: Model | None = None,
    nodes: int = MOST_NODES,
) -> Plan:
    """Rank methods at the batch, context and formats of a setting (its stage is ignored: methods decode).

    other: draft model, a known partner by default. nodes: largest tree.
    """
    table = catalogue() if methods is None else methods
    ready, refused = drafts(target, table, other)
    gains = [best(table[name], draft, target, hardware, setting, nodes) for name, draft in ready.items()]
    gains.sort(key=lambda g: -g.speedup)
    nothing = Method(
        "autoregressive", "Plain decoding", "none", "fixed", next(iter(catalogue().values())).acceptance, "exact"
    )
    plain = best(replace(nothing, nodes=1, tokens=1.0), None, target, hardware, setting, 1)
    held = value(analyse(target, hardware, replace(setting, stage="decode")).memory.total)
    return Plan(tuple(gains), refused, plain, {n: _fits(d, held, hardware, setting) for n, d in ready.items()})


def _fits(draft: Draft | None, held: float, hardware: Hardware, setting: Setting) -> bool | None:
    if hardware.capacity is None:
        return None
    if draft is None:
        return held <= hardware.capacity
    form, kv = draft.weights or setting.weights, draft.kv or setting.kv
    cache = sum(b.count * b.kv for b in draft.network.blocks) * kv.bytes * setting.batch * (setting.context + 1)
    return held + draft.extra * form.bytes / setting.devices + cache / setting.devices <= hardware.capacity


def by_batch(
    method: Method,
    draft: Draft | None,
    target: Model,
    hardware: Hardware,
    setting: Setting,
    batches: Sequence[int] = BATCHES,
) -> list[Gain]:
    """The method at its best shape for each batch size."""
    return [best(method, draft, target, hardware, replace(setting, batch=b)) for b in batches]


def paying_batches(
    method: Method, draft: Draft | None, target: Model, hardware: Hardware, setting: Setting, least: float = 1.0
) -> list[tuple[int, int]]:
    """Ranges of batch sizes within 1 to 256 in which the method's speed-up exceeds `least`, edges found by bisection.

    A dense model pays up to some batch; a mixture of experts often pays only between two.
    """

    def pays(batch: int) -> bool:
        return best(method, draft, target, hardware, replace(setting, batch=batch)).speedup > least + 1e-9

    known = {b: pays(b) for b in BATCHES}
    edges: list[int] = []
    for low, high in itertools.pairwise(BATCHES):
        if known[low] != known[high]:
            a, b = low, high
            while b - a > 1:
                middle = (a + b) // 2
                a, b = (middle, b) if pays(middle) == known[low] else (a, middle)
            edges.append(b)
    starts = ([1] if known[1] else []) + [e for i, e in enumerate(edges) if (i % 2 == 0) != known[1]]
    ends = [e - 1 for i, e in enumerate(edges) if (i % 2 == 0) == known[1]] + (
        [BATCHES[-1]] if known[BATCHES[-1]] else []
    )
    return list(zip(starts, ends, strict=True))
