"""Finds the exits of a target, and chooses among them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from foretell.catalogue.build_context import BuildContext, default_exit_layer, require_network
from foretell.catalogue.exit_choice import (
    best_exit,
    least_probability,
)
from foretell.catalogue.options.lossy import EarlyExitOptions
from foretell.catalogue.speculators import read_speculator, target_card
from foretell.draft.beta_mixture import AdaptiveThresholds, BetaMixtureThreshold
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.exit_heads import ExitHeads, ExitRule, SharedHead, TrainedExits
from foretell.model.block.decoder import Decoder
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import check_spans
from foretell.speculator.exit_calibration import read_calibration
from foretell.speculator.installed import find_installed
from foretell.speculator.network.exits import Exits
from foretell.speculator.network.pack import DraftPrecision, pack_exit, pack_network

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
