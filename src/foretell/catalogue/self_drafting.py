"""Methods that draft with a cheaper version of the target itself."""

from functools import partial
from pathlib import Path

from foretell.accept import Match, Rejection
from foretell.catalogue.build_context import (
    LEAST_SCORE,
    MAX_NODES,
    BuildContext,
    chain,
    changed_copy,
    early_exit_draft,
    rejection,
    require_network,
)
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.exit_copies import COPY_PRECISION, exit_draft
from foretell.catalogue.exits import EXIT_PRECISION, draft_heads
from foretell.catalogue.options.self_drafting import (
    LayerSkipOptions,
    PrunedDraftOptions,
    QuantisedDraftOptions,
    SelfSpeculativeOptions,
)
from foretell.draft import DraftModel, EarlyExitDrafter, Predictor
from foretell.draft.exit_heads import ExitRule, TrainedExits
from foretell.engine.method import AnyMethod, Method
from foretell.model.load.transforms import fake_quantize, identity
from foretell.model.offload.influence import measure_influence
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.partial_pass import supports_spans
from foretell.model.run.skip import default_skip, read_skip
from foretell.shape import Chain, DynamicTree, Shape


def layer_skip(context: BuildContext, options: LayerSkipOptions) -> AnyMethod:
    """LayerSkip: the target's first blocks draft."""
    network = require_network(context, "drafts with the target's first layers")
    if not supports_spans(network.config):
        if context.speculators:
            raise ValueError(
                "this target cannot run some of its layers alone, so that exits cannot draft; leave them out"
            )
        return Method(
            early_exit_draft(context, options.exit_layer),
            chain(options),
            rejection(options, options.draft_sample_method),
        )
    threshold, weights = options.exit_threshold, options.exit_weights
    precision = COPY_PRECISION.get(weights, EXIT_PRECISION)
    heads, promises = draft_heads(context, options.exit_layer, threshold is not None, precision)
    after = ", ".join(map(str, heads.layers))
    label = f"exits after {after} of {network.config.layers} layers" if isinstance(heads, TrainedExits) else ""
    if weights != "target":
        label = f"{label or 'first layers'}, {weights} weights"
    least = promises if options.fallback_threshold is None else options.fallback_threshold
    if options.eagle_topk is not None:
        return Method(exit_draft(context, heads, weights), _exit_tree(options), Match(), drafter_label=label)
    draft: Predictor
    if weights == "target":
        draft = EarlyExitDrafter(
            heads, None if threshold is None else ExitRule("softmax", (threshold,) * len(heads.layers))
        )
    else:
        draft = exit_draft(context, heads, weights)
    accept = rejection(options, options.draft_sample_method)
    return Method(draft, chain(options, least), accept, drafter_label=label)


def _exit_tree(options: LayerSkipOptions) -> Shape[Predictor]:
    """The tree of an exit's most probable tokens: of a fixed size, or as large as pays."""
    depth, width = options.num_speculative_tokens, options.eagle_topk or 1
    if options.num_draft_tokens is None:
        return DynamicTree(depth, width, MAX_NODES, LEAST_SCORE, elastic=True)
    return DynamicTree(depth, width, options.num_draft_tokens)


def self_speculative(context: BuildContext, options: SelfSpeculativeOptions) -> AnyMethod:
    """Draft & Verify: the target without some sub-layers drafts."""
    network = require_network(context)
    layers, model = network.config.layers, context.checkpoint.base_fingerprint if context.checkpoint else ""
    skip = read_skip(Path(options.skip_set), model, layers) if options.skip_set else default_skip(layers)
    longest = Chain(
        options.num_speculative_tokens,
        draw=options.draft_sample_method != "greedy",
        confidence=options.confidence_threshold,
        adaptive=True,
    )
    return Method(
        DraftModel(DecoderRunner(network.without_sublayers(skip))),
        longest,
        rejection(options, options.draft_sample_method),
    )


def quantised_draft(context: BuildContext, options: QuantisedDraftOptions) -> AnyMethod:
    """A quantised copy of the target drafts."""
    bits = options.quantization_bits
    if bits == 8 and context.checkpoint is not None:
        network = changed_copy(context, identity, "int8")
    else:
        network = changed_copy(context, partial(fake_quantize, bits=bits, group=options.quantization_group))
    return Method(DraftModel(DecoderRunner(network)), chain(options), rejection(options, options.draft_sample_method))


def pruned_draft(context: BuildContext, options: PrunedDraftOptions) -> AnyMethod:
    """The target without its least influential blocks drafts.

    Raises:
        ValueError: more blocks are to be left out than the target has.
    """
    network = require_network(context)
    layers = network.config.layers
    dropped = layers // 4 if options.pruned_layers is None else options.pruned_layers
    if dropped > layers:
        raise ValueError(f"a pruned draft cannot lack {dropped} blocks: the model has {layers}")
    skip = measure_influence(network, _sample_text(context)).least_influential_blocks(dropped)
    return Method(
        DraftModel(DecoderRunner(network.without_sublayers(skip))),
        chain(options),
        rejection(options, options.draft_sample_method),
    )


_SAMPLE = """\
The old harbour was quiet in the early morning. A few boats had come in with fish, and the market would open at seven.
def mean(values): return sum(values) / len(values)
Question: how many legs do three spiders have? Answer: 3 x 8 = 24."""
_SAMPLE_TOKENS = 512
"""Most tokens of a reference that the influence of blocks is measured on."""


def _sample_text(context: BuildContext) -> list[int]:
    """Tokens that the influence of blocks is measured on."""
    if context.references and len(context.references[0]) > 1:
        return list(context.references[0][:_SAMPLE_TOKENS])
    if context.codec is not None:
        return context.codec.encode(_SAMPLE)
    return list(range(min(context.vocab, 64)))


_entry = partial(Entry, family="self-drafting", drafter=DraftModel, shape=Chain, acceptor=Rejection)
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="layer_skip",
        description="The target's first blocks and its head draft a chain that ends where they are unsure.",
        when_to_use=(
            "with checkpoints that were trained for early exit, or with exits of `foretell train exits`; of other "
            "models' first blocks the last layer's head accepts too few tokens."
        ),
        papers=(Paper("LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", "2404.16710"),),
        drafter=EarlyExitDrafter,
        builder=layer_skip,
        reads=("speculators",),
        options=LayerSkipOptions,
        drafts_with="first blocks of the target",
        aliases=("early_exit",),
    ),
    _entry(
        name="self_speculative",
        description=(
            "Draft & Verify: the target without some of its attention and feed-forward sub-layers drafts for the whole "
            "target."
        ),
        when_to_use=(
            "with large models, which still agree with themselves without many sub-layers; not with models as small as "
            "the embedded one."
        ),
        papers=(
            Paper(
                "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", "2309.08168"
            ),
        ),
        builder=self_speculative,
        options=SelfSpeculativeOptions,
        drafts_with="target without some sub-layers",
        aliases=("draft_and_verify",),
    ),
    _entry(
        name="quantised_draft",
        description="The target with quantised weights drafts for the target.",
        when_to_use=(
            "where the time of a pass is proportional to the bytes of the weights: at 8 bits nearly every draft token "
            "is accepted, so the time of the quantised pass limits the gain."
        ),
        papers=(Paper("QSPEC: Speculative Decoding with Complementary Quantization Schemes", "2410.11305"),),
        builder=quantised_draft,
        options=QuantisedDraftOptions,
        drafts_with="target in fewer bits",
        aliases=("quantized_draft",),
    ),
    _entry(
        name="pruned_draft",
        description="The target without its least influential blocks drafts for the target.",
        when_to_use=(
            "with deep models whose middle blocks change little, best after distillation; with small models the "
            "acceptance rate falls faster than the time of a pass."
        ),
        papers=(Paper("ShortGPT: Layers in Large Language Models are More Redundant Than You Expect", "2403.03853"),),
        builder=pruned_draft,
        reads=("references",),
        options=PrunedDraftOptions,
        drafts_with="target without its least influential blocks",
    ),
)
