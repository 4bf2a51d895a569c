"""Methods that change what a pass costs: early exit, layer skipping, contextual sparsity, nested feed-forward, fewer
bits.

They are no speculation: the text changes (or the model does), one pass still yields one token. Section 4.1 of the
survey.
"""

from dataclasses import dataclass, replace

from foretell.roofline.analysis import Model
from foretell.roofline.cost import lines, rates, total, value
from foretell.roofline.drafter_cost import slice_of
from foretell.roofline.formats import parse
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import NOTHING, Amount, distinct_experts
from foretell.roofline.op_graph import Block, Network, Op, linear
from foretell.roofline.workload import Setting, phases, sizes

PREDICTOR_RANK = 1000
SPARSE_OPS = ("gate_proj", "up_proj", "mlp_act", "down_proj")


def exit_depth(share: float, rows: float) -> float:
    """Expected share of layers a batch runs when each row alone would run `share` on average and the deepest row
    decides.

    The share of one row is taken as Beta(a, 1) with mean `share`; the largest of N such is Beta(aN, 1).
    """
    if share >= 1:
        return 1.0
    a = share / (1 - share) * rows
    return a / (a + 1)


def early_exit(network: Network, share: float, rows: float, tested: float = 0.0) -> Network:
    """CALM (arXiv 2207.07061): rows leave after part of the layers; the layers not run still project keys and values.

    tested: how many times per pass the language-model head is run to measure confidence (0: state saturation or a small
    classifier).
    """
    run = exit_depth(share, rows)
    blocks: list[Block] = []
    for block in network.blocks:
        if not block.kv:
            ops = tuple(_repeated(op, 1 + tested) if op.name == "lm_head" else op for op in block.ops)
            blocks.append(replace(block, ops=ops))
            continue
        cached = tuple(op for op in block.ops if op.kv_write != NOTHING)
        blocks.append(replace(block, count=block.count * run))
        blocks.append(
            Block(f"{block.name} copied", block.count * (1 - run), cached, block.window, kv_heads=block.kv_heads)
        )
    return replace(network, blocks=tuple(blocks))


def _repeated(op: Op, times: float) -> Op:
    return replace(
        op,
        work=op.work.times(times),
        weights=op.weights.times(times),
        read=op.read.times(times),
        write=op.write.times(times),
    )


def skip_layers(network: Network, share: float) -> Network:
    """SkipDecode (arXiv 2307.02628): all rows of a position run the same, decreasing number of layers; `share` is its
    mean.

    Skipped layers keep no keys and values and read none, whatever the batch.
    """
    return replace(network, blocks=tuple(replace(b, count=b.count * share) if b.kv else b for b in network.blocks))


def sparse(network: Network, hidden: int, ffn: int, density: float, rows: float) -> Network:
    """Deja Vu (arXiv 2310.17157): of the feed-forward only the neurons that some row needs, and a predictor that finds
    them.

    A batch needs the union of its rows' neurons, 1 - (1 - density)^N of all.
    """
    union = float(distinct_experts(1.0, density, rows))
    blocks = []
    for block in network.blocks:
        ops = tuple(_thinned(op, density, union) if op.name in SPARSE_OPS else op for op in block.ops)
        if block.kv:
            first = linear("predictor_in", hidden, PREDICTOR_RANK, "mlp_norm", "whole")
            ops = (*ops, first, linear("predictor_out", PREDICTOR_RANK, ffn, "predictor_in", "column"))
        blocks.append(replace(block, ops=ops))
    return replace(network, blocks=tuple(blocks))


def _thinned(op: Op, density: float, union: float) -> Op:
    read = op.read.times(density) if op.name in ("mlp_act", "down_proj") else op.read
    write = op.write.times(density) if op.name != "down_proj" else op.write
    weights = Amount(one=op.weights.one * union)
    return replace(op, work=op.work.times(density), weights=weights, read=read, write=write)


@dataclass(frozen=True)
class Change:
    """A cheaper pass: its time against the plain one, and bytes and OPs against the plain ones."""

    name: str
    title: str
    seconds: float
    plain: float
    bytes: float
    ops: float

    @property
    def speedup(self) -> float:
        """Over the plain pass."""
        return self.plain / self.seconds


def cost_changes(
    model: Model, hardware: Hardware, setting: Setting, share: float = 0.5, density: float = 0.2
) -> list[Change]:
    """What the methods of section 4.1 would save on a decode pass at the batch and context of a setting.

    share: part of the layers that early exit and skipping run on average. density: part of the feed-forward that a
    token needs. Raises:
        ValueError: a share or density outside (0, 1].
    """
    for name, part in (("share of layers", share), ("density", density)):
        if not 0 < part <= 1:
            raise ValueError(f"the {name} must lie in (0, 1], found {part:g}")
    asked, c = replace(setting, stage="decode"), model.config
    base = model.network(setting.fusion, False, setting.square)
    rows = float(setting.batch)
    four, eight = parse("4g128"), parse("8")
    table: list[tuple[str, str, Network, Setting]] = [
        ("early-exit", f"Early exit, {share:g} of the layers per token (CALM)", early_exit(base, share, rows), asked),
        (
            "skip-layers",
            f"Layer skipping, {share:g} of the layers per position (SkipDecode)",
            skip_layers(base, share),
            asked,
        ),
        ("nested", "Half the feed-forward (MatFormer)", slice_of(model, 0.5).network(setting.fusion, False), asked),
        ("weights-4", "Weights in 4 bits, groups of 128", base, replace(asked, weights=four)),
        (
            "weights-8-activations-8",
            "Weights and activations in 8 bits",
            base,
            replace(asked, weights=eight, activations=eight),
        ),
        ("kv-4", "Cache in 4 bits, groups of 128", base, replace(asked, kv=four)),
    ]
    if c.experts is None:
        thin = sparse(base, c.hidden, c.ffn, density, rows)
        table.append(("sparse", f"Contextual sparsity, {density:g} of the feed-forward (Deja Vu)", thin, asked))
    plain = _cost(base, hardware, asked)[0]
    changes = [
        Change(n, t, seconds, plain, moved, ops)
        for n, t, net, s in table
        for seconds, moved, ops in [_cost(net, hardware, s)]
    ]
    return sorted(changes, key=lambda found: found.seconds)


def _cost(network: Network, hardware: Hardware, setting: Setting) -> tuple[float, float, float]:
    (phase,) = phases("decode", sizes(setting))
    cost = total(lines(network, phase, rates(setting, hardware)))
    return value(cost.seconds), value(cost.bytes), value(cost.ops)
