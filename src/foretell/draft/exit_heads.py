"""Output heads after some of a target's layers, and when a token leaves at one of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Real

from foretell.model.block.layer import DecoderBlock
from foretell.model.kernels import rms_norm
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import NodeStates
from foretell.model.run.topk import top_probabilities
from foretell.speculator.network.exits import Exits
from foretell.speculator.network.pack import ExitHead

Confidence = Literal["softmax", "probability", "state", "classifier"]
"""How sure an exit is: the difference of its two largest probabilities, the cosine of the outputs of its last two
layers, or what a trained classifier says (CALM, arXiv 2207.07061); or its largest probability (EE-LLM, arXiv
2312.04916).
"""
CONFIDENCES = get_args(Confidence)


@dataclass(frozen=True)
class ChainDecoder:
    """The first layers of a target with the head of an exit, on the CPU kernels; `token_of`: the token of every row of
    the head; None: the row's index.
    """

    network: NativeDecoder
    token_of: Int[torch.Tensor, " w"] | None


class ExitHeads(ABC):
    """The output heads of some layers of a target.

    `layers`: after how many layers each exit is, ascending. `token_of`: the token of every logit; None: all tokens.
    """

    layers: tuple[int, ...]
    token_of: Int[np.ndarray, " w"] | None = None
    blocks: Sequence[DecoderBlock] = ()
    """Decoder blocks between the layer of the only exit and the exit, which then reads their outputs."""
    chooses_depth: bool = False
    """Whether the classifiers choose a depth at the first fitted exit, rather than at every exit whether to leave."""
    chooses_once: bool = False
    """Whether they choose it once per answer."""

    @property
    def first_layer(self) -> int:
        """The layer of the exit at which depths are chosen."""
        return self.layers[0]

    @abstractmethod
    def logits(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """Logits of an exit, counted from 0, from the outputs of its last layer."""

    def chain_decoder(self, exit_: int, network: Network) -> ChainDecoder | None:
        """The layers and blocks of an exit, the first ones of a network, with the exit's head; None: the kernels cannot
        run these.
        """
        return None

    def classify(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, " k"]:
        """Probability that the exit gives the target's own token.

        Raises:
            ValueError: there is no classifier.
        """
        raise ValueError("exits with the target's own head have no classifier; fit some with `foretell train exits`")

    def depth_distribution(self, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k e"]:
        """Probability that the depth is at most that of each exit, from the outputs of `first_layer`. Only if
        `chooses_depth`.
        """
        raise ValueError("exits with the target's own head choose no depth; fit some with `foretell train exits`")


class SharedHead(ExitHeads):
    """One exit with the target's own final norm and head (LayerSkip, arXiv 2404.16710).

    Raises:
        ValueError: the target does not have so many layers.
    """

    def __init__(self, network: Network, layer: int) -> None:
        if not 1 <= layer <= network.config.layers:
            raise ValueError(f"cannot exit after {layer} layers: the model has {network.config.layers}")
        self._network, self.layers = network, (layer,)

    def logits(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """Logits of the whole vocabulary."""
        return self._network.logits(self._network.final_norm(states))

    def chain_decoder(self, exit_: int, network: Network) -> ChainDecoder | None:
        """The first layers."""
        first_layers = _first_layers(network, self.layers[exit_])
        return None if first_layers is None else ChainDecoder(first_layers, None)


class TrainedExits(ExitHeads):
    """Exits that `foretell train exits` has fitted: all of them, or those after some layers.

    `heads`: norm and head of exits by number, packed for the kernels, each head with the exit's map in it. `blocks`:
    those of the exits in the dtype of the target.

    Raises:
        ValueError: there is no exit after one of these layers.
    """

    def __init__(
        self,
        network: Exits,
        layers: Sequence[int] = (),
        heads: Mapping[int, ExitHead] | None = None,
        blocks: Sequence[DecoderBlock] = (),
    ) -> None:
        known = network.config.layers
        missing = [layer for layer in layers if layer not in known]
        if missing:
            raise ValueError(f"there is no exit after {missing[0]} layers: the exits are after {list(known)}")
        self._network, self.layers = network, tuple(layers) or known
        self._number = [known.index(layer) for layer in self.layers]
        self.token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._heads = heads or {}
        self.blocks = tuple(blocks)
        self.chooses_depth = network.config.halting in ("token", "sequence")
        self.chooses_once = network.config.halting == "sequence"

    def logits(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """Logits over the draft vocabulary."""
        packed = self._heads.get(self._number[exit_])
        if packed is not None:
            return packed.head(rms_norm(states.float().contiguous(), packed.norm, self._network.config.norm_eps))
        return self._network.compute_logits(self._network(self._number[exit_], states))

    def chain_decoder(self, exit_: int, network: Network) -> ChainDecoder | None:
        """The first layers with the packed head."""
        depth, packed = self.layers[exit_] + len(self.blocks), self._heads.get(self._number[exit_])
        first_layers = _first_layers(network, depth)
        if first_layers is None or packed is None:
            return None
        return ChainDecoder(first_layers.with_head(packed.norm, packed.head), self._network.token_of)

    def classify(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, " k"]:
        """The classifier's probability."""
        return torch.sigmoid(self._network.exit_score(self._number[exit_], states))

    @property
    def first_layer(self) -> int:
        """The layer of the first exit that was fitted."""
        return self._network.config.layers[0]

    def depth_distribution(self, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k e"]:
        """The cumulative sums of the softmax of the classifiers, with a score of 0 for all layers."""
        scores = F.pad(self._network.depth_scores(states), (0, 1))
        return scores.softmax(-1).cumsum(-1)[:, self._number]


def _first_layers(network: Network, layers: int) -> NativeDecoder | None:
    return network.first_layers(layers) if isinstance(network, NativeDecoder) and network.grows_dynamic_trees else None


@dataclass(frozen=True)
class ExitRule:
    """When a token leaves: at the first exit with a confidence above the threshold.

    `thresholds`: of every exit; a threshold of 1 or more is never passed. `decay`: the threshold falls with the
    position t in the answer, to 0.9 l + 0.1 exp(-decay t / horizon), since early errors spread (CALM); 0: it is l.

    Raises:
        ValueError: an unknown confidence, or a decay below 0.
    """

    confidence: Confidence
    thresholds: tuple[float, ...]
    decay: float = 0.0
    horizon: int = 256

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise ValueError(f"unknown confidence {self.confidence!r}: {', '.join(CONFIDENCES)}")
        if not self.decay >= 0 or self.horizon < 1:
            raise ValueError(f"decay and horizon are at least 0 and 1, found {self.decay} and {self.horizon}")

    def threshold(self, exit_: int, position: Real[np.ndarray, "*t"] | int) -> Float[np.ndarray, "*t"]:
        """The threshold of an exit at positions of the answer."""
        level = self.thresholds[exit_]
        at = np.asarray(position, np.float64)
        if not self.decay or level >= 1:
            return np.full(at.shape, level, np.float64)
        return np.clip(0.9 * level + 0.1 * np.exp(-self.decay * at / self.horizon), 0, 1)


def measure_confidence(
    confidence: Confidence,
    heads: ExitHeads,
    exit_: int,
    at_exit: NodeStates,
    logits: Float[torch.Tensor, "k w"],
) -> Float[torch.Tensor, " k"]:
    """How sure an exit is at every node; on the CPU kernels with the bits of chains in one call (`ExitChain`)."""
    if confidence in ("softmax", "probability"):
        best = top_probabilities(logits.float(), min(2, logits.shape[-1]))[0]
        return best[:, 0] - best[:, 1] if confidence == "softmax" and best.shape[1] > 1 else best[:, 0]
    if confidence == "state":
        return F.cosine_similarity(at_exit.states.float(), at_exit.before.float(), dim=-1)
    return heads.classify(exit_, at_exit.states)
