"""Predictors of the neurons that a token needs (Deja Vu, arXiv 2310.17157)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file

from foretell.model.config import ModelConfig
from foretell.model.decoder import FeedForward
from foretell.model.load.weights import Weights
from foretell.model.sparsity import PredictedNeurons
from foretell.model.sparsity_file import PREDICTORS
from foretell.sparsify.activations import BlockActivations, block_activations
from foretell.sparsify.thresholds import check_share

Tensor = torch.Tensor
_HELD_OUT = 0.1
"""Share of the tokens that recall is measured on."""
_RIDGE = 1e-2
"""Of the closed form, over the mean of the diagonal."""


@dataclass(frozen=True)
class PredictorSettings:
    """What is fitted. `sparsity`: share of the neurons that a token does not read; `rank`: of the predictors; `steps`
    of AdamW after the closed form, at `rate`, with `batch` tokens each.
    """

    sparsity: float = 0.5
    rank: int = 64
    steps: int = 60
    rate: float = 1e-3
    batch: int = 512
    seed: int = 0


@dataclass(frozen=True)
class FittedPredictor:
    """The predictor of a layer. `recall`: share of the neurons to read that it chooses, on tokens held out; `ahead`:
    the same of one that reads the input of the layer before (None: there is none); `chance`: of a fixed set, those
    that are needed most often.
    """

    rule: PredictedNeurons
    recall: float
    ahead: float | None
    chance: float


def fit_predictors(
    config: ModelConfig,
    weights: Weights,
    tokens: Int[Tensor, "b s"],
    settings: PredictorSettings,
    progress: Callable[[str], None] = lambda _: None,
) -> list[FittedPredictor]:
    """Fit a predictor per layer on calibration text. A token needs the neurons with the largest contributions, the
    magnitude of the neuron times the norm of its column of down, since SwiGLU has no exact zeros.

    Raises:
        ValueError: the share or the rank is outside its range.
    """
    check_share(settings.sparsity)
    if not 1 <= settings.rank <= config.hidden:
        raise ValueError(f"--rank {settings.rank}: predictors have a rank of 1 to {config.hidden}, the hidden size")
    found, before = list[FittedPredictor](), None
    generator = torch.Generator().manual_seed(settings.seed)
    for block in block_activations(config, weights, tokens):
        x, needed = block.inputs["gate_up"], needed_neurons(block, settings.sparsity)
        rule, recall = fit_predictor(x, needed, settings, generator)
        ahead = None if before is None else fit_predictor(before, needed, settings, generator)[1]
        found.append(FittedPredictor(rule, recall, ahead, _chance(needed, settings.sparsity)))
        before = x
        progress(f"layer {block.index + 1} of {config.layers}: recall {recall:.1%}")
    return found


def needed_neurons(block: BlockActivations, sparsity: float) -> Bool[Tensor, "t f"]:
    """The neurons with the largest contributions, the share `1 - sparsity` of every token."""
    mlp = block.block.mlp
    assert isinstance(mlp, FeedForward)
    size = block.inputs["down"].abs() * mlp.down.weight.float().norm(dim=0)
    count = max(1, round((1 - sparsity) * size.shape[1]))
    return torch.zeros_like(size, dtype=torch.bool).scatter_(1, size.topk(count, 1).indices, True)


def fit_predictor(
    x: Float[Tensor, "t d"], needed: Bool[Tensor, "t f"], settings: PredictorSettings, generator: torch.Generator
) -> tuple[PredictedNeurons, float]:
    """A predictor of the needed neurons, and its recall on tokens held out."""
    kept = len(x) - max(1, round(_HELD_OUT * len(x)))
    with torch.enable_grad():
        start = _closed_form(x[:kept], needed[:kept], settings.rank)
        inputs, outputs, bias = _refine(x[:kept].clone(), needed[:kept], start, settings, generator)
    scores = x @ inputs.T @ outputs.T + bias
    flat = scores[:kept].flatten()
    flat = flat[:: max(1, len(flat) >> 22)]
    threshold = float(flat.kthvalue(max(1, round(settings.sparsity * len(flat)))).values)
    chosen = scores[kept:] > threshold
    recall = float((chosen & needed[kept:]).sum() / needed[kept:].sum())
    return PredictedNeurons(inputs, outputs, threshold, bias), recall


def _closed_form(
    x: Float[Tensor, "t d"], needed: Bool[Tensor, "t f"], rank: int
) -> tuple[Float[Tensor, "r d"], Float[Tensor, "f r"], Float[Tensor, " f"]]:
    """Reduced-rank regression of the labels on the inputs, which need no bias of their own: it is the labels' mean."""
    labels = needed.float()
    bias = labels.mean(0)
    moment = x.T @ x / len(x)
    moment += _RIDGE * moment.diagonal().mean() * torch.eye(len(moment))
    root = torch.linalg.cholesky(moment)
    whitened = torch.linalg.solve_triangular(root, x.T @ (labels - bias) / len(x), upper=False)
    basis = torch.linalg.eigh(whitened @ whitened.T).eigenvectors[:, -rank:]
    inputs = torch.linalg.solve_triangular(root.T, basis, upper=True).T
    return inputs, (basis.T @ whitened).T, bias - 0.5


def _refine(
    x: Float[Tensor, "t d"],
    needed: Bool[Tensor, "t f"],
    start: tuple[Tensor, Tensor, Tensor],
    settings: PredictorSettings,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "r d"], Float[Tensor, "f r"], Float[Tensor, " f"]]:
    """Steps of AdamW on the binary cross-entropy of the labels; scores begin as four times those of the regression."""
    parts = [(part * factor).requires_grad_() for part, factor in zip(start, (1.0, 4.0, 4.0), strict=True)]
    optimizer = torch.optim.AdamW(parts, settings.rate, weight_decay=0.01)
    for _ in range(settings.steps):
        rows = torch.randint(len(x), (min(settings.batch, len(x)),), generator=generator)
        scores = x[rows] @ parts[0].T @ parts[1].T + parts[2]
        loss = F.binary_cross_entropy_with_logits(scores, needed[rows].float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    inputs, outputs, bias = (part.detach() for part in parts)
    return inputs, outputs, bias


def _chance(needed: Bool[Tensor, "t f"], sparsity: float) -> float:
    """Recall of the neurons that are needed most often, on tokens held out."""
    kept = len(needed) - max(1, round(_HELD_OUT * len(needed)))
    often = needed[:kept].float().mean(0).topk(max(1, round((1 - sparsity) * needed.shape[1]))).indices
    return float(needed[kept:][:, often].sum() / needed[kept:].sum())


def save_predictors(folder: Path, rules: list[PredictedNeurons]) -> None:
    """Write predictors in bfloat16, their biases in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict[str, Tensor]()
    for i, rule in enumerate(rules):
        tensors[f"layers.{i}.inputs"] = rule.inputs.to(torch.bfloat16).contiguous()
        tensors[f"layers.{i}.outputs"] = rule.outputs.to(torch.bfloat16).contiguous()
        tensors[f"layers.{i}.bias"] = rule.bias.float().contiguous()
    save_file(tensors, folder / PREDICTORS)
