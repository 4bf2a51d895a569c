"""What guessing costs: the network each kind of drafter runs, and when."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from foretell.roofline.analysis import Model
from foretell.roofline.attention import Fusion
from foretell.roofline.formats import Format, parse
from foretell.roofline.graph_builder import network
from foretell.roofline.linear_cost import Amount
from foretell.roofline.model_configs import find
from foretell.roofline.op_graph import Block, Network, Op, elementwise, linear

DraftKind = Literal["none", "model", "layers", "nested", "quantised", "heads", "layer"]

PARTNERS: Mapping[str, tuple[str, ...]] = {
    "llama-68m": ("llama-2-",),
    "llama-3.2-1b": ("llama-3-", "llama-3.2-3b"),
    "qwen2.5-0.5b": ("qwen2.5-",),
    "qwen3-0.6b": ("qwen3-",),
    "gemma-2-2b": ("gemma-2-",),
    "gemma-3-1b": ("gemma-3-",),
    "opt-125m": ("opt-",),
    "smollm2-135m": ("smollm2-",),
    "mistral-7b": ("mixtral-",),
}
"""Smallest built-in model to the families whose vocabulary it shares."""


@dataclass(frozen=True)
class Draft:
    """A drafter's network and rhythm.

    per: how often it runs in a step: once per `level` of the tree, over the nodes expanded there, or once per `step`,
    over the last token of every sequence. extra: parameters it adds to the target's memory. weights, kv: formats that
    differ from the target's.
    """

    network: Network
    per: Literal["level", "step"]
    extra: float
    weights: Format | None = None
    kv: Format | None = None


def partner(name: str) -> str | None:
    """A smaller built-in model with the vocabulary of the named one."""
    for small, families in PARTNERS.items():
        if name != small and name.startswith(families):
            return small
    return None


def share_of(model: Model, layers: float) -> Model:
    """The first layers of a model with its embedding and head (LayerSkip)."""
    c = model.config
    return Model(f"{model.name}, {layers:g} of its layers", replace(c, layers=max(1, round(c.layers * layers))))


def slice_of(model: Model, ffn: float) -> Model:
    """The model with a prefix of every feed-forward (MatFormer)."""
    c = model.config
    experts = replace(c.experts, ffn=max(1, round(c.experts.ffn * ffn))) if c.experts else None
    width = max(1, round(c.ffn * ffn))
    return Model(f"{model.name}, {ffn:g} of its feed-forward", replace(c, ffn=width, experts=experts))


def make(
    kind: DraftKind, target: Model, other: Model | None = None, share: float = 0.25, heads: int = 5
) -> Draft | None:
    """The drafter of a kind for a target; None: guessing costs nothing.

    Raises:
        ValueError: a draft model is needed and none is given or known.
    """
    fusion: Fusion = "flash"
    if kind == "none":
        return None
    if kind == "model":
        small = other or _partner(target)
        if small.config.vocab != target.config.vocab:
            raise ValueError(
                f"{small.name} has {small.config.vocab} tokens and {target.name} {target.config.vocab}: a draft model "
                f"must share the vocabulary"
            )
        priced = small.network(fusion, False)
        return Draft(priced, "level", priced.parameters)
    if kind == "layers":
        return Draft(share_of(target, share).network(fusion, False), "level", 0.0)
    if kind == "nested":
        return Draft(slice_of(target, share).network(fusion, False), "level", 0.0)
    if kind == "quantised":
        priced = target.network(fusion, False)
        return Draft(priced, "level", priced.parameters, parse("4g128"), parse("4g128"))
    return _heads(target, heads) if kind == "heads" else _layer(target)


def _partner(target: Model) -> Model:
    name = partner(target.name)
    if name is None:
        raise ValueError(f"no smaller built-in model shares the vocabulary of {target.name}; name one with --draft")
    return Model(*find(name))


def _heads(target: Model, heads: int) -> Draft:
    """Medusa: each head a residual block and its own vocabulary projection, on the last state (arXiv 2401.10774)."""
    h, v = target.config.hidden, target.config.vocab
    ops: list[Op] = []
    for i in range(heads):
        block = linear(f"head{i}_block", h, h, "x", "whole", bias=True)
        act = elementwise(f"head{i}_act", h, (block.name, "x"), 5.0, 2.0)
        out = Amount(rows=float(v))
        top = replace(linear(f"head{i}_out", h, v, act.name, "column"), write=out, output=out)
        ops.extend((block, act, top))
    priced = Network(
        f"{heads} Medusa heads", (Block("heads", 1, tuple(ops)),), target.config.heads, target.config.context
    )
    return Draft(priced, "step", priced.parameters)


def _layer(target: Model) -> Draft:
    """EAGLE: a fusing projection, one dense decoder layer of the target's shape, the target's head (arXiv
    2401.15077).
    """
    c = target.config
    # A dense layer as wide as what one token visits stands in where the target has experts.
    width = c.experts.ffn * c.experts.active + c.experts.shared_ffn if c.experts else c.ffn
    one = network(replace(c, layers=1, experts=None, ffn=width, window=0, window_layers=()), "EAGLE layer", "flash")
    fuse = Block("fuse", 1, (linear("fuse", 2 * c.hidden, c.hidden, "x", "whole", bias=True),))
    priced = replace(one, blocks=(one.blocks[0], fuse, *one.blocks[1:]))
    added = fuse.ops[0].stored + sum(op.stored for op in one.blocks[1].ops)
    return Draft(priced, "level", added)
