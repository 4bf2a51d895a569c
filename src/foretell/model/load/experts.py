"""Reads the mixture-of-experts layers of checkpoints: one tensor per expert, or all experts of a layer in one."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from jaxtyping import Float

from foretell.model.block.expert_matrices import ExpertMatrices, GatedMatrices
from foretell.model.config.model import ModelConfig
from foretell.model.matrices.stored import StoredMatrix

Tensor = torch.Tensor
Names = tuple[str | None, str, str]
"""Names of gate (None: there is none), up and down."""
_GATED: Names = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL: tuple[str, Names] = ("block_sparse_moe.", ("w1", "w3", "w2"))
_GRANITE = ("granitemoe", "granitemoeshared", "granitemoehybrid")
_NAMES: Mapping[str, tuple[str, Names]] = {
    "mixtral": _MIXTRAL,
    "llama4_text": ("feed_forward.", _GATED),
    "gemma4_text": ("", _GATED),
    "nemotron_h": ("mixer.", (None, "up_proj", "down_proj")),
    **dict.fromkeys(_GRANITE, _MIXTRAL),
}
"""Where the experts of a layer are named, and the names of their matrices, where it is not `mlp.` and `_GATED`."""
_ROUTERS = {
    "gpt_oss": "router",
    "llama4_text": "router",
    "gemma4_text": "router.proj",
    **dict.fromkeys(_GRANITE, "router.layer"),
}
"""Names of the router, where it is not `gate`."""


class Weights(Protocol):
    """The part of a checkpoint's interface that is used here; see `model.load.weights.Weights`."""

    source: str

    def get(self, name: str) -> Float[Tensor, "*shape"] | None: ...  # noqa: D102
    def require(self, name: str, *shape: int) -> Float[Tensor, "*shape"]: ...  # noqa: D102
    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix: ...  # noqa: D102
    def expert_matrices(  # noqa: D102
        self, name: str, count: int, outputs: int, inputs: int
    ) -> Iterator[StoredMatrix]: ...
    def release_pages(self) -> None: ...  # noqa: D102


def read_expert_layer(config: ModelConfig, prefix: str, weights: Weights) -> ExpertMatrices:
    """The mixture of experts of the layer whose names begin with `prefix`; experts are read while they are iterated.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    experts, hidden = config.experts, config.hidden
    assert experts is not None
    router = f"{prefix}{_names(config)[0]}{_ROUTERS.get(config.architecture, 'gate')}"
    gate = f"{prefix}mlp.shared_expert_gate.weight"
    return ExpertMatrices(
        weights.require(f"{router}.weight", experts.count, hidden),
        _read_experts(config, prefix, weights),
        weights.require(f"{router}.bias", experts.count) if experts.router_bias else None,
        weights.require(f"{router}.e_score_correction_bias", experts.count) if experts.selection_bias else None,
        _read_shared_expert(config, prefix, weights) if experts.shared_ffn else None,
        weights.require(gate, 1, hidden) if experts.shared_gate else None,
        weights.require(f"{prefix}router.per_expert_scale", experts.count) if experts.beside_dense else None,
    )


def _read_experts(config: ModelConfig, prefix: str, weights: Weights) -> Iterator[GatedMatrices]:
    experts = config.experts
    assert experts is not None
    stem, names = _names(config)
    if experts.weighs_inputs:
        yield from _transposed_experts(config, f"{prefix}{stem}experts.", weights)
        return
    if config.architecture == "gpt_oss" and weights.get(f"{prefix}mlp.experts.gate_up_proj_bias") is not None:
        yield from _fused_experts(config, f"{prefix}mlp.experts.", weights)
        return
    if config.architecture in _GRANITE:
        names_of_both = "input_linear.weight", "output_linear.weight"
        yield from _stacked_experts(config, f"{prefix}{stem}", weights, *names_of_both)
        return
    if weights.get(f"{prefix}{stem}experts.gate_up_proj") is not None:
        yield from _stacked_experts(config, f"{prefix}{stem}experts.", weights)
        return
    for j in range(experts.count):
        yield read_gated(weights, f"{prefix}{stem}experts.{j}.", experts.ffn, config.hidden, experts.bias, names)


def _read_shared_expert(config: ModelConfig, prefix: str, weights: Weights) -> GatedMatrices:
    experts = config.experts
    assert experts is not None
    if config.architecture in _GRANITE:
        width, name = experts.shared_ffn, f"{prefix}shared_mlp."
        both = weights.matrix(f"{name}input_linear.weight", 2 * width, config.hidden)
        down = weights.matrix(f"{name}output_linear.weight", config.hidden, width)
        return GatedMatrices(both.rows(torch.arange(width)), both.rows(torch.arange(width, 2 * width)), down)
    stem, names = _names(config)
    name = "shared_expert" if experts.shared_gate or experts.weighs_inputs else "shared_experts"
    return read_gated(weights, f"{prefix}{stem}{name}.", experts.shared_ffn, config.hidden, bias=False, names=names)


def read_gated(
    weights: Weights, prefix: str, ffn: int, hidden: int, bias: bool, names: Names = _GATED
) -> GatedMatrices:
    """The matrices called `names` (gate, up, down) after `prefix`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    sizes = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    (_, up, down), found = names, list(zip(names, sizes, strict=True))
    gate = None if names[0] is None else weights.matrix(f"{prefix}{names[0]}.weight", *sizes[0])
    others = (weights.matrix(f"{prefix}{n}.weight", *size) for n, size in ((up, sizes[1]), (down, sizes[2])))
    biases = (weights.require(f"{prefix}{n}.bias", outputs) if bias and n else None for n, (outputs, _) in found)
    return GatedMatrices(gate, *others, *biases)


def _names(config: ModelConfig) -> tuple[str, Names]:
    """Where a layer's experts are named, and the names of gate, up and down."""
    return _NAMES.get(config.architecture, ("mlp.", _GATED))


def _fused_experts(config: ModelConfig, prefix: str, weights: Weights) -> Iterator[GatedMatrices]:
    """The experts of gpt-oss in safetensors: rows of gate and up alternate."""
    experts, hidden = config.experts, config.hidden
    assert experts is not None
    count, ffn = experts.count, experts.ffn
    gate_up_bias = weights.require(f"{prefix}gate_up_proj_bias", count, 2 * ffn)
    down_bias = weights.require(f"{prefix}down_proj_bias", count, hidden)
    gate_up = weights.expert_matrices(f"{prefix}gate_up_proj", count, 2 * ffn, hidden)
    down = weights.expert_matrices(f"{prefix}down_proj", count, hidden, ffn)
    for j, (both, one) in enumerate(zip(gate_up, down, strict=True)):
        bias = gate_up_bias[j]
        yield GatedMatrices(
            _every_second_row(both, 0),
            _every_second_row(both, 1),
            one,
            bias[::2].contiguous(),
            bias[1::2].contiguous(),
            down_bias[j],
        )


def _transposed_experts(config: ModelConfig, prefix: str, weights: Weights) -> Iterator[GatedMatrices]:
    """The experts of Llama 4: matrices [inputs, outputs] of all experts in one tensor, gate before up."""
    experts, hidden = config.experts, config.hidden
    assert experts is not None
    gate_up = weights.expert_matrices(f"{prefix}gate_up_proj", experts.count, 2 * experts.ffn, hidden)
    down = weights.expert_matrices(f"{prefix}down_proj", experts.count, hidden, experts.ffn)
    rows = torch.arange(2 * experts.ffn)
    for both, one in zip(gate_up, down, strict=True):
        yield GatedMatrices(both.rows(rows[: experts.ffn]), both.rows(rows[experts.ffn :]), one)


def _stacked_experts(
    config: ModelConfig, prefix: str, weights: Weights, gate_up_name: str = "gate_up_proj", down_name: str = "down_proj"
) -> Iterator[GatedMatrices]:
    """The experts of Qwen3.5 and Granite as published: all of a layer in one tensor, gate rows before up rows."""
    experts, hidden = config.experts, config.hidden
    assert experts is not None
    gate_up = weights.require(f"{prefix}{gate_up_name}", experts.count, 2 * experts.ffn, hidden)
    down = weights.require(f"{prefix}{down_name}", experts.count, hidden, experts.ffn)
    for both, last in zip(gate_up, down, strict=True):
        parts = (both[: experts.ffn], both[experts.ffn :], last)
        yield GatedMatrices(*(StoredMatrix.of(part, weights.release_pages) for part in parts))


def _every_second_row(matrix: StoredMatrix, first: int) -> StoredMatrix:
    return StoredMatrix(matrix.kind, matrix.inputs, matrix.data[first::2].contiguous())
