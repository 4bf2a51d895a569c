"""Fits the exits of a model: shortcuts in closed form, and then if asked by gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.speculator.network.exits import DRAFT_PROBABILITY, DraftQuality, Exits
from foretell.train.exits.checkpoints import Checkpoints
from foretell.train.exits.descent import Descent
from foretell.train.exits.least_squares import LeastSquares
from foretell.train.exits.states import LayerStates

ExitKind = Literal["linear", "shared"]
"""`linear`: a least-squares map; `shared`: the target's own norm and head."""
CHUNK = 1024
"""Tokens whose logits are computed at once."""
BATCH = 512
"""Tokens of a batch of gradient training."""


@dataclass(frozen=True)
class ExitQuality:
    """How an exit does on tokens that it was not fitted on.

    `agreement[k - 1]`: share of tokens at which the target's most probable token is among the exit's `k` most probable
    ones. `residual`: squared error of the input of the head, over that of predicting zero. `confident`: share of tokens
    that may leave here, most confident first by the softmax margin, before 5 % of those that left disagree. `drafting`:
    see `DraftQuality`.
    """

    layer: int
    agreement: tuple[float, ...]
    residual: float
    confident: float
    drafting: DraftQuality


def fit_linear(exits: Exits, states: LayerStates) -> None:
    """Set every map by least squares from the normed outputs of its layer to the input of the target's head."""
    for i in range(len(exits.config.layers)):
        fitted = LeastSquares(exits.config.target.hidden, exits.config.target.hidden)
        for x, y in zip(states.layers[i].split(CHUNK), states.final.split(CHUNK), strict=True):
            fitted.add(exits.norms[i](x.float()), y.float())
        exits.maps[i].get_parameter("weight").data.copy_(fitted.solve())


def set_shared(exits: Exits, final_norm: Float[torch.Tensor, " d"]) -> None:
    """Give every exit the target's final norm."""
    for norm in exits.norms:
        norm.get_parameter("weight").data.copy_(final_norm)


def refine(
    exits: Exits,
    states: LayerStates,
    steps: int,
    rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, int, float], None] = lambda *_: None,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Train norms, maps and networks by gradient on the cross-entropy with the target's distribution over the draft
    vocabulary; each exit by itself, so that no exit's gradient meets another's.

    `on_step` gets the layer, the step and the loss.
    """
    for i, layer in enumerate(exits.config.layers):

        def loss(_: int, i: int = i) -> Float[torch.Tensor, ""]:
            return exit_loss(exits, i, states, torch.randint(len(states), (BATCH,)))

        trained = [p for m in _modules_of(exits, i) for p in m.parameters()]
        own = None if checkpoints is None else checkpoints.part(f"exit-{layer}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            Descent(steps, rate).run(trained, loss, partial(on_step, layer), own)


def exit_loss(exits: Exits, i: int, states: LayerStates, index: Int[torch.Tensor, " n"]) -> Float[torch.Tensor, ""]:
    """Cross-entropy of exit `i` at some tokens with the target's distribution over the draft vocabulary."""
    with torch.no_grad():
        target = exits.compute_logits(states.final[index].float()).softmax(-1)
    logits = exits.compute_logits(exits(i, states.layers[i][index].float()))
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def _modules_of(exits: Exits, i: int) -> list[torch.nn.Module]:
    """What exit `i` has of its own before the head."""
    parts = (exits.norms, exits.maps, exits.up, exits.down)
    return [part[i] for part in parts if len(part)]


@torch.no_grad()
def predictions(
    exits: Exits, i: int, states: LayerStates, most: int = 2
) -> tuple[Float[torch.Tensor, "t k"], Int[torch.Tensor, "t k"]]:
    """The `most` largest probabilities of exit `i` at every token, and their indices in the draft vocabulary."""
    largest = [
        exits.compute_logits(exits(i, x.float())).softmax(-1).topk(most, -1) for x in states.layers[i].split(CHUNK)
    ]
    return torch.cat([f.values for f in largest]), torch.cat([f.indices for f in largest])


@torch.no_grad()
def target_tokens(head: Float[torch.Tensor, "v d"], states: LayerStates) -> Int[torch.Tensor, " t"]:
    """The target's most probable token after every token."""
    return torch.cat([F.linear(x.to(head.dtype), head).argmax(-1) for x in states.final.split(CHUNK)])


def evaluate(exits: Exits, states: LayerStates, target: Int[torch.Tensor, " t"], ranks: int = 4) -> list[ExitQuality]:
    """The quality of every exit, on other states than those it was fitted on; notes it in `exits`."""
    out = list[ExitQuality]()
    for i, layer in enumerate(exits.config.layers):
        probability, index = predictions(exits, i, states, ranks)
        hit = draft_tokens(exits, index) == target[:, None]
        error = sum(
            float((exits(i, x.float()) - y.float()).square().sum())
            for x, y in zip(states.layers[i].split(CHUNK), states.final.split(CHUNK), strict=True)
        )
        margin, right = probability[:, 0] - probability[:, 1], hit[:, 0].double()
        sums = right[margin.argsort(descending=True)].cumsum(0)
        kept = torch.nonzero(sums / torch.arange(1, len(sums) + 1) >= 0.95)
        confident = (int(kept.max()) + 1) / len(sums) if len(kept) else 0.0
        agreement = tuple(hit.float().cumsum(-1).mean(0).tolist())
        exits.agreement[i] = agreement[0]
        sure = probability[:, 0] >= DRAFT_PROBABILITY
        drafting = DraftQuality(drafts=float(sure.float().mean()), right=float(right[sure].mean()) if sure.any() else 0)
        residual = error / float(states.final.float().square().sum())
        out.append(ExitQuality(layer, agreement, residual, confident, drafting))
    exits.config = exits.config.model_copy(update={"drafting": tuple(q.drafting for q in out)})
    return out


def draft_tokens(exits: Exits, index: Int[torch.Tensor, "*t"]) -> Int[torch.Tensor, "*t"]:
    """The tokens at indices into the draft vocabulary."""
    return index if exits.token_of is None else exits.token_of[index]
