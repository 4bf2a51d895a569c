"""Methods whose drafter predicts all tokens of a draft in one pass: DFlash, P-EAGLE, PARD."""

from functools import partial

from foretell.accept import Match
from foretell.catalogue.build_context import BuildContext, require_network
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.feature_level import method_of_levels
from foretell.catalogue.options.feature_level import DFlashOptions
from foretell.catalogue.speculators import check_draft_vocabs, packed_speculator, trained_speculator
from foretell.draft import DFlashDrafter, Pard2Drafter, PardDrafter, PEagleDrafter, UnoDrafter
from foretell.engine.method import AnyMethod
from foretell.model.load.adapter import adapter_folder
from foretell.model.load.pard2 import load_state_projection
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import DynamicTree
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.p_eagle import PEagle
from foretell.speculator.network.pard import PardNetwork
from foretell.tokenizer.codec import TextCodec

_LEVELS = "tokens in a pass, one for each level"
_PARD_DEPTH = 8
"""Tokens of a draft of a published PARD model where num_steps is not set: its trainer's."""


def dflash(context: BuildContext, options: DFlashOptions) -> AnyMethod:
    """DFlash with the tree of the options."""
    return dflash_method(packed_speculator(context, DFlash), options)


def dflash_method(network: DFlash, options: DFlashOptions) -> AnyMethod:
    """DFlash with matching; sampled drafts with rejection sampling.

    Raises:
        ValueError: the tree is deeper than the blocks that the network was trained for.
    """
    kind = f"predicted tokens in a block of {network.config.block_size}, one for each level"
    return method_of_levels(DFlashDrafter(network), network.depth, kind, options)


def p_eagle(context: BuildContext, options: DFlashOptions) -> AnyMethod:
    """P-EAGLE with the tree of the options."""
    return p_eagle_method(packed_speculator(context, PEagle), options)


def p_eagle_method(network: PEagle, options: DFlashOptions) -> AnyMethod:
    """P-EAGLE with matching; sampled drafts with rejection sampling.

    Raises:
        ValueError: the tree is deeper than the network was trained for.
    """
    return method_of_levels(PEagleDrafter(network), network.depth, _LEVELS, options)


def pard(context: BuildContext, options: DFlashOptions) -> AnyMethod:
    """PARD with the tree of the options: a model with a mask token that was named, or the target with an adapter for
    random tokens (UNO), else a trained speculator.
    """
    depth, kind = options.num_steps or _PARD_DEPTH, f"{_LEVELS} (num_steps)"
    if context.drafts and not context.speculators:
        return method_of_levels(_pard_model(context, depth), depth, kind, options)
    adapter = None if context.speculator is None else adapter_folder(context.speculator)
    if adapter is not None:
        return method_of_levels(_uno(context, str(adapter), depth), depth, kind, options)
    network = trained_speculator(context, "pard")
    assert isinstance(network, PardNetwork)
    return pard_method(network, options)


def _uno(context: BuildContext, adapter: str, depth: int) -> UnoDrafter:
    target = require_network(context, "drafts with an adapter of its target")
    if context.checkpoint is None:
        raise ValueError("pard with an adapter reads weights of the target, which cannot be read again here")
    adapted = context.checkpoint.adapted(target, adapter)
    if adapted is None:
        raise ValueError(
            f"{adapter}: an adapter of linear layers alone drafts, beside a target that is in memory as a whole"
        )
    return UnoDrafter(adapted, target, depth, noise_tokens(context.codec, context.vocab))


def noise_tokens(codec: TextCodec | None, vocab: int) -> int:
    """Number of a tokenizer's tokens, which UNO's random ones are drawn from."""
    return vocab if codec is None else min(codec.tokenizer.get_vocab_size(), vocab)


def _pard_model(context: BuildContext, depth: int) -> PardDrafter:
    """The draft model that was named, with its mask token, and where it is PARD-2 with the states of the target."""
    if len(context.drafts) > 1:
        raise ValueError(f"pard drafts with one model, and {len(context.drafts)} were named; name one")
    (runner,) = check_draft_vocabs(context)
    token = runner.network.config.mask_token if isinstance(runner, DecoderRunner) else None
    if token is None or not isinstance(runner, DecoderRunner):
        raise ValueError(
            "the draft model has no mask token (pard_token in its config.json), so it predicts the next token only; "
            "use draft_model, or a PARD checkpoint"
        )
    folder = context.draft_folders[0] if context.draft_folders else None
    if folder is not None and context.network is not None:
        width, target = runner.network.config.hidden, context.network.config
        projection = load_state_projection(folder, width, target.layers, target.hidden)
        if projection is not None:
            return Pard2Drafter(runner, token, depth, projection)
    return PardDrafter(runner, token, depth)


def pard_method(network: PardNetwork, options: DFlashOptions) -> AnyMethod:
    """PARD with matching; sampled drafts with rejection sampling.

    Raises:
        ValueError: the tree is deeper than the network was trained for.
    """
    runner, token, projection = network.to_runner(), network.config.mask_token, network.state_projection
    drafter = (
        PardDrafter(runner, token, network.depth)
        if projection is None
        else Pard2Drafter(runner, token, network.depth, projection)
    )
    return method_of_levels(drafter, network.depth, _LEVELS, options)


_entry = partial(Entry, family="feature level", shape=DynamicTree, acceptor=Match, reads=("speculators",))
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="dflash",
        description=(
            "A few layers over the target's hidden states fill a block of masks in one pass; the most probable tree of "
            "its distributions is verified."
        ),
        when_to_use=(
            "where many tokens are drafted at a time: a deeper draft costs no further pass, where EAGLE pays one per "
            "level."
        ),
        papers=(
            Paper("DFlash: Block Diffusion for Flash Speculative Decoding", "2602.06036"),
            Paper("Accelerating Speculative Decoding with Block Diffusion Draft Trees", "2604.12989"),
        ),
        drafter=DFlashDrafter,
        builder=dflash,
        options=DFlashOptions,
        speculator="dflash",
        aliases=("block_diffusion",),
    ),
    _entry(
        name="p_eagle",
        description=(
            "EAGLE-3's layers with masks in place of the tokens and states that do not exist yet, so that one pass "
            "gives the distributions of all depths; their most probable tree is verified."
        ),
        when_to_use="where EAGLE's passes, one per level, are what limits the depth of its drafts.",
        papers=(Paper("P-EAGLE: Parallel-Drafting EAGLE with Scalable Training", "2602.01469"),),
        drafter=PEagleDrafter,
        builder=p_eagle,
        options=DFlashOptions,
        speculator="p_eagle",
        aliases=("parallel_eagle",),
    ),
    _entry(
        name="pard",
        family="draft model",
        description=(
            "A draft model reads mask tokens behind the sequence, so that one pass gives the distributions of all "
            "depths; their most probable tree is verified."
        ),
        when_to_use="in place of `draft_model`, where its passes, one per token, are what limits the length of drafts.",
        papers=(Paper("PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation", "2504.18583"),),
        drafter=PardDrafter,
        builder=pard,
        reads=("drafts", "speculators"),
        options=DFlashOptions,
        speculator="pard",
        aliases=("parallel_draft_model",),
    ),
)
