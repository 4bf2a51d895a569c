"""Loss of the MLP speculator: cross-entropy of its stages against tokens, the target's distributions, or both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch.utils.checkpoint import checkpoint

from foretell.speculator.network.base import TokenSubset
from foretell.train.objective.candidates import TargetDistributions
from foretell.train.objective.distillation import Objective, label_losses

_TINY = 1e-30
"""What stands for a probability of zero, whose logarithm is not finite."""
StageScorer = Callable[[Float[torch.Tensor, "k r"], int, TokenSubset | None], Float[torch.Tensor, "k w"]]
"""Logits over the draft vocabulary, or over candidates, from the input of a stage's output matrix and the stage."""


@dataclass(frozen=True)
class StageLabels:
    """Inputs and labels of the stages at `k` positions of a batch of `b` sequences of `s` tokens.

    Worked example, 4 stages, position t: the hidden state is that of t, which produced token t+1. Stage 0 reads token
    t+1 and predicts token t+2, whose target distribution comes from the state at t+1; stage 3 reads t+4 and predicts
    t+5.
    """

    cell: Int[torch.Tensor, " k"]
    """Index of every position in the flattened `b * s` grid, ascending."""
    input_token: Int[torch.Tensor, "k n"]
    """Token that each stage reads."""
    label: Int[torch.Tensor, "k n"]
    """Draft index that each stage is to predict; 0 outside `mask`."""
    mask: Bool[torch.Tensor, "k n"]


def stage_labels(
    token: Int[torch.Tensor, "b s"],
    loss_mask: Bool[torch.Tensor, "b s"],
    draft_index: Int[torch.Tensor, " v"],
    stages: int,
) -> StageLabels:
    """Positions at which at least one stage has a label: a token to be learned that is in the draft vocabulary.

    `draft_index`: index of every token in the draft vocabulary, -1 for tokens that are not in it.
    """
    b, s = token.shape
    cell = torch.arange(b * s, device=token.device).view(b, s)
    ahead = torch.arange(1, stages + 1, device=token.device)
    column = torch.arange(s, device=token.device)[:, None] + ahead
    input_token = token[:, column.clamp(max=s - 1)]
    after = (column + 1).clamp(max=s - 1)
    label = draft_index[token[:, after]]
    mask = loss_mask[:, after] & (column + 1 < s) & (label >= 0)
    some = mask.any(-1)
    return StageLabels(cell[some], input_token[some], label.clamp(min=0)[some], mask[some])


@dataclass(frozen=True)
class SoftLabels:
    """The target's distributions as labels, at a temperature, with their weight in the loss."""

    target_head: Callable[[Float[torch.Tensor, "k d"]], Float[torch.Tensor, "k w"]]
    """The target's logits over the draft vocabulary."""
    states: Float[torch.Tensor, "c d"]
    """Input of the target's head, for every cell of the grid."""
    weight: float = 1.0
    temperature: float = 1.0
    objective: Objective = "cross_entropy"

    def distributions(
        self, cell: Int[torch.Tensor, " k"], label: Int[torch.Tensor, "k n"], count: int
    ) -> TargetDistributions:
        """Those of the tokens that the stages predict after these cells, over `count` candidates."""
        ahead = cell[:, None] + torch.arange(1, label.shape[1] + 1, device=cell.device)
        return TargetDistributions(
            ahead.clamp(max=len(self.states) - 1),
            label,
            lambda cell: self.target_head(self.states[cell]) / self.temperature,
            count,
        )


@dataclass(frozen=True)
class StageLosses:
    """Mean cross-entropy of each stage (with gradient), and the share of its most probable tokens that are right."""

    loss: tuple[Float[torch.Tensor, ""], ...]
    top1: tuple[float, ...]

    def total(self, decay: float = 1.0) -> Float[torch.Tensor, ""]:
        """Sum of the losses, that of stage `i` weighted by `decay ** i`."""
        return torch.stack([loss * decay**i for i, loss in enumerate(self.loss)]).sum()


def stage_losses(
    scorer: StageScorer,
    head_inputs: Sequence[Float[torch.Tensor, "k r"]],
    labels: StageLabels,
    soft_labels: SoftLabels | None = None,
    frozen: bool = True,
    chunk: int = 1024,
    num_candidates: int = 0,
) -> StageLosses:
    """The losses of all stages, computed for `chunk` positions and one stage at a time.

    `num_candidates`: size of a sampled softmax; 0: the whole draft vocabulary. `frozen`: the output matrix is not
    trained, so gradients are computed in the forward pass and logits are not kept; otherwise logits are computed again
    in the backward pass.
    """
    n = len(head_inputs)
    counts = labels.mask.sum(0).clamp(min=1)
    sums, hits = [list[torch.Tensor]() for _ in range(n)], [list[torch.Tensor]() for _ in range(n)]
    for start in range(0, max(len(labels.cell), 1), chunk):
        part = slice(start, start + chunk)
        distributions = None
        if soft_labels:
            distributions = soft_labels.distributions(labels.cell[part], labels.label[part], num_candidates)
        for stage in range(n):
            label = labels.label[part, stage]
            loss = partial(
                _stage_loss,
                scorer=scorer,
                stage=stage,
                candidates=distributions.candidates if distributions else None,
                label=distributions.index(label) if distributions else label,
                mask=labels.mask[part, stage],
                distribution=distributions.of(stage) if distributions else None,
                soft_weight=soft_labels.weight if soft_labels else 0.0,
                objective=soft_labels.objective if soft_labels else "cross_entropy",
            )
            chunk_sum, chunk_hits = _low_memory_loss(loss, head_inputs[stage][part], frozen)
            sums[stage].append(chunk_sum)
            hits[stage].append(chunk_hits)
    losses = tuple(torch.stack(s).sum() / counts[i] for i, s in enumerate(sums))
    return StageLosses(losses, tuple((torch.stack(h).sum() / counts[i]).item() for i, h in enumerate(hits)))


def _stage_loss(
    head_input: Float[torch.Tensor, "k r"],
    scorer: StageScorer,
    stage: int,
    candidates: TokenSubset | None,
    label: Int[torch.Tensor, " k"],
    mask: Bool[torch.Tensor, " k"],
    distribution: Float[torch.Tensor, "k w"] | None,
    soft_weight: float,
    objective: Objective,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy and number of right guesses, at the positions in `mask`."""
    logits = scorer(head_input, stage, candidates)
    losses = label_loss(logits, label, distribution, soft_weight, objective)
    hits = (logits.detach().argmax(-1) == label) & mask
    return torch.where(mask, losses, 0.0).sum(), hits.sum()


def label_loss(
    logits: Float[torch.Tensor, "k w"],
    label: Int[torch.Tensor, " k"],
    distribution: Float[torch.Tensor, "k w"] | None = None,
    soft_weight: float = 1.0,
    objective: Objective = "cross_entropy",
) -> Float[torch.Tensor, " k"]:
    """`soft_weight` times the loss against `distribution`, plus the rest times the cross-entropy against the label."""
    if distribution is None or soft_weight == 0:
        return F.cross_entropy(logits, label, reduction="none")
    if objective == "cross_entropy":
        soft = torch.logsumexp(logits, -1) - (distribution * logits).sum(-1)
    else:
        soft = label_losses(logits, distribution.clamp_min(_TINY).log(), objective=objective)
    if soft_weight == 1:
        return soft
    return soft_weight * soft + (1 - soft_weight) * F.cross_entropy(logits, label, reduction="none")


ChunkLoss = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _low_memory_loss(
    loss: ChunkLoss, head_input: Float[torch.Tensor, "k r"], frozen: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not head_input.requires_grad:
        return loss(head_input)
    if frozen:
        total, hits = _GradientInForward.apply(head_input, loss)  # type: ignore[no-untyped-call]
    else:
        total, hits = checkpoint(loss, head_input, use_reentrant=False)
    return total, hits


class _GradientInForward(torch.autograd.Function):
    """A loss whose gradient is computed in the forward pass, so that no intermediate tensor is kept."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, head_input: torch.Tensor, loss: ChunkLoss
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            leaf = head_input.detach().requires_grad_()
            total, hits = loss(leaf)
            (gradient,) = torch.autograd.grad(total, leaf)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return total.detach(), hits

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grads[0].to(gradient.dtype), None
