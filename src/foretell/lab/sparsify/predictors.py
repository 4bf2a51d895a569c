"""Predictors of the neurons and heads that a token needs (Deja Vu, arXiv 2310.17157)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file

from foretell.lab.quantize.base import Role
from foretell.lab.sparsify.activations import BlockActivations, block_activations
from foretell.lab.sparsify.thresholds import check_share
from foretell.model.block.layer import FeedForward
from foretell.model.block.linear import Linear
from foretell.model.block.sparsity import PredictedNeurons, Predictor
from foretell.model.config.model import ModelConfig
from foretell.model.load.weights import Weights
from foretell.model.offload.sparsity_file import PREDICTORS
from foretell.train.exits.checkpoints import Checkpoints
from foretell.utils.options import Option

Tensor = torch.Tensor
_HELD_OUT = 0.1
"""Share of the tokens that recall is measured on."""
BLOCKS = 1, 32
"""Neurons that can be chosen together: one, or as many as a panel of the kernels has inputs in every storage type but
K blocks and int8.
"""
_READS_ALL = -1e30
"""A threshold below all scores; JSON has no infinity."""
_RIDGE = 1e-2
"""Of the closed form, over the mean of the diagonal."""


@dataclass(frozen=True)
class PredictorSettings:
    """What is fitted. `batch`: tokens of a step of AdamW."""

    sparsity: Annotated[float, Option("Share of the neurons that a token does not read.", "SHARE")] = 0.5
    head_sparsity: Annotated[
        float, Option("Share of the query heads that a token does not read; 0: none.", "SHARE")
    ] = 0.0
    block: Annotated[
        int,
        Option(
            "Neurons that are chosen together: 1 reads rows of a second copy in bfloat16, 32 reads the weights as they "
            "are packed, in any storage type.",
            "N",
        ),
    ] = 1
    look_ahead: Annotated[bool, Option("Predict from what the layer before reads; needs --block 32.")] = False
    rank: Annotated[int, Option("Rank of the predictors.", "N")] = 64
    steps: Annotated[int, Option("Gradient steps per layer after the closed form; 0: none.", "N", least=0)] = 60
    rate: Annotated[float, Option("Learning rate of these steps.", "X", "--lr", 0)] = 1e-3
    seed: Annotated[int, Option("Seed of text and batches.", "N", least=0)] = 0
    batch: int = 512


@dataclass(frozen=True)
class Recall:
    """How much a predictor finds. `own`: share of the units to read that it chooses, on tokens held out; `ahead`: the
    same of one that reads the input of the layer before (None: there is none); `chance`: of a fixed set, those that
    are needed most often.
    """

    own: float
    ahead: float | None
    chance: float


@dataclass(frozen=True)
class FittedPredictor:
    """The predictors of a layer, and what they find."""

    rule: PredictedNeurons
    neurons: Recall
    heads: Recall | None


def check_settings(config: ModelConfig, settings: PredictorSettings) -> None:
    """Check what is to be fitted.

    Raises:
        ValueError: a share, the rank or the block is outside its range, or does not go with the model.
    """
    check_share(settings.sparsity)
    check_share(settings.head_sparsity, "--head-sparsity")
    if not 1 <= settings.rank <= config.hidden:
        raise ValueError(f"--rank {settings.rank}: predictors have a rank of 1 to {config.hidden}, the hidden size")
    if settings.block not in BLOCKS or any(config.ffn_of(i) % settings.block for i in range(config.layers)):
        raise ValueError(
            f"--block {settings.block}: neurons are chosen one by one (1) or in runs of {BLOCKS[1]} that divide the "
            f"{config.ffn} neurons of a layer"
        )
    if settings.look_ahead and settings.block == 1:
        raise ValueError(f"--look-ahead needs neurons that are chosen in runs; add --block {BLOCKS[1]}")


def fit_predictors(
    config: ModelConfig,
    weights: Weights,
    tokens: Int[Tensor, "b s"],
    settings: PredictorSettings,
    progress: Callable[[str], None] = lambda _: None,
    checkpoints: Checkpoints | None = None,
) -> list[FittedPredictor]:
    """Fit predictors per layer on calibration text. A token needs the neurons with the largest contributions, the
    magnitude of the neuron times the norm of its column of down, since SwiGLU has no exact zeros (of those of ReLU none
    that is zero); and the heads whose part of the attention's output has the largest norm. With `checkpoints` the
    gradient steps go on after the latest one; the rest is computed again.

    Raises:
        ValueError: see `check_settings`; or a checkpoint is damaged, of another fit, or cannot be written.
        KeyboardInterrupt: `checkpoints.should_stop` returned True; a checkpoint was written.
    """
    check_settings(config, settings)
    fitted = list[FittedPredictor]()
    before: dict[Role, Tensor] | None = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        for block in block_activations(config, weights, tokens):
            own = None if checkpoints is None else checkpoints.part(f"layer-{block.index + 1}")
            fit = _Fit(block.inputs, before, settings, own)
            needed = needed_neurons(block, settings.sparsity, settings.block)
            rule, recall = fit("gate_up", needed, settings.sparsity)
            heads, of_heads = None, None
            if settings.head_sparsity:
                heads, of_heads = fit(
                    "qkv", needed_heads(block, config, settings.head_sparsity), settings.head_sparsity
                )
            neurons = PredictedNeurons(**vars(rule), unit=settings.block, heads=heads)
            fitted.append(FittedPredictor(neurons, recall, of_heads))
            before = {"qkv": block.inputs["qkv"], "gate_up": block.inputs["gate_up"]}
            progress(f"layer {block.index + 1} of {config.layers}: recall {recall.own:.1%}")
    return fitted


@dataclass(frozen=True)
class _Fit:
    """Fits the predictors of a layer: `inputs` are those of its matrices, `before` those of the layer before."""

    inputs: Mapping[Role, Tensor]
    before: Mapping[Role, Tensor] | None
    settings: PredictorSettings
    checkpoints: Checkpoints | None

    def __call__(self, role: Role, needed: Bool[Tensor, "t u"], sparsity: float) -> tuple[Predictor, Recall]:
        """The predictor of the needed units from what a matrix reads, and what it finds."""
        chosen = replace(self.settings, sparsity=sparsity, rank=min(self.settings.rank, needed.shape[1]))
        rule, own = fit_predictor(self.inputs[role], needed, chosen, self._part(role))
        chance = _chance(needed, sparsity)
        if self.before is None:
            return rule, Recall(own, None, chance)
        ahead, share = fit_predictor(self.before[role], needed, chosen, self._part(f"{role}-ahead"))
        return (replace(ahead, ahead=True) if self.settings.look_ahead else rule), Recall(own, share, chance)

    def _part(self, name: str) -> Checkpoints | None:
        return None if self.checkpoints is None else self.checkpoints.part(name)


def needed_heads(block: BlockActivations, config: ModelConfig, sparsity: float) -> Bool[Tensor, "t h"]:
    """The query heads with the largest contributions, the share `1 - sparsity` of every token."""
    linear = block.block.output
    assert isinstance(linear, Linear)
    return largest(head_sizes(block.inputs["output"], linear.weight, config.heads), sparsity)


def needed_neurons(block: BlockActivations, sparsity: float, run: int = 1) -> Bool[Tensor, "t u"]:
    """The runs of neurons with the largest contributions, the share `1 - sparsity` of every token."""
    mlp = block.block.mlp
    assert isinstance(mlp, FeedForward)
    size = neuron_sizes(block.inputs["down"], mlp.down.weight)
    return largest(size.unflatten(-1, (-1, run)).norm(dim=-1), sparsity)


def head_sizes(mixed: Float[Tensor, "*t i"], output: Float[Tensor, "d i"], heads: int) -> Float[Tensor, "*t h"]:
    """The norm of what every head adds to the output of attention."""
    parts = zip(mixed.float().chunk(heads, -1), output.float().chunk(heads, -1), strict=True)
    return torch.stack([(x @ w.T).norm(dim=-1) for x, w in parts], -1)


def neuron_sizes(inner: Float[Tensor, "*t f"], down: Float[Tensor, "d f"]) -> Float[Tensor, "*t f"]:
    """The norm of what every neuron adds to the output of its network."""
    return inner.abs() * down.float().norm(dim=0)


def largest(size: Float[Tensor, "*t u"], sparsity: float) -> Bool[Tensor, "*t u"]:
    """The largest numbers of every token, the share `1 - sparsity`, without those that are zero."""
    count = max(1, round((1 - sparsity) * size.shape[-1]))
    return torch.zeros_like(size, dtype=torch.bool).scatter_(-1, size.topk(count, -1).indices, True) & (size > 0)


def fit_predictor(
    x: Float[Tensor, "t d"],
    needed: Bool[Tensor, "t u"],
    settings: PredictorSettings,
    checkpoints: Checkpoints | None = None,
) -> tuple[Predictor, float]:
    """A predictor of the needed units, and its recall on tokens held out."""
    kept = len(x) - max(1, round(_HELD_OUT * len(x)))
    with torch.enable_grad():
        start = _closed_form(x[:kept], needed[:kept], settings.rank)
        inputs, outputs, bias = _refine(x[:kept].clone(), needed[:kept], start, settings, checkpoints)
    scores = x @ inputs.T @ outputs.T + bias
    flat = scores[:kept].flatten()
    flat = flat[:: max(1, len(flat) >> 22)]
    left_out = round(settings.sparsity * len(flat))
    threshold = float(flat.kthvalue(left_out).values) if left_out else _READS_ALL
    chosen = scores[kept:] > threshold
    recall = float((chosen & needed[kept:]).sum() / needed[kept:].sum())
    return Predictor(inputs, outputs, threshold, bias), recall


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
    checkpoints: Checkpoints | None,
) -> tuple[Float[Tensor, "r d"], Float[Tensor, "f r"], Float[Tensor, " f"]]:
    """Steps of AdamW on the binary cross-entropy of the labels; scores begin as four times those of the regression."""
    parts = [torch.nn.Parameter(part * factor) for part, factor in zip(start, (1.0, 4.0, 4.0), strict=True)]
    optimizer = torch.optim.AdamW(parts, settings.rate, weight_decay=0.01)
    losses = [] if checkpoints is None else checkpoints.resume(optimizer)
    for step in range(len(losses), settings.steps):
        rows = torch.randint(len(x), (min(settings.batch, len(x)),))
        scores = x[rows] @ parts[0].T @ parts[1].T + parts[2]
        loss = F.binary_cross_entropy_with_logits(scores, needed[rows].float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        if checkpoints is not None:
            checkpoints.after_step(optimizer, losses, step + 1 == settings.steps)
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
        for kind, predictor in (("", rule), ("heads.", rule.heads)):
            if predictor is not None:
                tensors[f"layers.{i}.{kind}inputs"] = predictor.inputs.to(torch.bfloat16).contiguous()
                tensors[f"layers.{i}.{kind}outputs"] = predictor.outputs.to(torch.bfloat16).contiguous()
                tensors[f"layers.{i}.{kind}bias"] = predictor.bias.float().contiguous()
    save_file(tensors, folder / PREDICTORS)
