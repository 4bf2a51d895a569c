"""Each method in the picture: tokens per pass, time of the pass, time of drafting, speed-up and goodput, at the best
shape.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from foretell.roofline.acceptance import Acceptance, Growth, grow
from foretell.roofline.analysis import Model
from foretell.roofline.cost import Cost, lines, rates, total
from foretell.roofline.drafter_cost import Draft
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import Array, Number
from foretell.roofline.method_profiles import Method
from foretell.roofline.op_graph import Network
from foretell.roofline.workload import Group, Phase, Setting

MOST_NODES, DEEPEST = 256, 12


@dataclass(frozen=True)
class Gain:
    """What a method does at one setting.

    nodes: tokens verified per sequence, root included; 1: do not speculate. tokens: expected per pass and sequence.
    Times in seconds per pass. speedup: over plain decoding. goodput: tokens per second of the whole batch. bytes, ops:
    per token of one sequence.
    """

    method: Method
    nodes: int
    depth: int
    tokens: float
    pass_seconds: float
    draft_seconds: float
    plain_seconds: float
    batch: int
    bytes: float
    ops: float

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens * self.plain_seconds / (self.pass_seconds + self.draft_seconds)

    @property
    def goodput(self) -> float:
        """Accepted tokens per second of the batch."""
        return self.batch * self.tokens / (self.pass_seconds + self.draft_seconds)

    @property
    def break_even(self) -> float:
        """Tokens per pass from which the method pays."""
        return (self.pass_seconds + self.draft_seconds) / self.plain_seconds


def verification(network: Network, hardware: Hardware, setting: Setting, widths: Array) -> Cost:
    """Cost of one pass for every number of tokens per sequence in `widths`."""
    n = widths[:, None]
    phase = Phase((Group(float(setting.batch), n, float(setting.context)),), setting.batch * n, 1.0, False)
    return total(lines(network, phase, rates(setting, hardware)))


def best(
    method: Method, draft: Draft | None, model: Model, hardware: Hardware, setting: Setting, nodes: int = MOST_NODES
) -> Gain:
    """The method at the shape that gains most, among all chains or trees up to `nodes` tokens and DEEPEST levels.

    Raises:
        ValueError: fewer than one node.
    """
    if nodes < 1:
        raise ValueError(f"a tree needs at least one node, found a budget of {nodes}")
    widths = np.arange(1.0, max(nodes, method.nodes if method.shape == "fixed" else 1) + 1)
    target = verification(model.network(setting.fusion, False, setting.square), hardware, setting, widths)
    passes = np.broadcast_to(np.asarray(target.seconds), widths.shape)
    drafting = _drafting(draft, hardware, setting, widths)
    found = [(1, 0, 1.0, 0.0)]
    if method.shape == "fixed":
        found.append((method.nodes, 1, method.tokens, 0.0))
    else:
        found.extend(_candidates(method, draft, nodes, np.asarray(drafting.seconds), passes))
    n, depth, tokens, seconds = max(found, key=lambda c: c[2] / (passes[c[0] - 1] + c[3]))
    once = _spent(method, draft, n, depth, drafting)
    return Gain(
        method, n, depth, tokens, float(passes[n - 1]), seconds, float(passes[0]), setting.batch,
        (float(_at(target.bytes, n)) + once[0]) / tokens / setting.batch,
        (float(_at(target.ops, n)) + once[1]) / tokens / setting.batch,
    )  # fmt: skip


def _at(values: Number, n: int) -> float:
    return float(np.atleast_1d(np.asarray(values, dtype=np.float64))[min(n, np.size(values)) - 1])


def _drafting(draft: Draft | None, hardware: Hardware, setting: Setting, widths: Array) -> Cost:
    if draft is None:
        return Cost(seconds=np.zeros_like(widths))
    asked = replace(setting, weights=draft.weights or setting.weights, kv=draft.kv or setting.kv)
    if draft.per == "step":
        widths = widths[:1]
    return verification(draft.network, hardware, asked, widths)


@lru_cache(maxsize=4096)
def growth(acceptance: Acceptance, nodes: int, depth: int) -> Growth:
    """Remembered `grow`: trees do not depend on the setting."""
    return grow(acceptance, nodes, depth)


def _candidates(
    method: Method, draft: Draft | None, nodes: int, drafting: Array, passes: Array
) -> list[tuple[int, int, float, float]]:
    """The best size for every depth: (nodes, depth, tokens, draft seconds)."""
    found = []
    for depth in range(1, (nodes if method.shape == "chain" else DEEPEST) + 1):
        if method.shape == "chain" and depth > 4 * DEEPEST:
            break
        tree = growth(method.acceptance, nodes, depth)
        tokens = np.array(tree.tokens)
        seconds = _level_seconds(draft, tree, drafting)
        at = int(np.argmax(tokens / (passes[: len(tokens)] + seconds)))
        if at:
            found.append((at + 1, depth, float(tokens[at]), float(seconds[at])))
    return found


def _level_seconds(draft: Draft | None, tree: Growth, drafting: Array) -> Array:
    if draft is None:
        return np.zeros(len(tree.tokens))
    if draft.per == "step":
        return np.where(np.arange(len(tree.tokens)) > 0, drafting[0], 0.0)
    widths = np.array(tree.expanded)
    return np.asarray(np.where(widths > 0, drafting[np.maximum(widths, 1) - 1], 0.0).sum(1))


def _spent(method: Method, draft: Draft | None, nodes: int, depth: int, drafting: Cost) -> tuple[float, float]:
    """Bytes and OPs of drafting one step at the chosen shape."""
    if draft is None or nodes == 1:
        return 0.0, 0.0
    widths = growth(method.acceptance, nodes, depth).expanded[-1]
    if draft.per == "step":
        widths = (1,)
    return tuple(sum(_at(v, w) for w in widths if w) for v in (drafting.bytes, drafting.ops))  # type: ignore[return-value]
