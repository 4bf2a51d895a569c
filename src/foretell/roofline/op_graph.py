"""A network as a list of priced operations: the data that every question is asked of."""

from dataclasses import dataclass, replace
from typing import Literal

from foretell.roofline.linear_cost import NOTHING, Amount

Kind = Literal["matmul", "attend", "vector", "lookup", "reduce", "gather"]
Split = Literal["column", "row", "heads", "whole"]


@dataclass(frozen=True)
class Op:
    """One operation of a pass.

    work: OPs (a multiply-accumulate is two). weights, read, write, kv_read, kv_write: elements moved between memory and
    chip. stored: weights resident in memory. output: elements of the tensor it leaves behind (empty where that goes to
    the cache). split: how tensor parallelism cuts it. kind: which peak binds it, `reduce` and `gather` being traffic
    between devices.
    """

    name: str
    kind: Kind
    shape: str
    inputs: tuple[str, ...]
    split: Split = "whole"
    work: Amount = NOTHING
    weights: Amount = NOTHING
    read: Amount = NOTHING
    write: Amount = NOTHING
    kv_read: Amount = NOTHING
    kv_write: Amount = NOTHING
    stored: float = 0.0
    output: Amount = NOTHING


@dataclass(frozen=True)
class Block:
    """`count` identical layers (or, with count 1, the parts before and after them): their operations in order, and
    their window.
    """

    name: str
    count: float
    ops: tuple[Op, ...]
    window: int = 0
    live: tuple[tuple[Amount, Amount], ...] = ()
    """Elements alive at each operation: (held whole on every device, cut across devices).

    Only steps that can be the peak.
    """
    kv: float = 0.0
    """Elements a cached token takes in one of these layers."""
    kv_heads: int = 1


@dataclass(frozen=True)
class Network:
    """A model as the analyzer sees it.

    experts, active: parameters of the `touched` extent. heads: what tensor parallelism must divide. context: longest
    trained length. square: attention counted as the full square. skip_new: the paper's decode, which does not attend to
    the new token itself.
    """

    name: str
    blocks: tuple[Block, ...]
    heads: int
    context: int
    experts: float = 0.0
    active: float = 0.0
    square: bool = False
    skip_new: bool = False

    @property
    def parameters(self) -> float:
        """Number of weights stored."""
        return sum(b.count * op.stored for b in self.blocks for op in b.ops)

    @property
    def layers(self) -> float:
        """Number of transformer layers."""
        return sum(b.count for b in self.blocks if b.kv)


def linear(name: str, i: int, o: int, source: str, split: Split, bias: bool = False, to_cache: bool = False) -> Op:
    """A matrix multiplication of every row with an [i, o] weight."""
    out = Amount(rows=o)
    return Op(
        name,
        "matmul",
        f"{i} × {o}",
        (source,),
        split,
        work=Amount(rows=2.0 * i * o),
        weights=Amount(one=i * o + o * bias),
        read=Amount(rows=i),
        write=NOTHING if to_cache else out,
        kv_write=out if to_cache else NOTHING,
        stored=i * o + o * bias,
        output=NOTHING if to_cache else out,
    )


def elementwise(
    name: str,
    width: float,
    inputs: tuple[str, ...],
    ops: float,
    operands: float,
    split: Split = "whole",
    weights: float = 0,
) -> Op:
    """A row-wise operation: `ops` per element of a `width`-wide result, reading `operands` such rows."""
    return Op(
        name,
        "vector",
        f"{width:g}",
        inputs,
        split,
        work=Amount(rows=ops * width),
        weights=Amount(one=weights),
        read=Amount(rows=operands * width),
        write=Amount(rows=width),
        stored=weights,
        output=Amount(rows=width),
    )


def alive(ops: tuple[Op, ...], entering: Amount) -> tuple[tuple[Amount, Amount], ...]:
    """Elements alive while each operation runs: every tensor from its making to its last use, the residual stream `x`
    included.

    Returns (whole, cut) per operation: what every device holds in full and what tensor parallelism divides.
    """
    last = {source: at for at, op in enumerate(ops) for source in op.inputs}
    last[ops[-1].name] = len(ops)
    tensors: dict[str, tuple[Amount, bool]] = {"x": (entering, False)}
    steps: list[tuple[Amount, Amount]] = []
    for at, op in enumerate(ops):
        if op.kind in ("reduce", "gather"):
            tensors[op.name] = tensors.pop(op.inputs[0])
            continue
        tensors[op.name] = (op.output, op.split in ("column", "heads"))
        whole, cut = NOTHING, NOTHING
        for size, is_cut in tensors.values():
            whole, cut = (whole, cut + size) if is_cut else (whole + size, cut)
        steps.append((whole, cut))
        tensors = {name: t for name, t in tensors.items() if last.get(name, -1) > at}
    return tuple(s for s in dict.fromkeys(steps) if not any(_exceeds(o, s) for o in steps if o != s))


def _exceeds(one: tuple[Amount, Amount], other: tuple[Amount, Amount]) -> bool:
    return all(x >= y for a, b in zip(one, other, strict=True) for x, y in zip(a.values, b.values, strict=True))


def with_lifetimes(block: Block, entering: Amount) -> Block:
    """The block with its table of live tensors filled in."""
    return replace(block, live=alive(block.ops, entering))
