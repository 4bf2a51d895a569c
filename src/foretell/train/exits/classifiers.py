"""Training of the classifiers of exits, on states of a model that stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.speculator.network.exits import Exits, Halting
from foretell.train.exits.descent import Descent
from foretell.train.exits.fit import CHUNK, draft_tokens
from foretell.train.exits.halting import (
    ExitOutcomes,
    Oracle,
    geometric_distribution,
    multinomial_distribution,
    oracle_exits,
    policy_loss,
    select,
    sequence_exits,
)
from foretell.train.exits.states import LayerStates
from foretell.utils.options import Option

_STEPS, _RATE, _BATCH = 200, 3e-2, 4096
_LEAST_LIKELIHOOD = -20.0
"""Log-probability that counts for tokens outside the draft vocabulary."""

Loss = Callable[[torch.Tensor], torch.Tensor]
"""Loss of the classifiers at the tokens, or answers, of these indices."""


@dataclass(frozen=True)
class HaltingSettings:
    """What classifiers are trained for."""

    halting: Annotated[
        Halting,
        Option(
            "Classifiers are trained for: agreement with the model; the best depth, by exit (geometric), or at the "
            "first exit per token or per answer (sequence); a reward (policy)."
        ),
    ] = "agreement"
    oracle: Annotated[
        Oracle, Option("What the best depth is by: the model's token's likelihood, or whether it is right.")
    ] = "likelihood"
    penalty: Annotated[
        float,
        Option("What running all layers costs, in nats (correctness: in tokens).", name="--depth-penalty", least=0),
    ] = 0.5
    width: Annotated[
        float,
        Option(
            "Smoothing of the likelihoods over neighbouring tokens, squared tokens.", name="--oracle-width", least=0
        ),
    ] = 0.0


def fit_classifiers(
    exits: Exits, states: LayerStates, target: Int[torch.Tensor, " t"], settings: HaltingSettings, seed: int = 0
) -> None:
    """Fit the classifiers. `target`: the target's own token after every token."""
    outcomes = measure_outcomes(exits, states, target, whole=settings.halting != "agreement")
    generator = torch.Generator().manual_seed(seed)
    if settings.halting == "agreement":
        count, loss = len(states), _agreement_loss(exits, states, outcomes)
    elif settings.halting == "sequence":
        count, loss = len(states.lengths), _sequence_loss(exits, states, outcomes, settings)
    else:
        count, loss = len(states), _token_loss(exits, states, outcomes, settings, generator)
    parameters = exits.classifier, exits.classifier_bias
    Descent(_STEPS, _RATE).run(
        parameters, lambda _: loss(torch.randint(count, (min(_BATCH, count),), generator=generator))
    )


@torch.no_grad()
def measure_outcomes(
    exits: Exits, states: LayerStates, target: Int[torch.Tensor, " t"], whole: bool = True
) -> ExitOutcomes:
    """What every exit, and the whole model, gives at every token; without `whole`, the model's likelihoods are 0."""
    likelihood, correct = list[torch.Tensor](), list[torch.Tensor]()
    for i in range(len(exits.config.layers)):
        parts = [
            _exit_outcomes(exits, i, x.float(), y)
            for x, y in zip(states.layers[i].split(CHUNK), target.split(CHUNK), strict=True)
        ]
        likelihood.append(torch.cat([p for p, _ in parts]))
        correct.append(torch.cat([c for _, c in parts]))
    own = [torch.zeros(len(states))]
    if whole:
        head = exits.full_lm_head.float()
        own = [F.linear(x.float(), head).log_softmax(-1).amax(-1) for x in states.final.split(CHUNK)]
    layers, total = exits.config.layers, exits.config.target.layers
    depth = torch.tensor([*layers, total]) / total
    everywhere = torch.ones(len(states), dtype=torch.bool)
    return ExitOutcomes(torch.stack([*likelihood, torch.cat(own)], 1), torch.stack([*correct, everywhere], 1), depth)


def _exit_outcomes(
    exits: Exits, i: int, h: Float[torch.Tensor, "t d"], target: Int[torch.Tensor, " t"]
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = exits.compute_logits(exits(i, h))
    column, known = target, torch.ones_like(target, dtype=torch.bool)
    if exits.token_of is not None:
        column = torch.searchsorted(exits.token_of, target).clamp_max(len(exits.token_of) - 1)
        known = exits.token_of[column] == target
    likelihood = logits.log_softmax(-1).gather(1, column[:, None])[:, 0]
    likelihood = torch.where(known, likelihood, torch.full_like(likelihood, _LEAST_LIKELIHOOD))
    return likelihood.clamp_min(_LEAST_LIKELIHOOD), draft_tokens(exits, logits.argmax(-1)) == target


def _agreement_loss(exits: Exits, states: LayerStates, outcomes: ExitOutcomes) -> Loss:
    """Logistic regression of "this exit gives the target's token", both classes weighted alike; mean over exits."""
    label = outcomes.correct[:, :-1].float()
    share = label.mean(0).clamp(1e-3, 1 - 1e-3)
    weight = torch.where(label > 0, 0.5 / share, 0.5 / (1 - share))
    return lambda index: (
        F.binary_cross_entropy_with_logits(_scores(exits, states, index), label[index], weight[index], reduction="sum")
        / len(index)
    )


def _token_loss(
    exits: Exits, states: LayerStates, outcomes: ExitOutcomes, settings: HaltingSettings, generator: torch.Generator
) -> Loss:
    if settings.halting == "policy":
        return lambda index: policy_loss(
            _scores(exits, states, index), select(outcomes, index), settings.penalty, generator
        )
    best = oracle_exits(outcomes, settings.oracle, settings.penalty, settings.width, states.lengths)
    if settings.halting == "geometric":
        return lambda index: F.nll_loss(geometric_distribution(_scores(exits, states, index)), best[index])
    return lambda index: F.nll_loss(
        multinomial_distribution(exits.depth_scores(states.layers[0][index].float())), best[index]
    )


def _sequence_loss(exits: Exits, states: LayerStates, outcomes: ExitOutcomes, settings: HaltingSettings) -> Loss:
    """One depth per answer, from the state of its first token, which has attended to the prompt."""
    best = sequence_exits(outcomes, settings.oracle, settings.penalty, states.lengths)
    ends = torch.tensor(states.lengths).cumsum(0)
    first = torch.minimum(ends - torch.tensor(states.lengths) + 1, ends - 1)
    h = states.layers[0][first].float()
    return lambda index: F.nll_loss(multinomial_distribution(exits.depth_scores(h[index])), best[index])


def _scores(exits: Exits, states: LayerStates, index: Int[torch.Tensor, " n"]) -> Float[torch.Tensor, "n e"]:
    return torch.stack([exits.exit_score(i, h[index].float()) for i, h in enumerate(states.layers)], 1)
