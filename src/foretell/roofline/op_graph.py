"""A model as a graph of operations with linear costs."""

from dataclasses import dataclass, replace
from typing import Literal

from foretell.roofline.linear_cost import ZERO, LinearCost

Kind = Literal["matmul", "attention", "elementwise", "lookup", "all_reduce", "all_gather"]
Split = Literal["column", "row", "heads", "replicated"]
"""How tensor parallelism divides an operation: the columns or rows of its weight, its heads, or not at all."""
LiveActivations = tuple[LinearCost, LinearCost]
"""Elements alive during one operation: (replicated on every device, divided between the devices)."""


@dataclass(frozen=True)
class Op:
    """One operation of a pass.

    kind: decides which peak rate applies. inputs: names of the operations whose results it reads; `x` is the residual
    stream that enters the layer. work: OPs (a multiply-accumulate is two). weights, read, write, kv_read, kv_write:
    elements moved between memory and chip. stored: weights resident in memory. output: elements of the result, zero
    where the result is written to the KV cache.
    """

    name: str
    kind: Kind
    shape: str
    inputs: tuple[str, ...]
    split: Split = "replicated"
    work: LinearCost = ZERO
    weights: LinearCost = ZERO
    read: LinearCost = ZERO
    write: LinearCost = ZERO
    kv_read: LinearCost = ZERO
    kv_write: LinearCost = ZERO
    stored: float = 0.0
    output: LinearCost = ZERO

    @property
    def is_vocabulary(self) -> bool:
        """Whether its weights are those of the embedding or of the LM head."""
        return self.name in ("embedding", "lm_head")

    @property
    def is_collective(self) -> bool:
        """Whether it only moves data between devices."""
        return self.kind in ("all_reduce", "all_gather")


@dataclass(frozen=True)
class LayerGroup:
    """`count` identical layers, or (with count 1) what comes before or after the layers.

    ops: the operations of one layer, in order. window: sliding window in tokens, 0 for none.
    """

    name: str
    count: float
    ops: tuple[Op, ...]
    window: int = 0
    live_activations: tuple[LiveActivations, ...] = ()
    """At those operations of a layer where the elements alive can be most."""
    kv_elements: float = 0.0
    """Elements that one token takes in the KV cache of one layer."""
    kv_heads: int = 1
    state_elements: float = 0.0
    """Elements of the recurrent state that one layer keeps for a sequence."""

    @property
    def is_layer(self) -> bool:
        """Whether it is layers of the model, not what comes before or after them."""
        return bool(self.kv_elements or self.state_elements)


@dataclass(frozen=True)
class OpGraph:
    """The operations of a model, and what its extents depend on.

    heads: attention heads, which the number of devices must divide. context: longest trained length, in tokens.
    expert_count, experts_per_token: 0 for a dense model. square: causal attention is counted as the full square.
    skip_new_tokens: decode does not attend to the new token itself, as in the paper.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    heads: int
    context: int
    expert_count: float = 0.0
    experts_per_token: float = 0.0
    square: bool = False
    skip_new_tokens: bool = False

    @property
    def parameters(self) -> float:
        """Number of weights stored."""
        return sum(group.count * op.stored for group in self.groups for op in group.ops)

    @property
    def layers(self) -> float:
        """Number of transformer layers."""
        return sum(group.count for group in self.groups if group.is_layer)

    @property
    def kv_elements(self) -> float:
        """Elements that one token takes in the KV cache of all layers."""
        return sum(group.count * group.kv_elements for group in self.groups)


def linear(
    name: str, in_width: int, out_width: int, source: str, split: Split, bias: bool = False, to_cache: bool = False
) -> Op:
    """A matrix multiplication of every row with an [in_width, out_width] weight."""
    out = LinearCost(rows=out_width)
    return Op(
        name,
        "matmul",
        f"{in_width} × {out_width}",
        (source,),
        split,
        work=LinearCost(rows=2.0 * in_width * out_width),
        weights=LinearCost(constant=in_width * out_width + out_width * bias),
        read=LinearCost(rows=in_width),
        write=ZERO if to_cache else out,
        kv_write=out if to_cache else ZERO,
        stored=in_width * out_width + out_width * bias,
        output=ZERO if to_cache else out,
    )


def elementwise(
    name: str,
    width: float,
    inputs: tuple[str, ...],
    ops: float,
    operands: float,
    split: Split = "replicated",
    weights: float = 0,
) -> Op:
    """An elementwise operation: per row, `width` elements from `operands` such rows, at `ops` OPs per element."""
    return Op(
        name,
        "elementwise",
        f"{width:g}",
        inputs,
        split,
        work=LinearCost(rows=ops * width),
        weights=LinearCost(constant=weights),
        read=LinearCost(rows=operands * width),
        write=LinearCost(rows=width),
        stored=weights,
        output=LinearCost(rows=width),
    )


def live_activations(ops: tuple[Op, ...], residual: LinearCost) -> tuple[LiveActivations, ...]:
    """Elements alive while each operation runs, without the operations that another one dominates.

    A tensor is alive from the operation that computes it to its last use. `residual`: size of the residual stream.
    """
    last = {source: at for at, op in enumerate(ops) for source in op.inputs}
    last[ops[-1].name] = len(ops)
    tensors: dict[str, tuple[LinearCost, bool]] = {"x": (residual, False)}
    steps: list[LiveActivations] = []
    for at, op in enumerate(ops):
        if op.is_collective:
            tensors[op.name] = tensors.pop(op.inputs[0])
            continue
        tensors[op.name] = (op.output, op.split in ("column", "heads"))
        replicated, divided = ZERO, ZERO
        for size, is_divided in tensors.values():
            replicated, divided = (replicated, divided + size) if is_divided else (replicated + size, divided)
        steps.append((replicated, divided))
        tensors = {name: t for name, t in tensors.items() if last.get(name, -1) > at}
    return tuple(s for s in dict.fromkeys(steps) if not any(_dominates(o, s) for o in steps if o != s))


def _dominates(one: LiveActivations, other: LiveActivations) -> bool:
    return all(
        x >= y for a, b in zip(one, other, strict=True) for x, y in zip(a.coefficients, b.coefficients, strict=True)
    )


def with_live_activations(group: LayerGroup, residual: LinearCost) -> LayerGroup:
    """The group with its `live_activations` filled in."""
    return replace(group, live_activations=live_activations(group.ops, residual))
