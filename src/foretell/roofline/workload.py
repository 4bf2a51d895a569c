"""Workloads (stage, batch, lengths, number formats, devices) and the forward passes that each consists of."""

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from foretell.roofline.attention import Fusion
from foretell.roofline.formats import HALF_PRECISION, NumberFormat
from foretell.roofline.linear_cost import (
    Array,
    Extents,
    Number,
    attention_pairs,
    expected_active_experts,
    independent_rows,
    kv_positions_read,
)
from foretell.roofline.op_graph import LayerGroup, OpGraph

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
"""Largest accepted value of each size; far beyond what is in use, so that typing errors are refused."""


def check_size(name: str, value: int, stage: Stage) -> None:
    """Check a size of a workload, one of LIMITS.

    Raises:
        ValueError: it is outside its limits.
    """
    least = 0 if name == "context" and stage in ("decode", "verify") else 1
    if not least <= value <= LIMITS[name]:
        raise ValueError(f"{name} must lie between {least} and {LIMITS[name]}, found {value}")


@dataclass(frozen=True)
class Workload:
    """What is to be predicted. Lengths are in tokens per sequence.

    Stages:
        prefill: a prompt of `context` tokens.
        decode: one token after `context` cached ones.
        verify: a chain or tree of `tokens` (its root, the last accepted token, included) after `context` cached ones.
        chunked: prefill of one prompt of `context` in chunks of `chunk`, while `batch` - 1 other sequences decode.
        chat: prefill of `context`, then `generate` decode passes.

    weights, activations, kv: number formats. head: of embedding and LM head where it differs from the other weights, as
    in AWQ and GPTQ checkpoints, which keep them in 16 bits. devices: degree of tensor parallelism. square: count causal
    attention as the full square, as the paper does.

    Raises:
        ValueError: an unknown stage or fusion, or a size outside its limits.
    """

    stage: Stage = "decode"
    batch: int = 1
    context: int = 1024
    tokens: int = 8
    chunk: int = 512
    generate: int = 256
    weights: NumberFormat = HALF_PRECISION
    activations: NumberFormat = HALF_PRECISION
    kv: NumberFormat = HALF_PRECISION
    fusion: Fusion = "flash"
    devices: int = 1
    square: bool = False
    head: NumberFormat | None = None

    @property
    def head_weights(self) -> NumberFormat:
        """The format of embedding and LM head."""
        return self.head or self.weights

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"there is no stage {self.stage!r}; the stages are {', '.join(STAGES)}")
        if self.fusion not in FUSIONS:
            raise ValueError(f"there is no fusion {self.fusion!r}; use {', '.join(FUSIONS)}")
        for name in (f.name for f in fields(self) if f.name in LIMITS):
            check_size(name, getattr(self, name), self.stage)


@dataclass(frozen=True)
class SequenceGroup:
    """`batch` sequences with `tokens` new tokens each, after `cached` positions in the KV cache."""

    batch: Number
    tokens: Number
    cached: Number


@dataclass(frozen=True)
class Phase:
    """Passes of one kind, along the last axis of arrays [workloads, passes].

    sequences: what is in the batch. repeats: how many times each pass is counted (0: it is padding of the array).
    is_prefill: latent attention expands keys and values.
    """

    sequences: tuple[SequenceGroup, ...]
    logit_rows: Number
    repeats: Number
    is_prefill: bool


@dataclass(frozen=True)
class WorkloadSizes:
    """The sizes of workloads that determine their passes, as arrays [workloads]."""

    batch: Array
    context: Array
    tokens: Array
    chunk: Array
    generate: Array


def workload_sizes(workload: Workload) -> WorkloadSizes:
    """The sizes of one workload, as arrays of one element."""
    return WorkloadSizes(*(np.array([float(getattr(workload, f.name))]) for f in fields(WorkloadSizes)))


def throughput_tokens(stage: Stage, sizes: WorkloadSizes) -> Array:
    """Tokens that the throughput of a stage counts: of the prompts in prefill, of both in chunked, else of outputs."""
    if stage == "prefill":
        return sizes.batch * sizes.context
    if stage == "chunked":
        return sizes.context + (sizes.batch - 1) * np.ceil(sizes.context / sizes.chunk)
    return sizes.batch * (sizes.generate if stage == "chat" else 1.0)


def phases(stage: Stage, sizes: WorkloadSizes) -> tuple[Phase, ...]:
    """The passes of a stage, for arrays of workloads."""
    batch, context, tokens = sizes.batch[:, None], sizes.context[:, None], sizes.tokens[:, None]
    prefill = Phase((SequenceGroup(batch, context, 0.0 * context),), batch, 1.0, True)
    if stage == "prefill":
        return (prefill,)
    if stage == "decode":
        return (Phase((SequenceGroup(batch, 1.0, context),), batch, 1.0, False),)
    if stage == "verify":
        return (Phase((SequenceGroup(batch, tokens, context),), batch * tokens, 1.0, False),)
    if stage == "chat":
        step = np.arange(float(sizes.generate.max()))[None, :]
        repeats = (step < sizes.generate[:, None]).astype(np.float64)
        return (prefill, Phase((SequenceGroup(batch, 1.0, context + step),), batch, repeats, False))
    chunk = sizes.chunk[:, None]
    start = np.arange(np.ceil((sizes.context / sizes.chunk).max()))[None, :] * chunk
    new = np.clip(context - start, 0, chunk)
    is_last = (start + new >= context).astype(np.float64)
    prompt, decoding = SequenceGroup(1.0, new, np.minimum(start, context)), SequenceGroup(batch - 1, 1.0, context)
    return (Phase((prompt, decoding), batch - 1 + is_last, (new > 0).astype(np.float64), True),)


def phase_extents(graph: OpGraph, group: LayerGroup, phase: Phase) -> Extents:
    """Sizes of the passes of a phase, as the layers of one group see them."""
    rows: Number = 0.0
    pairs: Number = 0.0
    positions: Number = 0.0
    routed: Number = 0.0
    sequences: Number = 0.0
    for g in phase.sequences:
        rows = rows + g.batch * g.tokens
        sequences = sequences + g.batch * np.where(np.asarray(g.tokens) > 0, 1.0, 0.0)
        routed = routed + g.batch * np.where(np.asarray(g.tokens) > 0, independent_rows(g.tokens), 0.0)
        attended = attention_pairs(g.tokens, g.cached, group.window, graph.square)
        read = kv_positions_read(g.tokens, g.cached, group.window)
        if graph.skip_new_tokens:
            is_decode = np.asarray(g.cached) > 0
            attended = np.where(is_decode, g.tokens * g.cached, attended)
            read = np.where(is_decode, g.cached, read)
        pairs = pairs + g.batch * attended
        positions = positions + g.batch * read
    active_experts = expected_active_experts(graph.expert_count, graph.experts_per_token, routed)
    return Extents(rows, pairs, positions, active_experts, phase.logit_rows, sequences)


def cached_positions(group: LayerGroup, phase: Phase) -> Number:
    """Positions in the KV cache of a layer after each pass, over all sequences."""
    total: Number = 0.0
    for g in phase.sequences:
        kept = g.cached + g.tokens
        total = total + g.batch * (np.minimum(kept, group.window) if group.window else kept)
    return total
