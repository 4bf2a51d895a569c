"""Lossy methods: they change the target's distribution."""

from foretell.accept import BiLDRollback, DistanceAcceptor, LenientRejection, TopKAcceptor, TypicalAcceptance
from foretell.catalogue.build_context import BuildContext, chain
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.heads import heads_tree, trained_heads
from foretell.catalogue.options import (
    BiLDOptions,
    BlockwiseLossyOptions,
    LenienceOptions,
    MedusaTypicalOptions,
    TypicalOptions,
)
from foretell.catalogue.speculators import names_only_draft_models, require_draft_predictor
from foretell.draft import DraftModel, HeadsDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.shape import Chain, FixedTree


def lenience(context: BuildContext, options: LenienceOptions) -> AnyMethod:
    """Rejection that forgives a factor."""
    return Method(require_draft_predictor(context), chain(options), LenientRejection(options.lenience))


def blockwise_lossy(context: BuildContext, options: BlockwiseLossyOptions) -> AnyMethod:
    """Among the target's best tokens, or near its best; heads draft where a speculator is named."""
    shape = Chain(options.num_speculative_tokens, draw=False)
    only_models = names_only_draft_models(context)
    draft = require_draft_predictor(context) if only_models else HeadsDrafter(trained_heads(context, "blockwise"))
    if options.accept_distance is not None:
        return Method(draft, shape, DistanceAcceptor(options.accept_distance, minimum_block=options.minimum_block))
    return Method(draft, shape, TopKAcceptor(options.accept_top_k, minimum_block=options.minimum_block))


def bild(context: BuildContext, options: BiLDOptions) -> AnyMethod:
    """A long chain, rolled back where the target disagrees strongly."""
    shape = Chain(options.num_speculative_tokens, draw=False, fallback=options.fallback_threshold)
    return Method(require_draft_predictor(context), shape, BiLDRollback(options.rollback_threshold))


def medusa_typical(context: BuildContext, options: MedusaTypicalOptions) -> AnyMethod:
    """Medusa's tree, typical acceptance."""
    network = trained_heads(context, "medusa")
    rule = TypicalAcceptance(options.posterior_threshold, options.posterior_alpha)
    return Method(HeadsDrafter(network), heads_tree(network, options), rule)


def typical(context: BuildContext, options: TypicalOptions) -> AnyMethod:
    """A chain, typical acceptance."""
    rule = TypicalAcceptance(options.posterior_threshold, options.posterior_alpha)
    return Method(require_draft_predictor(context), chain(options), rule)


_MEDUSA = Paper("Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", "2401.10774")

ENTRIES = (
    Entry(
        name="lenience_lossy",
        family="lossy",
        description=(
            "Changes the text: the rejection test with the draft's probability scaled down by `lenience`, so that no "
            "token becomes more than 1 / lenience times as likely as under the target."
        ),
        when_to_use="where a bounded distortion per token is acceptable and the draft model is close.",
        papers=(Paper("Fast Inference from Transformers via Speculative Decoding", "2211.17192"),),
        drafter=DraftModel,
        shape=Chain,
        acceptor=LenientRejection,
        builder=lenience,
        options=LenienceOptions,
        needs="draft model",
    ),
    Entry(
        name="blockwise_lossy",
        family="lossy",
        description=(
            "Changes the text: a draft stands if it is among the target's most probable tokens, or if its number is "
            "near the best token's."
        ),
        when_to_use="images and audio; text drifts within a sentence.",
        papers=(Paper("Blockwise Parallel Decoding for Deep Autoregressive Models", "1811.03115"),),
        drafter=DraftModel,
        shape=Chain,
        acceptor=TopKAcceptor,
        builder=blockwise_lossy,
        options=BlockwiseLossyOptions,
        needs="draft model",
        drafts_with="draft model, or trained heads",
    ),
    Entry(
        name="bild_lossy",
        family="lossy",
        description=(
            "Changes the text: Big Little Decoder, in which a draft model writes until it is unsure, and the target "
            "rolls back to the first token that it finds too unlikely."
        ),
        when_to_use=(
            "a draft model that was trained on the target's outputs, and answers that need to be good rather than the "
            "target's own."
        ),
        papers=(Paper("Speculative Decoding with Big Little Decoder", "2302.07863"),),
        drafter=DraftModel,
        shape=Chain,
        acceptor=BiLDRollback,
        builder=bild,
        options=BiLDOptions,
        needs="draft model",
    ),
    Entry(
        name="medusa_lossy",
        family="lossy",
        description=(
            "Changes the text when sampling: `medusa` with its typical acceptance, by which a guess stands that the "
            "target finds probable enough for the entropy of its distribution."
        ),
        when_to_use="sampling with heads whose scores are not distributions, where the exact test accepts little.",
        papers=(_MEDUSA,),
        drafter=HeadsDrafter,
        shape=FixedTree,
        acceptor=TypicalAcceptance,
        builder=medusa_typical,
        options=MedusaTypicalOptions,
        speculator="medusa",
    ),
    Entry(
        name="typical_lossy",
        family="lossy",
        description="Changes the text when sampling: a chain of a draft model under Medusa's typical acceptance.",
        when_to_use="sampling with a draft model whose choices are good, where the exact test accepts little.",
        papers=(_MEDUSA,),
        drafter=DraftModel,
        shape=Chain,
        acceptor=TypicalAcceptance,
        builder=typical,
        options=TypicalOptions,
        needs="draft model",
    ),
)
