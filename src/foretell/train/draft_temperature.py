"""The temperature at which a speculator's probabilities say how often its tokens are right (temperature scaling,
arXiv 1706.04599).

Trees keep the nodes with the highest probabilities along their paths, and leave out those below a threshold, so they
depend on these probabilities being right; the text does not. A speculator that was distilled from soft distributions is
less sure of the token that greedy decoding takes than it may be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from foretell.model.run.network import Network
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.speculator.network.eagle import EagleNetwork
from foretell.train.data.dataset import Document
from foretell.train.draft_states import DraftStates, draft_states

_KINDS = ("draft_model", "eagle3")
"""Kinds whose head reads the output of a norm that nothing else reads."""
_NEWTON_STEPS = 12
_CHUNK = 256


@dataclass(frozen=True)
class Calibration:
    """How sure a speculator is of its most probable token, and how often that is the text's next one."""

    confidence: float
    right: float
    loss: float
    """Mean negative log probability of the next token, in nats."""


@dataclass(frozen=True)
class TemperatureFit:
    """A fitted temperature, and the calibration before and after on `states` states that it was not fitted on."""

    temperature: float
    states: int
    before: Calibration
    after: Calibration


def temperature_network(network: Speculator) -> EagleNetwork | DraftNetwork:
    """The network, if a temperature can be part of its weights.

    Raises:
        ValueError: it cannot.
    """
    if network.kind in _KINDS and isinstance(network, EagleNetwork | DraftNetwork):
        if not (isinstance(network, EagleNetwork) and network.config.norm_output):
            return network
        raise ValueError("with norm_output the next draft step reads the output of the final norm; it cannot be scaled")
    raise ValueError(
        f"a temperature is fitted for {' and '.join(_KINDS)}, and this is a speculator of kind {network.kind}"
    )


@torch.no_grad()
def fit_temperature(
    target: Network, network: EagleNetwork | DraftNetwork, documents: Sequence[Document], num_tokens: int
) -> TemperatureFit:
    """Fit the temperature to the next tokens of half of the documents, and compare on the other half. The final norm of
    the network, in place, is divided by it.

    Raises:
        ValueError: the documents have no token to learn, or none that the network drafts.
    """
    fitted, held_out = (
        _with_columns(draft_states(target, network, documents[i::2], num_tokens // 2), network) for i in range(2)
    )
    temperature = best_temperature(network, fitted)
    before, after = (calibration(network, held_out, t) for t in (1.0, temperature))
    network.get_parameter("norm.weight").data.div_(temperature)
    return TemperatureFit(temperature, len(held_out), before, after)


def best_temperature(network: Speculator, states: DraftStates) -> float:
    """The temperature of the least loss, by Newton's method on its inverse, in which the loss is convex.

    `states`: their next tokens are columns of the draft vocabulary.
    """
    inverse = 1.0
    for _ in range(_NEWTON_STEPS):
        slope, curvature = _derivatives(network, states, inverse)
        inverse = min(max(inverse - slope / max(curvature, 1e-6), inverse / 2), inverse * 2)
    return 1 / inverse


def calibration(network: Speculator, states: DraftStates, temperature: float = 1.0) -> Calibration:
    """At a temperature, over states whose next tokens are columns of the draft vocabulary."""
    confidence = right = loss = 0.0
    for logits, label in _logits(network, states):
        log = (logits / temperature).log_softmax(-1)
        best = log.max(-1)
        confidence += best.values.exp().sum().item()
        right += (best.indices == label).sum().item()
        loss -= log.gather(1, label[:, None]).sum().item()
    return Calibration(confidence / len(states), right / len(states), loss / len(states))


def _with_columns(states: DraftStates, network: Speculator) -> DraftStates:
    """The states whose next tokens are drafted, and these as columns of the draft vocabulary."""
    if network.token_of is None:
        return states
    vocabulary = network.token_of.cpu()
    column = torch.searchsorted(vocabulary, states.following).clamp_max(len(vocabulary) - 1)
    known = vocabulary[column] == states.following
    if not known.any():
        raise ValueError("the network drafts none of the tokens of the data set; give another set")
    return DraftStates(states.inputs[known], column[known])


def _derivatives(network: Speculator, states: DraftStates, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean loss, with respect to the inverse temperature."""
    slope = curvature = 0.0
    for logits, label in _logits(network, states):
        p = (inverse * logits).softmax(-1)
        mean = (p * logits).sum(-1)
        slope += (mean - logits.gather(1, label[:, None])[:, 0]).sum().item()
        curvature += ((p * logits.square()).sum(-1) - mean.square()).sum().item()
    return slope / len(states), curvature / len(states)


def _logits(
    network: Speculator, states: DraftStates
) -> Iterator[tuple[Float[torch.Tensor, "k w"], Int[torch.Tensor, " k"]]]:
    for inputs, label in zip(states.inputs.split(_CHUNK), states.following.split(_CHUNK), strict=True):
        yield network.compute_logits(inputs.to(network.lm_head.device)).float().cpu(), label
