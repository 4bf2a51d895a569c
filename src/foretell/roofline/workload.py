"""What is asked: stage, batch, lengths, formats, fusion, devices; and the passes over the network that answering it
takes.
"""

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from foretell.roofline.attention import Fusion
from foretell.roofline.formats import SIXTEEN, Format
from foretell.roofline.linear_cost import Array, Extents, Number, distinct_experts, pairs_attended, span_read
from foretell.roofline.op_graph import Block, Network

Stage = Literal["prefill", "decode", "verify", "chunked", "chat"]
STAGES: tuple[Stage, ...] = ("prefill", "decode", "verify", "chunked", "chat")
FUSIONS: tuple[Fusion, ...] = ("none", "flash", "full")
LIMITS = {
    "batch": 1 << 20,
    "context": 1 << 27,
    "tokens": 1 << 20,
    "chunk": 1 << 20,
    "generate": 1 << 17,
    "devices": 1024,
}


@dataclass(frozen=True)
class Setting:
    """One question. Lengths are tokens per sequence.

    stage: prefill of `context` tokens; decode of one token after `context` cached ones; verify a chain or tree of
    `tokens` (the token already decided included) after `context`; chunked prefill of one prompt of `context` in pieces
    of `chunk` while `batch` - 1 other sequences decode; chat: prefill of `context`, then `generate` decodes. square:
    count causal attention as the full square, as the paper does. devices: how many share the layers (tensor
    parallelism).
    """

    stage: Stage = "decode"
    batch: int = 1
    context: int = 1024
    tokens: int = 8
    chunk: int = 512
    generate: int = 256
    weights: Format = SIXTEEN
    activations: Format = SIXTEEN
    kv: Format = SIXTEEN
    fusion: Fusion = "flash"
    devices: int = 1
    square: bool = False

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"there is no stage {self.stage!r}; the stages are {', '.join(STAGES)}")
        if self.fusion not in FUSIONS:
            raise ValueError(f"there is no fusion {self.fusion!r}; use {', '.join(FUSIONS)}")
        for name in (f.name for f in fields(self) if f.name in LIMITS):
            value, least = getattr(self, name), 0 if name == "context" and self.stage in ("decode", "verify") else 1
            if not least <= value <= LIMITS[name]:
                raise ValueError(f"{name} must lie between {least} and {LIMITS[name]}, found {value}")


@dataclass(frozen=True)
class Group:
    """`batch` sequences that each read `tokens` new ones after `past` cached ones."""

    batch: Number
    tokens: Number
    past: Number


@dataclass(frozen=True)
class Phase:
    """Passes of one kind, along the last axis of the arrays [settings, passes]; `weight` says how often each counts.

    prompt: keys and values of latent attention are expanded, as prompts are processed.
    """

    groups: tuple[Group, ...]
    outputs: Number
    weight: Number
    prompt: bool


@dataclass(frozen=True)
class Sizes:
    """The numbers of a setting that shape its passes, as arrays [settings]."""

    batch: Array
    context: Array
    tokens: Array
    chunk: Array
    generate: Array


def sizes(setting: Setting) -> Sizes:
    """The sizes of one setting, as arrays of one element."""
    return Sizes(*(np.array([float(getattr(setting, f.name))]) for f in fields(Sizes)))


def phases(stage: Stage, given: Sizes) -> tuple[Phase, ...]:
    """The passes a stage is made of, for arrays of settings."""
    b, s, n = given.batch[:, None], given.context[:, None], given.tokens[:, None]
    if stage == "prefill":
        return (Phase((Group(b, s, 0.0 * s),), b, 1.0, True),)
    if stage == "decode":
        return (Phase((Group(b, 1.0, s),), b, 1.0, False),)
    if stage == "verify":
        return (Phase((Group(b, n, s),), b * n, 1.0, False),)
    if stage == "chat":
        step = np.arange(float(given.generate.max()))[None, :]
        counted = (step < given.generate[:, None]).astype(np.float64)
        return (Phase((Group(b, s, 0.0 * s),), b, 1.0, True), Phase((Group(b, 1.0, s + step),), b, counted, False))
    size = given.chunk[:, None]
    start = np.arange(np.ceil((given.context / given.chunk).max()))[None, :] * size
    taken = np.clip(s - start, 0, size)
    riders = Group(b - 1, 1.0, s)
    last = (start + taken >= s).astype(np.float64)
    return (
        Phase((Group(1.0, taken, np.minimum(start, s)), riders), b - 1 + last, (taken > 0).astype(np.float64), True),
    )


def extents(network: Network, block: Block, phase: Phase) -> Extents:
    """Sizes of the passes of a phase as the layers of one block see them."""
    rows: Number = 0.0
    pairs: Number = 0.0
    span: Number = 0.0
    for g in phase.groups:
        rows = rows + g.batch * g.tokens
        seen, read = (
            pairs_attended(g.tokens, g.past, block.window, network.square),
            span_read(g.tokens, g.past, block.window),
        )
        if network.skip_new:
            seen, read = (
                np.where(np.asarray(g.past) > 0, g.tokens * g.past, seen),
                np.where(np.asarray(g.past) > 0, g.past, read),
            )
        pairs = pairs + g.batch * seen
        span = span + g.batch * read
    return Extents(rows, pairs, span, distinct_experts(network.experts, network.active, rows), phase.outputs)


def cached(block: Block, phase: Phase) -> Number:
    """Positions whose keys and values are kept after each pass, over all sequences."""
    total: Number = 0.0
    for g in phase.groups:
        kept = g.past + g.tokens
        total = total + g.batch * (np.minimum(kept, block.window) if block.window else kept)
    return total
