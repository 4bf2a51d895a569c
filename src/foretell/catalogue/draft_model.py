"""Methods that draft with a smaller model."""

from collections.abc import Iterator
from itertools import chain as concatenated
from itertools import repeat

from foretell.accept import BlockVerification, KSequentialSelection, Match, Rejection
from foretell.catalogue.build_context import BuildContext, chain, dynamic_tree, rejection, sorted_paths
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options import (
    ChainOptions,
    DraftModelOptions,
    DynamicTreeOptions,
    LLMCadOptions,
    OnlineOptions,
    SequoiaOptions,
    SpecInferOptions,
    SpecTrOptions,
    UniversalDraftOptions,
)
from foretell.catalogue.speculators import (
    DRAFT_MODEL,
    require_draft_models,
    require_draft_predictor,
    trained_speculator,
)
from foretell.draft import (
    CascadeDrafter,
    CrossTokenizerDrafter,
    DraftModel,
    MixtureDrafter,
    OnlineDrafter,
    PromptLookup,
)
from foretell.engine.method import AnyMethod, Method
from foretell.shape import BranchingTree, Chain, DynamicTree, FixedTree, LLMCadTree, Trie, optimal_tree
from foretell.speculator.network.draft_model import DraftNetwork

_CASCADE_TRIE_NODES, _CASCADE_CHAIN_LENGTH = 8, 5
"""Tokens that n-gram copies, or a still smaller model, propose to a draft model of a cascade."""


def draft_model(context: BuildContext, options: DraftModelOptions) -> AnyMethod:
    """A draft model drafts a chain."""
    return Method(require_draft_predictor(context), chain(options), rejection(options))


def block_verification(context: BuildContext, options: ChainOptions) -> AnyMethod:
    """The same, accepted in blocks."""
    return Method(require_draft_predictor(context), chain(options), BlockVerification())


def specinfer(context: BuildContext, options: SpecInferOptions) -> AnyMethod:
    """Several drafts at every node, drawn from the mixed models."""
    return Method(
        require_draft_predictor(context), BranchingTree(tuple(_branching(options.num_draft_tokens))), Rejection()
    )


def _branching(nodes: int) -> Iterator[int]:
    """Children per node at every depth: two, two, then one, as long as the levels fit into so many nodes."""
    level = 1
    for wanted in concatenated((2, 2), repeat(1)):
        width = min(wanted, nodes // level)
        if not width:
            return
        level *= width
        nodes -= level
        yield width


def sequoia(context: BuildContext, options: SequoiaOptions) -> AnyMethod:
    """The tree that is best for the acceptance by rank."""
    draw = options.draft_sample_method == "probabilistic"
    if options.speculative_tree is not None:
        shape = FixedTree(sorted_paths(options.speculative_tree), draw)
    else:
        shape = optimal_tree(options.num_draft_tokens, options.acceptance, depth=options.num_steps, draw=draw)
    return Method(require_draft_predictor(context), shape, Rejection() if draw else Match())


def dynamic_draft_tree(context: BuildContext, options: DynamicTreeOptions) -> AnyMethod:
    """A tree where the draft model is confident."""
    return Method(require_draft_predictor(context), dynamic_tree(options, options.num_steps), Match())


def spectr(context: BuildContext, options: SpecTrOptions) -> AnyMethod:
    """Chains side by side, accepted by K-SEQ."""
    chains = BranchingTree((options.eagle_topk, *[1] * (options.num_steps - 1)), distinct=False)
    return Method(require_draft_predictor(context), chains, KSequentialSelection())


def cascade(context: BuildContext, options: DraftModelOptions) -> AnyMethod:
    """Every model drafts for the next larger one."""
    *larger_first, last = require_draft_models(context)
    drafter = CascadeDrafter(
        last, Method(PromptLookup(references=context.references), Trie(_CASCADE_TRIE_NODES), Match())
    )
    for runner in reversed(larger_first):
        drafter = CascadeDrafter(runner, Method(drafter, Chain(_CASCADE_CHAIN_LENGTH, draw=False), Match()))
    return Method(drafter, chain(options), rejection(options))


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
    # A draft token may be several of the target's.
    return Method(draft, Trie(2 * length), Match())


def llmcad(context: BuildContext, options: LLMCadOptions) -> AnyMethod:
    """A tree paced by confidence."""
    shape = LLMCadTree(options.num_draft_tokens, threshold=options.confidence_threshold)
    return Method(require_draft_predictor(context), shape, Match())


def online(context: BuildContext, options: OnlineOptions) -> AnyMethod:
    """A trained draft model that keeps learning; matched, so that no answer depends on how far it has come."""
    network = trained_speculator(context, DRAFT_MODEL)
    assert isinstance(network, DraftNetwork)
    draft = OnlineDrafter(network, options.online_update_interval, options.online_buffer, options.online_learning_rate)
    shape = Chain(options.num_speculative_tokens, draw=False, confidence=options.confidence_threshold)
    return Method(draft, shape, Match())


ENTRIES = (
    Entry(
        name="draft_model",
        family="draft model",
        description=(
            "Speculative sampling: a draft model with the target's tokenizer draws a chain, which the target tests by "
            "rejection with a residual draw."
        ),
        when_to_use="a draft model that is at least ten times cheaper and agrees on most tokens.",
        papers=(
            Paper("Fast Inference from Transformers via Speculative Decoding", "2211.17192"),
            Paper("Accelerating Large Language Model Decoding with Speculative Sampling", "2302.01318"),
        ),
        drafter=DraftModel,
        shape=Chain,
        acceptor=Rejection,
        builder=draft_model,
        options=DraftModelOptions,
        needs="draft model",
        aliases=("speculative_sampling",),
    ),
    Entry(
        name="block_verification",
        family="draft model",
        description="As `draft_model`, with the chain judged as a whole.",
        when_to_use=(
            "sampling, wherever `draft_model` does: it accepts at least as many of the same drafts, at no cost; at "
            "temperature 0 the two are equal."
        ),
        papers=(Paper("Block Verification Accelerates Speculative Decoding", "2403.10444"),),
        drafter=DraftModel,
        shape=Chain,
        acceptor=BlockVerification,
        builder=block_verification,
        options=ChainOptions,
        needs="draft model",
    ),
    Entry(
        name="universal_draft",
        family="draft model",
        description=(
            "Universal assisted generation: a draft model with another tokenizer continues the text, which is encoded "
            "again with the target's tokenizer."
        ),
        when_to_use="when the only small model of good quality has another vocabulary.",
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
        options=UniversalDraftOptions,
        needs="draft model",
        aliases=("universal_assisted_generation", "uag"),
    ),
    Entry(
        name="llmcad",
        family="draft model",
        description=(
            "A resident draft model grows a tree at the pace of its confidence, and the target is brought into memory "
            "only to verify."
        ),
        when_to_use=(
            "when reading the target takes far longer than drafting, as from flash on a phone; else `dynamic_tree` "
            "needs fewer passes of the draft model."
        ),
        papers=(Paper("LLMCad: Fast and Scalable On-device Large Language Model Inference", "2309.04255"),),
        drafter=DraftModel,
        shape=LLMCadTree,
        acceptor=Match,
        builder=llmcad,
        options=LLMCadOptions,
        needs="draft model",
        aliases=("edgellm",),
    ),
    Entry(
        name="specinfer",
        family="draft model",
        description=(
            "One or several draft models, their distributions averaged, draw a tree with fixed branching, siblings "
            "without replacement."
        ),
        when_to_use="sampling at temperature 0.5 and above with draft models whose second choices matter.",
        papers=(
            Paper(
                (
                    "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative "
                    "Inference and Verification"
                ),
                "2305.09781",
            ),
        ),
        drafter=MixtureDrafter,
        shape=BranchingTree,
        acceptor=Rejection,
        builder=specinfer,
        options=SpecInferOptions,
        needs="draft model",
        drafts_with="one or several draft models, averaged",
    ),
    Entry(
        name="spectr",
        family="draft model",
        description=(
            "Independent chains of a draft model are judged by optimal transport between their tokens and the "
            "target's distribution."
        ),
        when_to_use="sampling at high temperature with a draft model that is often nearly right.",
        papers=(Paper("SpecTr: Fast Speculative Decoding via Optimal Transport", "2310.15141"),),
        drafter=DraftModel,
        shape=BranchingTree,
        acceptor=KSequentialSelection,
        builder=spectr,
        options=SpecTrOptions,
        needs="draft model",
    ),
    Entry(
        name="sequoia",
        family="draft model",
        description=(
            "A draft model fills the fixed tree that promises most tokens for its number of nodes under measured "
            "acceptance rates per rank."
        ),
        when_to_use="where verifying tens of nodes costs about as much as one, and acceptance rates are known.",
        papers=(Paper("Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", "2402.12374"),),
        drafter=DraftModel,
        shape=FixedTree,
        acceptor=Match,
        builder=sequoia,
        options=SequoiaOptions,
        needs="draft model",
    ),
    Entry(
        name="dynamic_tree",
        family="draft model",
        description=(
            "A draft model grows EAGLE-2's tree: the likeliest nodes of every level are expanded, and the likeliest "
            "of all are verified."
        ),
        when_to_use="wherever `draft_model` does, with less to lose where the draft model is unsure.",
        papers=(Paper("EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", "2406.16858"),),
        drafter=DraftModel,
        shape=DynamicTree,
        acceptor=Match,
        builder=dynamic_draft_tree,
        options=DynamicTreeOptions,
        needs="draft model",
    ),
    Entry(
        name="cascade",
        family="draft model",
        description=(
            "Speculation inside the drafter: n-gram copies or smaller models draft for the draft model, which then "
            "needs fewer passes for the same chain."
        ),
        when_to_use="draft models whose own pass is dear (above a fifth of the target's), on text that copies.",
        papers=(
            Paper("Cascade Speculative Drafting for Even Faster LLM Inference", "2312.11462"),
            Paper("Accelerating LLM Inference with Staged Speculative Decoding", "2308.04623"),
        ),
        drafter=CascadeDrafter,
        shape=Chain,
        acceptor=Rejection,
        builder=cascade,
        options=DraftModelOptions,
        needs="draft model",
        aliases=("hierarchical",),
    ),
    Entry(
        name="online",
        family="draft model",
        description=(
            "Online speculative decoding: a trained draft model goes on learning from the target's corrections while "
            "it serves."
        ),
        when_to_use="a server whose questions differ from what the draft model was trained on, or change.",
        papers=(Paper("Online Speculative Decoding", "2310.07177"),),
        drafter=OnlineDrafter,
        shape=Chain,
        acceptor=Match,
        builder=online,
        options=OnlineOptions,
        speculator="draft_model",
        aliases=("online_speculative_decoding", "osd"),
    ),
)
