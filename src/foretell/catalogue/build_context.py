"""What methods are built from, and helpers that several builders use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from foretell.accept import (
    Acceptor,
    BlockVerification,
    GreedyBlockVerification,
    KSequentialSelection,
    Match,
    Rejection,
    TraversalVerification,
)
from foretell.catalogue.options.draft_model import SpecTrOptions
from foretell.catalogue.options.shared import (
    BeamOptions,
    ChainOptions,
    HybridOptions,
    RejectionOptions,
    TreeRejectionOptions,
    TrieOptions,
)
from foretell.draft import CombinedRetriever, DraftModel, Predictor, SuffixRetriever, TokenRecycling
from foretell.model.block.decoder import Decoder
from foretell.model.block.sparsity import FirstNeurons, NeuronRule, sparse_decoder
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.load.transforms import DecoderTransform
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.shape import (
    Chain,
    DynamicTree,
    Shape,
    Trie,
)
from foretell.speculator.network.base import Speculator
from foretell.tokenizer.codec import TextCodec

_MIN_EXPANDED_NODES = 4
"""Nodes that a dynamic tree expands per level at least: enough for trees of 12 to 16 nodes."""
LEAST_SCORE = 0.004
"""Least score of a node of an elastic tree where nodes are free."""
MAX_NODES = 64
"""Most nodes of a tree whose size follows the machine."""
_NODES_PER_EXPANDED_NODE = 6
"""Nodes of a dynamic tree per node that is expanded in a level: EAGLE-2's 60 and 10 (arXiv 2406.16858)."""
Input = Literal["drafts", "speculators", "references"]
"""A field of a `BuildContext` with what a user names for methods to draft with."""


@dataclass(frozen=True)
class BuildContext:
    """What a method is built from: the target, draft models and speculators, and reference documents as tokens."""

    vocab: int
    network: Network | None
    """The target's weights; None where transformers runs the target."""
    drafts: tuple[Runner, ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
    eos: tuple[int, ...] = ()
    """Tokens that end an answer of the target."""
    codec: TextCodec | None = None
    """The target's tokenizer."""
    draft_codecs: tuple[TextCodec, ...] = ()
    """The tokenizers of `drafts`."""
    draft_folders: tuple[Path | None, ...] = ()
    """The directories of their checkpoints."""
    checkpoint: Checkpoint | None = None
    """The target's checkpoint. Changed copies of the weights need it, unless `network` is a plain `Decoder`."""
    known_speculators: dict[object, Speculator] = field(default_factory=dict, compare=False)
    """Speculators that were read for this target before, by their directories and when these were written."""
    speculators: tuple[Path, ...] = ()
    """Directories of trained speculators; empty: the one that is installed for this target is used."""

    @property
    def speculator(self) -> Path | None:
        """The directory of the trained speculator that was named; None: none was named.

        Raises:
            ValueError: several were named.
        """
        if len(self.speculators) > 1:
            names = ", ".join(map(str, self.speculators))
            raise ValueError(
                f"several trained speculators were named ({names}), and this method drafts with one; name one"
            )
        return self.speculators[0] if self.speculators else None

    def with_copies(self) -> "BuildContext":
        """The same; but speculators are read again, as copies of its own, which may be trained."""
        return replace(self, known_speculators={})


def require_network(context: BuildContext, purpose: str = "drafts with parts of the target") -> Network:
    """The target's network. `purpose` completes the error message "this method ...".

    Raises:
        ValueError: transformers runs the target.
    """
    if context.network is None:
        raise ValueError(f"this method {purpose}, which works with models of the own decoder only; use another method")
    return context.network


def changed_copy(context: BuildContext, change: DecoderTransform, dtype: str | None = None) -> Network:
    """A copy of the target whose weights `change` has changed.

    Raises:
        ValueError: the weights cannot be read again.
    """
    if context.checkpoint is not None:
        return context.checkpoint.load_network(change, dtype)
    network = require_network(context)
    if not isinstance(network, Decoder):
        raise ValueError(
            "this method drafts with a changed copy of the target's weights, which cannot be read again here"
        )
    return change(network)


def sparse_network(context: BuildContext, rules: Sequence[NeuronRule]) -> Network:
    """The target with a rule per layer by which tokens choose the neurons that they read, sharing its weights.

    Raises:
        ValueError: it cannot have such rules, or its weights cannot be read again.
    """
    network = require_network(context, "drafts with a part of the target's neurons")
    if isinstance(network, NativeDecoder | Decoder) and network.sparsity:
        raise ValueError(f"the target reads a part of its neurons already ({network.sparsity}); load it without")
    if context.checkpoint is not None:
        return context.checkpoint.sparse_network(network, rules)
    if isinstance(network, Decoder):
        return sparse_decoder(network, rules)
    if isinstance(network, NativeDecoder) and all(isinstance(rule, FirstNeurons) for rule in rules):
        return network.with_rules(rules)
    raise ValueError("this method packs the target's weights another time, which cannot be read again here")


def early_exit_draft(context: BuildContext, exit_layer: int | None) -> DraftModel:
    """The target's first blocks as a draft model with a cache of its own; by default a third of them.

    Beside retrieval, and for models that cannot run some of their layers; `EarlyExitDrafter` shares the target's cache.
    """
    network = require_network(context, "cuts the target after some layers")
    return DraftModel(DecoderRunner(network.first_layers(exit_layer or default_exit_layer(network.config))))


def default_exit_layer(config: ModelConfig) -> int:
    """A third of the layers."""
    return max(1, config.layers // 3)


def chain(options: ChainOptions, fallback: float = 0.0) -> Shape[Predictor]:
    """A chain with the length, confidence and schedule of the options; `fallback`: see `Chain`."""
    return Chain(
        options.num_speculative_tokens,
        draw=options.draft_sample_method != "greedy",
        confidence=options.confidence_threshold,
        fallback=fallback,
        adaptive=options.num_assistant_tokens_schedule == "adaptive",
    )


_REJECTION: Mapping[str, type[Acceptor]] = {
    "standard": Rejection,
    "block": BlockVerification,
    "greedy_block": GreedyBlockVerification,
    "traversal": TraversalVerification,
    "optimal_transport": KSequentialSelection,
}


def rejection(
    options: RejectionOptions | TreeRejectionOptions | SpecTrOptions, draft_sample_method: str = "probabilistic"
) -> Acceptor:
    """The rule of the options for sampled drafts; matching where drafts are not sampled."""
    return Match() if draft_sample_method == "greedy" else _REJECTION[options.rejection_sample_method]()


def trie(options: TrieOptions) -> Trie:
    """A trie with the size and confidence of the options."""
    return Trie(options.num_speculative_tokens, options.confidence_threshold)


def elastic_tree(options: BeamOptions, depth: int) -> Shape[Predictor]:
    """EAGLE-2's tree of this depth; as large as pays, unless an option sets its number of nodes or their least
    confidence.
    """
    if options.is_set("num_draft_tokens") or options.is_set("confidence_threshold"):
        return dynamic_tree(options, depth)
    return DynamicTree(depth, options.eagle_topk or _MIN_EXPANDED_NODES, MAX_NODES, LEAST_SCORE, elastic=True)


def dynamic_tree(options: BeamOptions, depth: int) -> DynamicTree:
    """EAGLE-2's tree of this depth.

    Where the number of nodes is set, it widens large trees and all nodes are used; else nodes below the confidence are
    left out.
    """
    nodes, is_set = options.num_draft_tokens, options.is_set("num_draft_tokens")
    width = options.eagle_topk or max(_MIN_EXPANDED_NODES, nodes // _NODES_PER_EXPANDED_NODE if is_set else 0)
    use_all = is_set and not options.is_set("confidence_threshold")
    return DynamicTree(depth, width, nodes, 0.0 if use_all else options.confidence_threshold)


def sorted_paths(tree: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rank paths in the order of fixed trees: shorter ones first."""
    return tuple(sorted((tuple(p) for p in tree), key=lambda p: (len(p), p)))


def text_retrievers(context: BuildContext) -> CombinedRetriever:
    """The retrievers that need no model and no index: suffix matches and recycled tokens."""
    return CombinedRetriever([SuffixRetriever(context.references), TokenRecycling(context.vocab)])


def elastic_trie(options: HybridOptions) -> Trie:
    """A trie of at most so many nodes, of which the engine's budget chooses those that pay."""
    return Trie(options.num_draft_tokens, elastic=True)
