"""Finds the exits of a target, and chooses among them.

Chooses the exit that drafts: by what was measured of it, and by what it costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from foretell.catalogue.build_context import BuildContext, default_exit_layer, require_network
from foretell.catalogue.options.lossy import EarlyExitOptions
from foretell.catalogue.speculators import read_speculator, target_card
from foretell.draft.beta_mixture import AdaptiveThresholds, BetaMixtureThreshold
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.exit_heads import ExitHeads, ExitRule, SharedHead, TrainedExits
from foretell.model.block.decoder import Decoder
from foretell.model.config.model import ModelConfig
from foretell.model.config.read_weights import layer_weights
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import check_spans
from foretell.speculator.exit_calibration import read_calibration
from foretell.speculator.installed import find_installed
from foretell.speculator.network.exits import DRAFT_PROBABILITY, DraftQuality, Exits
from foretell.speculator.network.pack import DraftPrecision, pack_exit, pack_network

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


EXITS = Exits.kind
EXIT_PRECISION: DraftPrecision = "int8"
"""Of the matrices of exits on the CPU kernels."""


def find_exits(context: BuildContext) -> Exits | None:
    """The exits that the user named, else those installed for the target, not packed; None: there are none.

    Raises:
        ValueError: what was named is another kind of speculator, or for another target.
    """
    folder = context.speculator or find_installed(EXITS, target_card(context).fingerprint)
    if folder is None:
        return None
    speculator = read_speculator(context, folder)
    if not isinstance(speculator, Exits):
        raise ValueError(
            f"{folder}: a speculator of kind {speculator.kind}, and this method drafts with exits; fit some with "
            f"`foretell train exits`"
        )
    return speculator


class DraftHeads(NamedTuple):
    """Exits that draft, and the probability below which they should not."""

    heads: ExitHeads
    least_probability: float


def draft_heads(
    context: BuildContext, layer: int | None, several: bool, precision: DraftPrecision = EXIT_PRECISION
) -> DraftHeads:
    """The exit that drafts: the fitted one after `layer` layers, by default the one that promises most; without fitted
    exits the target's own head, by default after a third of its layers. `several`: this exit and all before it.
    `precision`: of the matrices of exits on the CPU kernels.

    Raises:
        ValueError: there is no exit after so many layers.
    """
    exits, network = find_exits(context), require_network(context, "drafts with the target's first layers")
    if exits is None:
        return DraftHeads(SharedHead(network, layer or default_exit_layer(network.config)), 0.0)
    chosen = layer or best_exit(exits, network.config)
    heads = packed_exits(exits, [e for e in exits.config.layers if e < chosen] * several + [chosen], network, precision)
    return DraftHeads(heads, least_probability(exits, network.config, chosen))


def packed_exits(
    exits: Exits, layers: Sequence[int], network: Network, precision: DraftPrecision = EXIT_PRECISION
) -> TrainedExits:
    """The exits of a network after these layers (none: all), packed for the CPU kernels where these run.

    Raises:
        ValueError: there is no exit after one of these layers.
    """
    known = exits.config.layers
    heads = {i: pack_exit(exits, i, precision) for i, layer in enumerate(known) if layer in (layers or known)}
    packed = {i: head for i, head in heads.items() if head is not None}
    floats = network.embedding.dtype if isinstance(network, Decoder) else torch.float32
    return TrainedExits(pack_network(exits, precision), layers, packed, exits.decoder_blocks(floats))


def exit_answers(context: BuildContext, options: EarlyExitOptions) -> EarlyExitDrafter:
    """A drafter of the tokens that exits are sure of.

    Raises:
        ValueError: there are no exits, or the calibration is not theirs.
    """
    exits, network = find_exits(context), require_network(context, "leaves the target early")
    check_spans(network.config)
    if exits is None:
        raise ValueError(
            "no exits are installed for this target; fit some with `foretell train exits` and name their folder with "
            "--draft-model"
        )
    if options.calibration is not None:
        calibration = read_calibration(Path(options.calibration), target_card(context).fingerprint, exits)
        heads = packed_exits(exits, calibration.layers, network)
        rule = ExitRule(calibration.measure, calibration.thresholds, calibration.decay, calibration.horizon)
    else:
        heads = packed_exits(exits, options.exit_layers or (), network)
        levels = (options.exit_threshold,) * len(heads.layers)
        rule = ExitRule(options.exit_confidence, levels, options.exit_decay)
    adaptive = None
    if options.exit_adaptive:
        if len(heads.layers) != 1:
            raise ValueError(
                f"exit_adaptive sets the threshold of one exit, and there are {len(heads.layers)}, after "
                f"{list(heads.layers)} layers; name one with exit_layers"
            )
        adaptive = AdaptiveThresholds(BetaMixtureThreshold(options.exit_threshold, options.exit_posterior))
    return EarlyExitDrafter(heads, rule, only_confident=True, missing_keys=options.missing_keys, adaptive=adaptive)
