"""An exit as a draft model with a cache of its own: it grows trees in one call, and may have weights of fewer bits."""

from collections.abc import Sequence
from typing import Literal

import torch

from foretell.catalogue.build_context import BuildContext, require_network
from foretell.draft import DraftModel
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.exit_heads import ExitHeads
from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.vocabulary import ReducedVocabulary
from foretell.speculator.network.pack import DraftPrecision, pack_decoder

ExitWeights = Literal["target", "int8", "int4"]
"""Weights of an exit's layers and blocks in drafts: the target's, or a copy in fewer bits."""
COPY_PRECISION: dict[ExitWeights, DraftPrecision] = {"int8": "int8-activations", "int4": "int4"}
"""Of copies, on the CPU kernels."""


def exit_draft(context: BuildContext, heads: ExitHeads, weights: ExitWeights) -> DraftModel | EarlyExitDrafter:
    """A draft model of the layers, blocks and head of the only exit; where the kernels cannot run it, and the weights
    are the target's, a drafter in the target's cache.

    Raises:
        ValueError: the weights cannot be read again, or nothing here runs them in fewer bits.
    """
    layer, network = heads.layers[0], require_network(context, "drafts with the target's first layers")
    if weights == "target":
        chain = heads.chain_decoder(0, _followed_by(network, layer, heads.blocks))
        if chain is None:
            return EarlyExitDrafter(heads)
    else:
        chain = heads.chain_decoder(0, _packed_copy(context, layer, heads.blocks, weights))
        if chain is None:
            raise ValueError(
                f"exit_weights {weights} needs exits that are linear after their norm: fit them without --inner, or "
                "leave exit_weights unset"
            )
    run: Network = chain.network
    return DraftModel(DecoderRunner(run if chain.token_of is None else ReducedVocabulary(run, chain.token_of)))


def _followed_by(network: Network, layer: int, blocks: Sequence[DecoderBlock]) -> Network:
    if blocks and isinstance(network, NativeDecoder):
        return network.followed_by(layer, blocks, layer)
    return network


def _packed_copy(
    context: BuildContext, layer: int, blocks: Sequence[DecoderBlock], weights: ExitWeights
) -> NativeDecoder:
    """The first layers and the blocks of an exit, packed in fewer bits."""
    network = require_network(context)
    if context.checkpoint is not None:
        decoder = context.checkpoint.decoder(torch.bfloat16, range(layer))
    elif isinstance(network, Decoder):
        decoder = network.first_layers(layer)
    else:
        raise ValueError(f"exit_weights {weights} needs the target's weights, which cannot be read again here")
    if decoder.device.type != "cpu" or not native.available() or not NativeDecoder.supports(decoder.config):
        raise ValueError(
            f"exit_weights {weights} runs on the CPU kernels, which do not run this model here; leave it unset"
        )
    return pack_decoder(decoder.followed_by(layer, blocks), COPY_PRECISION[weights])
