"""Methods that draft with a draft model."""

from collections.abc import Iterator
from functools import partial
from itertools import chain as concatenated
from itertools import repeat

from foretell.accept import BlockVerification, KSequentialSelection, Match, Rejection
from foretell.catalogue.build_context import (
    BuildContext,
    chain,
    dynamic_tree,
    rejection,
    sorted_paths,
)
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.draft_model import (
    DraftModelOptions,
    DynamicTreeOptions,
    LLMCadOptions,
    OnlineOptions,
    SequoiaOptions,
    SpecInferOptions,
    SpecTrOptions,
    UniversalDraftOptions,
)
from foretell.catalogue.options.shared import ChainOptions
from foretell.catalogue.speculators import (
    DRAFT_MODEL,
    require_draft_model,
    require_draft_models,
    trained_speculator,
)
from foretell.draft import (
    CascadeDrafter,
    CrossTokenizerDrafter,
    DrafterUnion,
    DraftModel,
    OnlineDrafter,
    PromptLookup,
)
from foretell.engine.method import AnyMethod, Method
from foretell.shape import (
    BranchingTree,
    Chain,
    DynamicTree,
    FixedTree,
    LLMCadTree,
    Trie,
    optimal_tree,
)
from foretell.speculator.network.draft_model import DraftNetwork

_CASCADE_TRIE_NODES, _CASCADE_CHAIN_LENGTH = 8, 5
"""Tokens that prompt lookup, or a smaller draft model, proposes to a draft model of a cascade."""


def draft_model(context: BuildContext, options: DraftModelOptions) -> AnyMethod:
    """Speculative sampling with a chain of a draft model."""
    return Method(require_draft_model(context), chain(options), rejection(options, options.draft_sample_method))


def block_verification(context: BuildContext, options: ChainOptions) -> AnyMethod:
    """A chain of a draft model under block verification."""
    return Method(require_draft_model(context), chain(options), BlockVerification())


def specinfer(context: BuildContext, options: SpecInferOptions) -> AnyMethod:
    """A tree with fixed branching, merged from those of all draft models."""
    models = [DraftModel(runner) for runner in require_draft_models(context)]
    widths = tuple(_branching(options.num_draft_tokens, len(models)))
    return Method(DrafterUnion(models), BranchingTree(widths), rejection(options))


def _branching(nodes: int, models: int) -> Iterator[int]:
    """Children per node at every depth: two (or one of each model, if they are more), two, then one, until `nodes`
    nodes are used.
    """
    level = 1
    for wanted in concatenated((max(2, models), 2), repeat(1)):
        width = min(wanted, nodes // level)
        if not width:
            return
        level *= width
        nodes -= level
        yield width


def sequoia(context: BuildContext, options: SequoiaOptions) -> AnyMethod:
    """The optimal fixed tree for the acceptance rates by rank."""
    draw = options.draft_sample_method == "probabilistic"
    if options.speculative_tree is not None:
        shape = FixedTree(sorted_paths(options.speculative_tree), draw)
    else:
        shape = optimal_tree(options.num_draft_tokens, options.acceptance, depth=options.num_steps, draw=draw)
    return Method(require_draft_model(context), shape, rejection(options, options.draft_sample_method))


def dynamic_draft_tree(context: BuildContext, options: DynamicTreeOptions) -> AnyMethod:
    """EAGLE-2's tree of a draft model."""
    return Method(require_draft_model(context), dynamic_tree(options, options.num_steps), Match())


def spectr(context: BuildContext, options: SpecTrOptions) -> AnyMethod:
    """Independent chains, accepted by K-SEQ or tested jointly."""
    chains = BranchingTree((options.eagle_topk, *[1] * (options.num_steps - 1)), distinct=False)
    return Method(require_draft_model(context), chains, rejection(options))


def cascade(context: BuildContext, options: DraftModelOptions) -> AnyMethod:
    """Every draft model drafts for the next larger one."""
    method: AnyMethod = Method(PromptLookup(references=context.references), Trie(_CASCADE_TRIE_NODES), Match())
    for runner in reversed(require_draft_models(context)):
        method = Method(CascadeDrafter(runner, method), Chain(_CASCADE_CHAIN_LENGTH, draw=False), Match())
    return Method(method.draft, chain(options), rejection(options, options.draft_sample_method))


def universal_draft(context: BuildContext, options: UniversalDraftOptions) -> AnyMethod:
    """A draft model with another tokenizer.

    Raises:
        ValueError: there is not exactly one draft model with its tokenizer.
    """
    if len(context.drafts) != 1 or len(context.draft_codecs) != 1 or context.codec is None:
        raise ValueError("this method needs one draft model with its tokenizer: name it with --draft-model")
    length = options.num_speculative_tokens
    model = DraftModel(context.drafts[0])
    draft = CrossTokenizerDrafter(model, context.codec, context.draft_codecs[0], length, options.confidence_threshold)
    # One token of the draft model may be several tokens of the target.
    return Method(draft, Trie(2 * length), Match())


def llmcad(context: BuildContext, options: LLMCadOptions) -> AnyMethod:
    """LLMCad's tree, grown token by token."""
    shape = LLMCadTree(options.num_draft_tokens, threshold=options.confidence_threshold)
    return Method(require_draft_model(context), shape, Match())


def online(context: BuildContext, options: OnlineOptions) -> AnyMethod:
    """A trained draft model that keeps learning. Drafts are matched, so that no answer depends on its training."""
    network = trained_speculator(context.with_copies(), DRAFT_MODEL)
    assert isinstance(network, DraftNetwork)
    draft = OnlineDrafter(network, options.online_update_interval, options.online_buffer, options.online_learning_rate)
    shape = Chain(options.num_speculative_tokens, draw=False, confidence=options.confidence_threshold)
    return Method(draft, shape, Match())


_entry = partial(Entry, family="draft model", drafter=DraftModel, reads=("drafts", "speculators"), needs="draft model")
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="draft_model",
        description=(
            "Speculative sampling: a draft model with the target's tokenizer samples a chain, and rejection sampling "
            "accepts or rejects its tokens."
        ),
        when_to_use="with a draft model that is at least ten times cheaper than the target and agrees on most tokens.",
        papers=(
            Paper("Fast Inference from Transformers via Speculative Decoding", "2211.17192"),
            Paper("Accelerating Large Language Model Decoding with Speculative Sampling", "2302.01318"),
        ),
        shape=Chain,
        acceptor=Rejection,
        builder=draft_model,
        options=DraftModelOptions,
        aliases=("speculative_sampling",),
    ),
    _entry(
        name="block_verification",
        description="As `draft_model`, but the tokens of a chain are accepted jointly, not one by one.",
        when_to_use=(
            "in place of `draft_model` when sampling: it accepts at least as many draft tokens, at no cost; at "
            "temperature 0 the two are equal."
        ),
        papers=(Paper("Block Verification Accelerates Speculative Decoding", "2403.10444"),),
        shape=Chain,
        acceptor=BlockVerification,
        builder=block_verification,
        options=ChainOptions,
    ),
    _entry(
        name="universal_draft",
        description=(
            "Universal assisted generation: a draft model with another tokenizer continues the text, and its "
            "continuation is encoded with the target's tokenizer."
        ),
        when_to_use="when the only good draft model has another vocabulary.",
        papers=(
            Paper(
                (
                    "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous "
                    "Vocabularies"
                ),
                "2502.05202",
            ),
        ),
        drafter=CrossTokenizerDrafter,
        shape=Trie,
        acceptor=Match,
        builder=universal_draft,
        reads=("drafts",),
        options=UniversalDraftOptions,
        aliases=("universal_assisted_generation", "uag"),
    ),
    _entry(
        name="llmcad",
        description=(
            "A draft model that stays in memory grows a tree until its confidence is low, and the target is read into "
            "memory only to verify."
        ),
        when_to_use=(
            "when reading the target's weights takes far longer than drafting, for example from the flash memory of a "
            "phone; otherwise `dynamic_tree` needs fewer passes of the draft model."
        ),
        papers=(Paper("LLMCad: Fast and Scalable On-device Large Language Model Inference", "2309.04255"),),
        shape=LLMCadTree,
        acceptor=Match,
        builder=llmcad,
        options=LLMCadOptions,
        aliases=("edgellm",),
    ),
    _entry(
        name="specinfer",
        description=(
            "One or several draft models sample a tree with fixed branching, at every node in turn; siblings are "
            "sampled without replacement."
        ),
        when_to_use="when sampling at temperature 0.5 and above, where second choices of a draft model count.",
        papers=(
            Paper(
                (
                    "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative "
                    "Inference and Verification"
                ),
                "2305.09781",
            ),
        ),
        drafter=DrafterUnion,
        shape=BranchingTree,
        acceptor=Rejection,
        builder=specinfer,
        options=SpecInferOptions,
        drafts_with="one or several draft models, their trees merged",
    ),
    _entry(
        name="spectr",
        description=(
            "A draft model samples independent chains, and optimal transport between their tokens and the target's "
            "distribution decides which tokens are accepted."
        ),
        when_to_use="when sampling at high temperature with a draft model close to the target.",
        papers=(Paper("SpecTr: Fast Speculative Decoding via Optimal Transport", "2310.15141"),),
        shape=BranchingTree,
        acceptor=KSequentialSelection,
        builder=spectr,
        options=SpecTrOptions,
    ),
    _entry(
        name="sequoia",
        description=(
            "A draft model fills the fixed tree with the most expected accepted tokens for its number of nodes, given "
            "measured acceptance rates by rank."
        ),
        when_to_use="where verifying tens of nodes costs about as much as one, and acceptance rates are known.",
        papers=(Paper("Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", "2402.12374"),),
        shape=FixedTree,
        acceptor=Match,
        builder=sequoia,
        options=SequoiaOptions,
    ),
    _entry(
        name="dynamic_tree",
        description=(
            "A draft model grows EAGLE-2's tree: the most probable nodes of every level are expanded, and the most "
            "probable nodes of all levels are verified."
        ),
        when_to_use="in place of `draft_model` for greedy decoding; it drafts less where the draft model is unsure.",
        papers=(
            Paper("EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", "2406.16858"),
            Paper(
                "SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on Consumer Devices",
                "2406.02532",
            ),
        ),
        shape=DynamicTree,
        acceptor=Match,
        builder=dynamic_draft_tree,
        options=DynamicTreeOptions,
        aliases=("specexec",),
    ),
    _entry(
        name="cascade",
        description=(
            "Speculative decoding of the draft model itself: prompt lookup or smaller models draft for it, so that it "
            "needs fewer passes for the same chain."
        ),
        when_to_use="with a large draft model (a pass above a fifth of the target's), on text that repeats itself.",
        papers=(
            Paper("Cascade Speculative Drafting for Even Faster LLM Inference", "2312.11462"),
            Paper("Accelerating LLM Inference with Staged Speculative Decoding", "2308.04623"),
        ),
        drafter=CascadeDrafter,
        shape=Chain,
        acceptor=Rejection,
        builder=cascade,
        reads=("drafts", "speculators", "references"),
        options=DraftModelOptions,
        aliases=("hierarchical",),
    ),
    _entry(
        name="online",
        description=(
            "Online speculative decoding: a trained draft model keeps learning from the tokens that the target "
            "corrects while it serves."
        ),
        when_to_use="on a server whose prompts differ from the draft model's training data, or change over time.",
        papers=(Paper("Online Speculative Decoding", "2310.07177"),),
        drafter=OnlineDrafter,
        shape=Chain,
        acceptor=Match,
        builder=online,
        reads=("speculators",),
        needs="",
        options=OnlineOptions,
        speculator="draft_model",
        aliases=("online_speculative_decoding", "osd"),
    ),
)
