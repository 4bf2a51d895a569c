"""Chooses the exit that drafts: by what was measured of it, and by what it costs."""

from dataclasses import dataclass

from foretell.model.config.model import ModelConfig
from foretell.model.config.read_weights import layer_weights
from foretell.speculator.network.exits import DRAFT_PROBABILITY, DraftQuality, Exits

LONGEST_CHAIN = 8
"""Most tokens of the chains that the choice considers."""
_CALL_WEIGHTS = 15e6
"""Time of a draft outside the kernels, in weights that a pass reads meanwhile: 0.4 ms at 35 GB/s of int8."""
_TOKENS_PER_PASS, _LEAST_PROBABILITY = 1.7, 0.3
"""Of a chain that pays; and the least probability of a drafted token, which costs the target's pass something too."""


@dataclass(frozen=True)
class ExitCosts:
    """Weights that a pass reads, which its time is in proportion to for few tokens: of a layer, of the target's head,
    and of an exit (its map, network and decoder blocks, and its rows of the head).
    """

    layer: float
    head: float
    exit: float


def exit_costs(config: ModelConfig, exits: Exits) -> ExitCosts:
    """Predicted costs of the exits of a target."""
    c, e = config, exits.config
    # The kernels fold the map into the head; beside a network they cannot.
    layer = layer_weights(c) / c.layers
    own: float = 2 * e.inner * c.hidden + (c.hidden**2 if e.maps else 0) if e.inner else 0
    if e.blocks is not None:
        own += e.blocks.layers * layer
    return ExitCosts(layer, c.vocab * c.hidden, (e.draft_vocab or c.vocab) * c.hidden + own)


def best_exit(exits: Exits, config: ModelConfig) -> int:
    """The layer of the exit with the most expected tokens for the weights that are read, at the best length of chains.

    Exits without a measured `DraftQuality` count as drafting everywhere, with the agreement that was measured.
    """
    costs, layers = exit_costs(config, exits), exits.config.layers
    quality = exits.config.drafting or [DraftQuality(drafts=1.0, right=float(a)) for a in exits.agreement]
    gains = [
        max(expected_gain(q, layer, config.layers, costs, n) for n in range(1, LONGEST_CHAIN + 1))
        for layer, q in zip(layers, quality, strict=True)
    ]
    return layers[gains.index(max(gains))]


def least_probability(exits: Exits, config: ModelConfig, layer: int) -> float:
    """Probability below which the exit after `layer` layers should not draft: a token must promise what its layers and
    the exit cost beside a pass, in tokens.
    """
    costs = exit_costs(config, exits)
    share = (layer * costs.layer + costs.exit) / (config.layers * costs.layer + costs.head)
    return min(DRAFT_PROBABILITY, max(_LEAST_PROBABILITY, _TOKENS_PER_PASS * share))


def expected_gain(quality: DraftQuality, layer: int, layers: int, costs: ExitCosts, length: int) -> float:
    """Tokens of a step with a chain of up to `length` tokens for the weights that it reads, over those of plain
    decoding.

    A chain goes on while the exit is sure, as often as was measured. Every test of it reads the exit; every drafted
    token reads the first layers, once for the token itself: the verifying pass goes on from there (LayerSkip).
    """
    tokens = _powers(quality.drafts * quality.right, length + 1)
    tests, drafted = _powers(quality.drafts, length), quality.drafts * _powers(quality.drafts, length)
    plain = layers * costs.layer + costs.head
    step = plain + _CALL_WEIGHTS + tests * costs.exit + drafted * layer * costs.layer
    return tokens * plain / step


def _powers(base: float, count: int) -> float:
    """The sum of the first `count` powers, from 1 on."""
    return sum(base**i for i in range(count))
