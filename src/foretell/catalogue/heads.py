"""Methods that draft with heads on the target's last hidden state."""

from functools import partial

from foretell.accept import Match
from foretell.catalogue.build_context import BuildContext, sorted_paths
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.heads import BlockwiseOptions, MedusaOptions
from foretell.catalogue.speculators import packed_speculator
from foretell.draft import HeadsDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.shape import Chain, FixedTree, optimal_tree
from foretell.speculator.network.heads import HeadsNetwork

_DEFAULT_ACCEPTANCE = ((0.5, 0.15, 0.08, 0.05, 0.03), (0.3, 0.12, 0.07, 0.05, 0.03), (0.2, 0.1, 0.06, 0.04, 0.03))
"""Acceptance rates by depth and rank of heads for which training measured none."""


def medusa(context: BuildContext, options: MedusaOptions) -> AnyMethod:
    """Medusa: heads with a fixed tree."""
    return heads_method(packed_speculator(context, HeadsNetwork, "medusa"), options)


def blockwise(context: BuildContext, options: BlockwiseOptions) -> AnyMethod:
    """A chain of every head's most probable token; a tree where the options ask for one."""
    network = packed_speculator(context, HeadsNetwork, "blockwise")
    if options.is_tree:
        return heads_method(network, MedusaOptions(**options.model_dump(exclude_none=True)))
    length = network.heads if options.num_speculative_tokens is None else options.num_speculative_tokens
    return Method(HeadsDrafter(network), Chain(length, draw=False), Match())


def heads_method(network: HeadsNetwork, options: MedusaOptions) -> AnyMethod:
    """Heads with their tree and matching."""
    return Method(HeadsDrafter(network), heads_tree(network, options), Match())


def heads_tree(network: HeadsNetwork, options: MedusaOptions) -> FixedTree:
    """The tree of the options, else the paths that training measured as the most often accepted."""
    if options.speculative_tree is not None:
        return FixedTree(sorted_paths(options.speculative_tree))
    if options.acceptance is not None or not network.paths:
        return optimal_tree(options.num_draft_tokens, options.acceptance or _DEFAULT_ACCEPTANCE, depth=network.heads)
    return FixedTree(sorted_paths(network.paths[: options.num_draft_tokens]))


_entry = partial(Entry, family="heads", drafter=HeadsDrafter, acceptor=Match, reads=("speculators",))
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="medusa",
        description=(
            "Heads on the target's last hidden state each predict one of the next tokens, and a fixed tree of their "
            "predictions is verified."
        ),
        when_to_use=(
            "when drafting must cost almost nothing; speculators whose draft tokens depend on one another "
            "(`mlp_speculator`, `eagle3`) draft deeper."
        ),
        papers=(
            Paper("Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", "2401.10774"),
        ),
        shape=FixedTree,
        builder=medusa,
        options=MedusaOptions,
        speculator="medusa",
    ),
    _entry(
        name="blockwise",
        description=(
            "Blockwise parallel decoding, the predecessor of Medusa: one feed-forward layer gives a hidden state per "
            "head, the target's own head gives the logits, and the most probable tokens form a chain."
        ),
        when_to_use="as `medusa`, whose tree is usually better than the chain.",
        papers=(Paper("Blockwise Parallel Decoding for Deep Autoregressive Models", "1811.03115"),),
        shape=Chain,
        builder=blockwise,
        options=BlockwiseOptions,
        speculator="blockwise",
        aliases=("blockwise_parallel_decoding",),
    ),
)
