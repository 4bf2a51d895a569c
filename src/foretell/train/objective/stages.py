"""Cross-entropy summed over the stages of a speculator, against the tokens that came, the target's distributions, or
both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch.utils.checkpoint import checkpoint

from foretell.speculator.network.base import TokenSubset
from foretell.train.objective.candidates import candidates

Judge = Callable[[Float[torch.Tensor, "k r"], int, TokenSubset | None], Float[torch.Tensor, "k w"]]
"""Logits over the drafted tokens, or over candidates, from what a stage's last matrix sees, and the stage."""


@dataclass(frozen=True)
class Lesson:
    """What the stages learn at the `k` chosen positions of a batch of `b` texts of `s` tokens.

    Worked example, 4 stages, position t: the state is that of t, which produced token t+1; stage 0 reads token t+1 and
    is to say token t+2, which the target says from its state at t+1; stage 3 reads t+4 and is to say t+5.
    """

    at: Int[torch.Tensor, " k"]
    """Cell of every position in the grid of `b * s`, ascending."""
    given: Int[torch.Tensor, "k n"]
    """Token that each stage reads."""
    label: Int[torch.Tensor, "k n"]
    """Drafted token that each stage is to say; 0 where it is not wanted."""
    wanted: Bool[torch.Tensor, "k n"]


def lesson(
    token: Int[torch.Tensor, "b s"], answer: Bool[torch.Tensor, "b s"], place: Int[torch.Tensor, " v"], stages: int
) -> Lesson:
    """Positions at which some stage has something to learn: an answer's token that it can draft (`place[token]` is its
    number there, or -1).
    """
    b, s = token.shape
    cell = torch.arange(b * s, device=token.device).view(b, s)
    ahead = torch.arange(1, stages + 1, device=token.device)
    column = torch.arange(s, device=token.device)[:, None] + ahead
    given = token[:, column.clamp(max=s - 1)]
    after = (column + 1).clamp(max=s - 1)
    label = place[token[:, after]]
    wanted = answer[:, after] & (column + 1 < s) & (label >= 0)
    some = wanted.any(-1)
    return Lesson(cell[some], given[some], label.clamp(min=0)[some], wanted[some])


@dataclass(frozen=True)
class Teacher:
    """The target's distributions as labels: `share` of the loss, sharpened or flattened by `temperature`."""

    score: Callable[[Float[torch.Tensor, "k d"]], Float[torch.Tensor, "k w"]]
    """The target's logits over the drafted tokens from what its head sees."""
    states: Float[torch.Tensor, "c d"]
    """What its head sees, for every cell of the grid."""
    share: float = 1.0
    temperature: float = 1.0

    @torch.no_grad()
    def distributions(self, cell: Int[torch.Tensor, " k"]) -> Float[torch.Tensor, "k w"]:
        """Its distributions of the token after these cells."""
        return torch.softmax(self.score(self.states[cell]) / self.temperature, -1)


@dataclass(frozen=True)
class StageLosses:
    """Per stage: mean cross-entropy (with gradient), and how often its best token is the one that came."""

    loss: tuple[Float[torch.Tensor, ""], ...]
    top1: tuple[float, ...]

    def total(self, decay: float = 1.0) -> Float[torch.Tensor, ""]:
        """The losses summed, each stage's weight `decay` times that of the stage before."""
        return torch.stack([loss * decay**i for i, loss in enumerate(self.loss)]).sum()


def stage_losses(
    judge: Judge,
    readings: Sequence[Float[torch.Tensor, "k r"]],
    lesson: Lesson,
    teacher: Teacher | None = None,
    frozen: bool = True,
    chunk: int = 1024,
    count: int = 0,
) -> StageLosses:
    """The losses of all stages, computed `chunk` positions and one stage at a time, over `count` candidates each (0:
    all drafted tokens).

    `frozen`: `judge` has no weights to train, so gradients are taken at once and logits never kept; otherwise they are
    computed twice. The target's distribution at a cell serves every stage that looks there.
    """
    n = len(readings)
    places = lesson.wanted.sum(0).clamp(min=1)
    sums, right = [list[torch.Tensor]() for _ in range(n)], [list[torch.Tensor]() for _ in range(n)]
    for start in range(0, max(len(lesson.at), 1), chunk):
        part = slice(start, start + chunk)
        distributions = _Laws(teacher, lesson.at[part], n, lesson.label[part], count) if teacher else None
        among = distributions.among if distributions else None
        for stage in range(n):
            wanted, label = lesson.wanted[part, stage], lesson.label[part, stage]
            label = label if among is None else torch.searchsorted(among.columns, label.contiguous())
            distribution = distributions.of_stage(stage) if distributions else None

            def lost(reading: torch.Tensor, stage: int = stage, label: torch.Tensor = label,
            wanted: torch.Tensor = wanted,
                     distribution: torch.Tensor | None = distribution,
                     among: TokenSubset | None = among) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
                logits = judge(reading, stage, among)
                each = cross_entropy(logits, label, distribution, teacher.share if teacher else 0.0)
                hits = (logits.detach().argmax(-1) == label) & wanted
                return torch.where(wanted, each, 0.0).sum(), hits.sum()

            loss, hits = _lean(lost, readings[stage][part], frozen)
            sums[stage].append(loss)
            right[stage].append(hits)
    losses = tuple(torch.stack(s).sum() / places[i] for i, s in enumerate(sums))
    return StageLosses(losses, tuple((torch.stack(r).sum() / places[i]).item() for i, r in enumerate(right)))


def cross_entropy(
    logits: Float[torch.Tensor, "k w"],
    label: Int[torch.Tensor, " k"],
    distribution: Float[torch.Tensor, "k w"] | None = None,
    share: float = 1.0,
) -> Float[torch.Tensor, " k"]:
    """In nats, against the mixture of `share` parts of `distribution` and the rest of the label alone."""
    if distribution is None or share == 0:
        return F.cross_entropy(logits, label, reduction="none")
    soft = torch.logsumexp(logits, -1) - (distribution * logits).sum(-1)
    return soft if share == 1 else share * soft + (1 - share) * F.cross_entropy(logits, label, reduction="none")


class _Laws:
    """The target's distributions that a chunk needs, each computed once, over `count` candidates with all labels among
    them (0: over all).
    """

    def __init__(
        self, teacher: Teacher, at: Int[torch.Tensor, " k"], stages: int, label: Int[torch.Tensor, "k n"], count: int
    ) -> None:
        last = len(teacher.states) - 1
        self._cell = (at[:, None] + torch.arange(1, stages + 1, device=at.device)).clamp(max=last)
        self._known = torch.unique(self._cell)
        self._laws = teacher.distributions(self._known)
        self.among = candidates(self._laws, count, torch.unique(label))
        if self.among is not None:
            kept = self._laws[:, self.among.columns] * self.among.logit_offset.exp()
            self._laws = kept / kept.sum(-1, keepdim=True)

    def of_stage(self, stage: int) -> Float[torch.Tensor, "k w"]:
        """What the target says where this stage speaks."""
        return self._laws[torch.searchsorted(self._known, self._cell[:, stage].contiguous())]


Lost = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _lean(lost: Lost, reading: Float[torch.Tensor, "k r"], frozen: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not reading.requires_grad:
        return lost(reading)
    if frozen:
        loss, hits = _AtOnce.apply(reading, lost)  # type: ignore[no-untyped-call]
    else:
        loss, hits = checkpoint(lost, reading, use_reentrant=False)
    return loss, hits


class _AtOnce(torch.autograd.Function):
    """A loss whose gradient is taken on the way forward, so that nothing between it and its input is kept."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, reading: torch.Tensor, lost: Lost) -> tuple[torch.Tensor,
    torch.Tensor]:  # fmt: skip
        with torch.enable_grad():
            inner = reading.detach().requires_grad_()
            loss, hits = lost(inner)
            (slope,) = torch.autograd.grad(loss, inner)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(hits)
        return loss.detach(), hits

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return slope * grads[0].to(slope.dtype), None
