"""What methods are built from, and the helpers that builders share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.accept import Acceptor, BlockVerification, Rejection
from foretell.catalogue.options import (
    BeamOptions,
    ChainOptions,
    HybridOptions,
    RejectionOptions,
    TrieOptions,
)
from foretell.draft import CombinedRetriever, DraftModel, Predictor, SuffixRetriever, TokenRecycling
from foretell.model.compress import Change
from foretell.model.decoder import Decoder
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.runner import DecoderRunner, Network, Runner
from foretell.shape import (
    AdaptiveChain,
    Chain,
    ConfidenceRule,
    CostAwareTrie,
    DynamicTree,
    HeuristicSchedule,
    PassCost,
    Shape,
    Trie,
)
from foretell.tokenizer.codec import TextCodec

_MIN_EXPANDED_NODES = 4
"""Nodes expanded per level of a dynamic tree: enough for trees of 12 to 16 nodes."""
_NODES_PER_EXPANDED_NODE = 6
"""Nodes of a tree for each that is expanded per level: EAGLE-2's 60 and 10 (arXiv 2406.16858)."""


@dataclass(frozen=True)
class BuildContext:
    """What a method may be built from: the target, other models, reference documents as tokens."""

    vocab: int
    network: Network | None
    """The target's weights, where the own decoder runs it (a method that cuts the target needs them)."""
    drafts: tuple[Runner, ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
    eos: tuple[int, ...] = ()
    """Tokens that end an answer of the target."""
    codec: TextCodec | None = None
    """The target's tokenizer."""
    draft_codecs: tuple[TextCodec, ...] = ()
    """The tokenizers of `drafts`."""
    checkpoint: Checkpoint | None = None
    """The target's checkpoint. Not needed for changed copies where `network` is a plain decoder."""
    speculators: tuple[Path, ...] = ()
    """Directories of trained speculators; none: what ships for this target."""

    @property
    def speculator(self) -> Path | None:
        """The trained speculator that was named; None: none was.

        Raises:
            ValueError: several were.
        """
        if len(self.speculators) > 1:
            names = ", ".join(map(str, self.speculators))
            raise ValueError(
                f"several trained speculators were named ({names}), and this method drafts with one; name one"
            )
        return self.speculators[0] if self.speculators else None


def require_network(context: BuildContext, purpose: str = "drafts with parts of the target") -> Network:
    """The target on the own decoder. `purpose` completes the sentence «this method ...».

    Raises:
        ValueError: something else runs it.
    """
    if context.network is None:
        raise ValueError(f"this method {purpose}, which works with models of the own decoder only; use another method")
    return context.network


def changed_copy(context: BuildContext, change: Change, dtype: str | None = None) -> Network:
    """The target read again, changed."""
    if context.checkpoint is not None:
        return context.checkpoint.copy(change, dtype)
    network = require_network(context)
    if not isinstance(network, Decoder):
        raise ValueError(
            "this method drafts with a changed copy of the target's weights, which cannot be read again here"
        )
    return change(network)


def early_exit_draft(context: BuildContext, exit_layer: int | None) -> DraftModel:
    """The target's first blocks as a draft model (LayerSkip, arXiv 2404.16710); by default a third of them.

    The draft shares the target's weights but has its own cache: the drafter decides itself which rows it reads and
    keeps, and the target's pass starts from embeddings. So accepted tokens pass through the shared blocks twice, which
    the paper's self-verification avoids.
    """
    network = require_network(context, "cuts the target after some layers")
    return DraftModel(DecoderRunner(network.cut(exit_layer or max(1, network.config.layers // 3))))


def chain(options: ChainOptions) -> Shape[Predictor]:
    """A chain of the length, confidence and schedule of the options."""
    start = Chain(
        options.num_speculative_tokens,
        draw=options.draft_sample_method != "greedy",
        confidence=options.confidence_threshold,
    )
    schedule = options.num_assistant_tokens_schedule
    return (
        start
        if schedule == "constant"
        else AdaptiveChain(start, HeuristicSchedule() if schedule == "heuristic" else ConfidenceRule())
    )


def rejection(options: RejectionOptions) -> Acceptor:
    """Rejection token by token, or in blocks."""
    return BlockVerification() if options.rejection_sample_method == "block" else Rejection()


def trie(options: TrieOptions) -> Trie:
    """A trie of the size and confidence of the options."""
    return Trie(options.num_speculative_tokens, options.confidence_threshold)


def dynamic_tree(options: BeamOptions, depth: int) -> DynamicTree:
    """A tree by confidence. A number of nodes that was given is used whole and widens large trees.

    Else nodes below the confidence are left out.
    """
    nodes, given = options.num_draft_tokens, options.is_set("num_draft_tokens")
    width = options.eagle_topk or max(_MIN_EXPANDED_NODES, nodes // _NODES_PER_EXPANDED_NODE if given else 0)
    whole = given and not options.is_set("confidence_threshold")
    return DynamicTree(depth, width, nodes, 0.0 if whole else options.confidence_threshold)


def sorted_paths(tree: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rank paths as fixed trees take them: shorter ones first."""
    return tuple(sorted((tuple(p) for p in tree), key=lambda p: (len(p), p)))


def text_retrievers(context: BuildContext) -> CombinedRetriever:
    """The retrievers that need nothing but the text."""
    return CombinedRetriever([SuffixRetriever(context.references), TokenRecycling(context.vocab)])


def cost_aware_trie(options: HybridOptions) -> CostAwareTrie:
    """Tries as large as a pass is worth."""
    return CostAwareTrie(options.num_draft_tokens, PassCost(options.pass_cost))
