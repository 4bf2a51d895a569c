"""Lossy methods: their output does not follow the target's distribution."""

from functools import partial

from foretell.accept import (
    AcceptExits,
    AcceptReduced,
    BiLDRollback,
    DistanceAcceptor,
    LenientRejection,
    SyntheticAcceptance,
    TopKAcceptor,
    TypicalAcceptance,
)
from foretell.catalogue.build_context import BuildContext, chain, require_network
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.exits import exit_answers
from foretell.catalogue.heads import heads_tree
from foretell.catalogue.options.lossy import (
    BiLDOptions,
    BlockwiseLossyOptions,
    EarlyExitOptions,
    LenienceOptions,
    MedusaTypicalOptions,
    SkipDecodeOptions,
    SyntheticOptions,
    TypicalOptions,
)
from foretell.catalogue.speculators import names_only_draft_models, packed_speculator, require_draft_model
from foretell.draft import DraftModel, EarlyExitDrafter, HeadsDrafter, SkipDecodeDrafter
from foretell.draft.skip_decode import LayerBudget
from foretell.engine.method import AnyMethod, Method
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.partial_pass import check_spans
from foretell.shape import Chain, FixedTree, RootOnly
from foretell.speculator.network.heads import HeadsNetwork


def lenience(context: BuildContext, options: LenienceOptions) -> AnyMethod:
    """Rejection sampling with lenience."""
    return Method(require_draft_model(context), chain(options), LenientRejection(options.lenience))


def blockwise_lossy(context: BuildContext, options: BlockwiseLossyOptions) -> AnyMethod:
    """Accepts drafts by rank or by distance; drafts with heads, or with the draft models that were named."""
    shape = Chain(options.num_speculative_tokens, draw=False)
    only_models = names_only_draft_models(context)
    if context.drafts and not only_models:
        raise ValueError("this method drafts with heads or with draft models, and both were named; leave out one")
    draft = (
        require_draft_model(context)
        if only_models
        else HeadsDrafter(packed_speculator(context, HeadsNetwork, "blockwise"))
    )
    if options.accept_distance is not None:
        return Method(draft, shape, DistanceAcceptor(options.accept_distance, minimum_block=options.minimum_block))
    return Method(draft, shape, TopKAcceptor(options.accept_top_k, minimum_block=options.minimum_block))


def bild(context: BuildContext, options: BiLDOptions) -> AnyMethod:
    """A chain that ends where the draft model is unsure, rolled back to the first token that the target rejects."""
    shape = Chain(options.num_speculative_tokens, draw=False, fallback=options.fallback_threshold)
    return Method(require_draft_model(context), shape, BiLDRollback(options.rollback_threshold))


def early_exit(context: BuildContext, options: EarlyExitOptions) -> AnyMethod:
    """Answers of exits, and of all layers where no exit is sure."""
    draft = exit_answers(context, options)
    after = ", ".join(map(str, draft.heads.layers))
    accept: AcceptExits | BiLDRollback = AcceptExits(exact_keys=options.missing_keys == "recompute")
    if options.rollback_threshold is not None:
        accept = BiLDRollback(options.rollback_threshold)
    return Method(draft, Chain(options.num_speculative_tokens), accept, drafter_label=f"exits after {after} layers")


def skip_decode(context: BuildContext, options: SkipDecodeOptions) -> AnyMethod:
    """Answers whose later tokens run fewer layers."""
    network = require_network(context, "leaves out layers of the target")
    check_spans(network.config)
    layers = network.config.layers
    budget = LayerBudget(
        layers,
        layers if options.max_layers is None else options.max_layers,
        -(-2 * layers // 3) if options.min_layers is None else options.min_layers,
        layers // 3 if options.warmup_layers is None else options.warmup_layers,
        options.horizon,
    )
    draft = SkipDecodeDrafter(budget, DecoderRunner(network) if options.measure else None)
    reference = draft.reference_logits if options.measure else None
    label = f"{budget.most} to {budget.least} of {layers} layers"
    return Method(draft, RootOnly(), AcceptReduced(reference), drafter_label=label)


def medusa_typical(context: BuildContext, options: MedusaTypicalOptions) -> AnyMethod:
    """Medusa's tree with typical acceptance."""
    network = packed_speculator(context, HeadsNetwork, "medusa")
    rule = TypicalAcceptance(options.posterior_threshold, options.posterior_alpha)
    return Method(HeadsDrafter(network), heads_tree(network, options), rule)


def typical(context: BuildContext, options: TypicalOptions) -> AnyMethod:
    """A chain with typical acceptance."""
    rule = TypicalAcceptance(options.posterior_threshold, options.posterior_alpha)
    return Method(require_draft_model(context), chain(options), rule)


def synthetic(context: BuildContext, options: SyntheticOptions) -> AnyMethod:
    """A chain that is accepted by chance; for a mean length with the least variance, as in vLLM."""
    rates = options.synthetic_acceptance_rates
    if (length := options.synthetic_acceptance_length) is not None:
        rates = tuple(min(1.0, max(0.0, length - 1 - i)) for i in range(options.num_speculative_tokens))
    return Method(require_draft_model(context), Chain(len(rates), draw=False), SyntheticAcceptance(rates))


_MEDUSA = Paper("Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", "2401.10774")

_entry = partial(Entry, family="lossy", drafter=DraftModel, shape=Chain, reads=("drafts", "speculators"))
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="lenience_lossy",
        description=(
            "Changes the distribution: rejection sampling with the draft's probability scaled down by `lenience`, so "
            "that no token becomes more than 1 / lenience times as likely as under the target."
        ),
        when_to_use="where a bounded distortion per token is acceptable and the draft model is close to the target.",
        papers=(Paper("Fast Inference from Transformers via Speculative Decoding", "2211.17192"),),
        acceptor=LenientRejection,
        builder=lenience,
        options=LenienceOptions,
        needs="draft model",
    ),
    _entry(
        name="blockwise_lossy",
        description=(
            "Changes the output: a draft token is accepted if it is among the target's most probable tokens, or if its "
            "token id is close to that of the most probable one."
        ),
        when_to_use="for images and audio; text deviates within a sentence.",
        papers=(Paper("Blockwise Parallel Decoding for Deep Autoregressive Models", "1811.03115"),),
        acceptor=TopKAcceptor,
        builder=blockwise_lossy,
        options=BlockwiseLossyOptions,
        needs="draft model",
        drafts_with="draft model, or trained heads",
    ),
    _entry(
        name="bild_lossy",
        description=(
            "Changes the output: Big Little Decoder, in which a draft model generates until it is unsure, and the "
            "target rolls back to the first token whose probability it finds too low."
        ),
        when_to_use=(
            "with a draft model that was trained on the target's outputs, where answers must be good but need not be "
            "the target's own."
        ),
        papers=(Paper("Speculative Decoding with Big Little Decoder", "2302.07863"),),
        acceptor=BiLDRollback,
        builder=bild,
        options=BiLDOptions,
        needs="draft model",
    ),
    _entry(
        name="early_exit_lossy",
        description=(
            "Changes the output: tokens leave at the first exit that is sure of them, and are not verified; how much "
            "changes is bounded by a calibration."
        ),
        when_to_use=(
            "with deep models that are sure of many tokens long before their last layer, and with a calibration of "
            "`foretell calibrate exits`."
        ),
        papers=(
            Paper("Confident Adaptive Language Modeling", "2207.07061"),
            Paper("Fast and Robust Early-Exiting Framework for Autoregressive Language Models", "2310.05424"),
            Paper("EE-LLM: Large-Scale Training and Inference of Early-Exit Large Language Models", "2312.04916"),
        ),
        drafter=EarlyExitDrafter,
        acceptor=AcceptExits,
        builder=early_exit,
        reads=("speculators",),
        options=EarlyExitOptions,
        speculator="exits",
        drafts_with="exits of the target",
    ),
    _entry(
        name="skip_decode_lossy",
        description=(
            "Changes the output: the later a token is in its answer, the fewer layers it runs, the same number for all "
            "requests of a batch at this position; lower and middle layers are left out."
        ),
        when_to_use=(
            "with models that were trained with such a budget, in large batches; other models lose much by it, which "
            "`measure` shows."
        ),
        papers=(
            Paper(
                "SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference",
                "2307.02628",
            ),
        ),
        drafter=SkipDecodeDrafter,
        shape=RootOnly,
        acceptor=AcceptReduced,
        builder=skip_decode,
        reads=(),
        options=SkipDecodeOptions,
        drafts_with="fewer layers",
    ),
    _entry(
        name="medusa_lossy",
        description=(
            "Changes the distribution when sampling: `medusa` with typical acceptance, which accepts a draft token if "
            "the target gives it enough probability for the entropy of its distribution."
        ),
        when_to_use="when sampling with Medusa heads, where the exact test accepts few tokens.",
        papers=(_MEDUSA,),
        drafter=HeadsDrafter,
        shape=FixedTree,
        acceptor=TypicalAcceptance,
        builder=medusa_typical,
        reads=("speculators",),
        options=MedusaTypicalOptions,
        speculator="medusa",
    ),
    _entry(
        name="typical_lossy",
        description="Changes the distribution when sampling: a chain of a draft model with typical acceptance.",
        when_to_use="when sampling with a good draft model of which the exact test accepts few tokens.",
        papers=(_MEDUSA,),
        acceptor=TypicalAcceptance,
        builder=typical,
        options=TypicalOptions,
        needs="draft model",
    ),
    _entry(
        name="synthetic_lossy",
        description=(
            "Answers are worthless: drafts of a draft model are accepted by chance, at given rates by position, "
            "whatever they are."
        ),
        when_to_use="for load tests, to see what a server gains with drafters of a given acceptance.",
        acceptor=SyntheticAcceptance,
        builder=synthetic,
        options=SyntheticOptions,
        needs="draft model",
    ),
)
