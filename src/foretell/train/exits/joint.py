"""Training of exits together, with a feed-forward network that all share, and how far their gradients agree on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.speculator.network.exits import Exits
from foretell.train.exits.descent import Descent, OnStep, ignore_step
from foretell.train.exits.fit import BATCH, exit_loss
from foretell.train.exits.states import LayerStates


@dataclass(frozen=True)
class JointSettings:
    """`weights`: of the losses of the exits, ascending by layer (EE-LLM, arXiv 2312.04916). `warm_up`: share of the
    steps over which the weights of all exits but the deepest rise from 0.
    """

    weights: tuple[float, ...]
    warm_up: float = 0.0

    def at(self, step: int, steps: int) -> tuple[float, ...]:
        """The weights at a step."""
        rise = min(1.0, (step + 1) / (self.warm_up * steps)) if self.warm_up else 1.0
        return (*(w * rise for w in self.weights[:-1]), self.weights[-1])


def parse_weights(text: str, layers: Sequence[int]) -> tuple[float, ...]:
    """Weights of losses: `uniform`, `linear` in the layer (CALM, arXiv 2207.07061), both with the sum 1, or numbers.

    Raises:
        ValueError: it is none of these, or there is another number of exits.
    """
    if text in ("uniform", "linear"):
        parts = [1.0 if text == "uniform" else float(layer) for layer in layers]
        return tuple(p / sum(parts) for p in parts)
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != len(layers) or not all(0 < w < float("inf") for w in weights):
        raise ValueError(
            f"--exit-weights {text}: uniform, linear, or a number above 0 for each of the {len(layers)} exits, as "
            "0.1,0.2, was expected"
        )
    return weights


def train_jointly(
    exits: Exits,
    states: LayerStates,
    steps: int,
    rate: float,
    seed: int,
    settings: JointSettings,
    on_step: OnStep = ignore_step,
) -> Float[torch.Tensor, "e e"]:
    """Train all exits at once on the weighted sum of their losses.

    Returns the mean cosine of the gradients of every two exits with respect to the network that they share, over the
    second half of the steps: below 0, what one exit learns there costs the other.
    """
    count = len(exits.config.layers)
    shared = [p.requires_grad_() for part in (exits.up, exits.down) for p in part.parameters()]
    own = [
        [p.requires_grad_() for part in (exits.norms, exits.maps) if len(part) for p in part[i].parameters()]
        for i in range(count)
    ]
    descent = Descent(steps, rate)
    optimizer = torch.optim.Adam([*shared, *(p for part in own for p in part)], rate)
    generator, cosines = torch.Generator().manual_seed(seed), torch.zeros(count, count)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = descent.rate_at(step)
        index = torch.randint(len(states), (BATCH,), generator=generator)
        weights, total, flat = settings.at(step, steps), 0.0, list[torch.Tensor]()
        optimizer.zero_grad()
        for i, weight in enumerate(weights):
            loss = exit_loss(exits, i, states, index)
            gradients = torch.autograd.grad(loss, [*shared, *own[i]])
            for parameter, gradient in zip([*shared, *own[i]], gradients, strict=True):
                scaled = weight * gradient
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
            flat.append(torch.cat([g.flatten() for g in gradients[: len(shared)]]))
            total += weight * loss.item()
        optimizer.step()
        if step >= steps // 2:
            cosines += _cosines(torch.stack(flat))
        on_step(step + 1, total)
    exits.requires_grad_(False)
    return cosines / (steps - steps // 2)


def _cosines(gradients: Float[torch.Tensor, "e p"]) -> Float[torch.Tensor, "e e"]:
    unit = torch.nn.functional.normalize(gradients, dim=1)
    return unit @ unit.T


def cosine_table(layers: Sequence[int], cosines: Float[torch.Tensor, "e e"]) -> list[str]:
    """The cosines of gradients as lines of Markdown."""
    lines = [
        "| cosine of gradients | " + " | ".join(f"exit {layer}" for layer in layers) + " |",
        "|---:|" + "---:|" * len(layers),
    ]
    return lines + [
        f"| exit {layer} | " + " | ".join(f"{c:.2f}" for c in row) + " |"
        for layer, row in zip(layers, cosines.tolist(), strict=True)
    ]
