"""Training of exits together, with a feed-forward network that all share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.speculator.network.exits import Exits
from foretell.train.exits.checkpoints import Checkpoints
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
    checkpoints: Checkpoints | None = None,
) -> None:
    """Train all exits at once on the weighted sum of their losses."""

    def loss(step: int) -> Float[torch.Tensor, ""]:
        index = torch.randint(len(states), (BATCH,))
        weights = settings.at(step, steps)
        return torch.stack([w * exit_loss(exits, i, states, index) for i, w in enumerate(weights)]).sum()

    parts = (exits.norms, exits.maps, exits.up, exits.down)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Descent(steps, rate).run([p for part in parts for p in part.parameters()], loss, on_step, checkpoints)
