"""Predicted gains in time of variants, by the roofline model: time of a decode pass over that of the exact model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from foretell.bench.step import KV_FORMATS
from foretell.model.cache.policy import parse_target_policy
from foretell.model.config.model import ModelConfig
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.cost import device_rates, op_costs, scalar, total_cost
from foretell.roofline.drafting_time import DraftingTime
from foretell.roofline.formats import NumberFormat, parse_format
from foretell.roofline.hardware import Hardware
from foretell.roofline.measured import PLAIN, MeasuredMethod, calibrated_speedup
from foretell.roofline.method_profiles import cost_of_profile, method_profiles, profile_of_method
from foretell.roofline.model_variants import early_exit
from foretell.roofline.op_graph import Op, OpGraph
from foretell.roofline.plan import profiles_for
from foretell.roofline.speculation import estimate_method
from foretell.roofline.workload import Workload, phases, workload_sizes

DTYPE_FORMATS: Mapping[str, tuple[str, str, str, str]] = {
    "float32": ("32", "32", "32", "32"),
    "bfloat16": ("16", "16", "16", "16"),
    "int8": ("8", "8", "8", "16"),
    "int4": ("4g32z", "8g32", "8", "16"),
    "int8-activations": ("4g32z", "8g32", "8", "16"),
}
"""Formats of weights, head, activations and cache by dtype; of int8-activations for a file of four bits."""
CheckpointKind = Literal["dense", "2:4", "quantized"]
"""How the matrices of a checkpoint are stored."""
_MEASURED_BYTES: Mapping[str, float] = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0}
"""Bytes of the weights with which a calibration measures the rate of a class."""
_LEAST_BANDWIDTH, _BISECTIONS = 16, 40
"""Part of the calibrated bandwidth below which none is assumed, and halvings of the range."""
_STREAMING = 0.95
"""Share of the memory bandwidth from which on weights count as read at the speed of the memory."""
_TWO_OF_FOUR = "9"
"""Bits of a bfloat16 weight of the pattern 2:4."""
_ROW_RATE = 0.45
"""Speed at which rows are read here and there, over that of a stream: fitted to passes of SmolLM2-135M in bfloat16 that
leave 30 and 50 % of the neurons unread (CATS), on two threads of an AMD EPYC with AVX-512. For calibrated devices.
"""
_NEURON_OPS = ("gate_proj", "up_proj", "down_proj")
_SPARSE_OPS: Mapping[str, tuple[str, ...]] = {
    "cats": _NEURON_OPS[1:], "deja_vu": _NEURON_OPS, "matformer": _NEURON_OPS, "teal": ()
}  # fmt: skip
"""Products that read a part of their weights, by kind of sparsity; of `teal` all of the blocks."""


@dataclass(frozen=True)
class Predictor:
    """Predicts for one model on one device, for one sequence of `context` cached tokens in a dtype."""

    hardware: Hardware
    config: ModelConfig
    exact_dtype: str
    context: int
    bandwidth: float = 0.0
    """Of the memory in bytes/s, where it is another than the device's; 0: it is that."""
    measured: MeasuredMethod | None = None
    """Drafts and accepted tokens of the variant's passes; None: a method has the acceptance that its papers report."""

    def anchored(self, seconds: float) -> "Predictor":
        """The predictor for the memory bandwidth at which a token of plain decoding takes so many seconds.

        A machine that others share has less bandwidth than when it was calibrated, and what reads fewer bytes gains
        more there. A bandwidth above the calibrated one is not assumed: then the time is not the memory's. A device
        that was not calibrated stays as it is.
        """
        if not self.hardware.matmul_rates:
            return self
        low, high = self.hardware.bandwidth / _LEAST_BANDWIDTH, self.hardware.bandwidth
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if replace(self, bandwidth=middle)._plain > seconds else (low, middle)
        return replace(self, bandwidth=high)

    def dtype(self, name: str) -> float | None:
        """Another dtype."""
        if name not in DTYPE_FORMATS:
            return None
        return self._plain / self._seconds(self._graph(self.config), name)

    def kv_dtype(self, name: str) -> float | None:
        """Another format of the cache."""
        if name not in KV_FORMATS:
            return None
        workload = replace(self._workload(self.exact_dtype), kv=parse_format(KV_FORMATS[name]))
        return self._plain / self._seconds(self._graph(self.config), self.exact_dtype, workload)

    def kv_policy(self, text: str) -> float | None:
        """A KV cache policy `NAME@BUDGET`; None: a target cannot have it."""
        try:
            read = parse_target_policy(text).tokens_read(self.context)
        except ValueError:
            return None
        workload = replace(self._workload(self.exact_dtype), context=read)
        return self._plain / self._seconds(self._graph(self.config), self.exact_dtype, workload)

    def checkpoint(self, config: ModelConfig, kind: CheckpointKind) -> float:
        """A compressed checkpoint of its own shape."""
        dtype = "int8-activations" if kind == "quantized" else self.exact_dtype
        workload = self._workload(dtype)
        if kind == "2:4":
            workload = replace(workload, weights=parse_format(_TWO_OF_FOUR))
        return self._plain / self._seconds(self._graph(config), dtype, workload)

    def exits(self, depth: float, layers: Sequence[int]) -> float:
        """Tokens that run a share `depth` of the layers, with a head at every exit that they pass."""
        graph = self._graph(self.config)
        last = next(g for g in reversed(graph.groups) if any(op.is_vocabulary and op.kind == "matmul" for op in g.ops))
        passed = sum(layer / self.config.layers <= depth for layer in layers)
        groups = (
            replace(g, count=g.count * (1 + passed)) if g is last else g for g in early_exit(graph, depth, 1).groups
        )
        return self._plain / self._seconds(replace(graph, groups=tuple(groups)), self.exact_dtype)

    def sparsity(self, method: str, share: float) -> float | None:
        """Tokens that leave a share of the neurons (of `teal`, of the inputs of every matrix) unread."""
        if method not in _SPARSE_OPS:
            return None
        graph = self._graph(self.config)
        read = 1 - share
        if method != "matformer" and self.hardware.matmul_rates:  # MatFormer's neurons are the first ones
            read /= _ROW_RATE
        groups = tuple(replace(g, ops=tuple(_sparse(op, method, read) for op in g.ops)) for g in graph.groups)
        return self._plain / self._seconds(replace(graph, groups=groups), self.exact_dtype)

    def method(self, name: str) -> float | None:
        """A method of the catalogue, with the drafts and the accepted tokens that its passes had."""
        if name not in profile_of_method():
            return None
        target, workload = AnalyzedModel("target", self.config), self._workload(self.exact_dtype)
        if self.measured is not None:
            speedup = calibrated_speedup(self.measured, target, self._device, workload)
            if speedup is not None:
                return speedup
        key = profile_of_method()[name]
        try:
            known = method_profiles()[key] if self.measured is None else self.measured.profile()
            profile = profiles_for(target, {key: known}, None)[key]
            cost = cost_of_profile(profile, target)
            shape = None if self.measured is None else self.measured.shape
            estimate = estimate_method(profile, cost, target, self._device, workload, shape=shape)
        except ValueError:
            return None
        passes = estimate.pass_seconds + estimate.draft_seconds + self._outside
        return estimate.tokens_per_pass * (estimate.plain_seconds + self._outside) / passes

    @property
    def _plain(self) -> float:
        return self._seconds(self._graph(self.config), self.exact_dtype)

    def _graph(self, config: ModelConfig) -> OpGraph:
        return AnalyzedModel("target", config).graph("full", False)

    def _workload(self, dtype: str) -> Workload:
        weights, head, activations, kv = map(parse_format, DTYPE_FORMATS[dtype])
        return Workload(
            "decode", 1, self.context, 1, weights=weights, activations=activations, kv=kv, fusion="full", head=head
        )

    def _seconds(self, graph: OpGraph, dtype: str, workload: Workload | None = None) -> float:
        """Seconds of a token of plain decoding.

        Where the rate that was measured for a class of formats is the speed at which its weights are read, it grows as
        their bytes shrink; where it is lower, it is the speed of the arithmetic. Matrices of blocks and head count with
        their mean bytes.
        """
        asked = workload or self._workload(dtype)
        format_class = self.hardware.format_class(asked.weights, asked.activations)
        if curve := self.hardware.matmul_rates.get(format_class):
            mean = _mean_format(graph, asked)
            measured = _MEASURED_BYTES.get(format_class, mean.bytes)
            asked = replace(asked, weights=mean, head=mean)
            rates = {
                **self.hardware.matmul_rates,
                format_class: tuple(self._scaled(*at, measured, mean.bytes) for at in curve),
            }
            hardware = replace(self._device, matmul_rates=rates)
        else:
            hardware = self._device
        (phase,) = phases("decode", workload_sizes(asked))
        return scalar(total_cost(op_costs(graph, phase, device_rates(asked, hardware))).seconds) + self._outside

    def _scaled(self, rows: float, rate: float, measured: float, read: float) -> tuple[float, float]:
        """A measured matrix rate, of weights of `measured` bytes each, for weights of `read` bytes."""
        streams = rate / (2 * rows) * measured >= _STREAMING * self.hardware.bandwidth
        return rows, rate * measured / read if streams else rate

    @property
    def _device(self) -> Hardware:
        return replace(self.hardware, bandwidth=self.bandwidth or self.hardware.bandwidth)

    @property
    def _outside(self) -> float:
        """Seconds of a step of plain decoding outside the pass, where they were calibrated."""
        known = (methods[PLAIN] for methods in self.hardware.drafting.values() if PLAIN in methods)
        figures = next(known, None)
        return 0.0 if figures is None else DraftingTime(*figures).seconds(1, 0)


def _mean_format(graph: OpGraph, workload: Workload) -> NumberFormat:
    """A format with the mean bits of the weights of all products; its class is that of the blocks."""
    counts = {True: 0.0, False: 0.0}
    for group in graph.groups:
        for op in group.ops:
            if op.kind == "matmul":
                counts[op.is_vocabulary] += group.count * op.weights.constant
    head, blocks = workload.head_weights.bytes * counts[True], workload.weights.bytes * counts[False]
    return replace(workload.weights, bits=8 * (head + blocks) / sum(counts.values()), group=0, group_bits=0)


def _sparse(op: Op, method: str, density: float) -> Op:
    """The operation with the part of its weights that is read, or with more where reading it takes as long."""
    part_of = op.kind == "matmul" and not op.is_vocabulary and (method == "teal" or op.name in _SPARSE_OPS[method])
    return replace(op, work=op.work.scaled(density), weights=op.weights.scaled(density)) if part_of else op
