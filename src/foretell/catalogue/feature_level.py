"""Methods that draft autoregressively on the target's hidden states: EAGLE, and the multi-stage MLP speculator."""

from foretell.accept import Acceptor, Match, Rejection
from foretell.catalogue.build_context import BuildContext, dynamic_tree, sorted_paths
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options import EagleOptions, EagleTreeOptions, FeatureTreeOptions, MLPSpeculatorOptions
from foretell.catalogue.speculators import trained_speculator
from foretell.draft import EagleDrafter, MLPSpeculatorDrafter, Predictor
from foretell.engine.method import AnyMethod, Method
from foretell.shape import Chain, DynamicTree, FixedTree, Shape, optimal_tree
from foretell.speculator.network.eagle import EagleNetwork
from foretell.speculator.network.mlp_speculator import MLPSpeculator
from foretell.speculator.network.pack import packed

_EAGLE1_TREE = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""Rank paths of EAGLE-1's tree of 25 nodes (arXiv 2401.15077, figure 7)."""
_DEFAULT_ACCEPTANCE = (0.6, 0.15, 0.07, 0.04)
"""Acceptance by rank that is assumed where none was measured."""
_DEFAULT_DEPTH = 5
"""Levels of a tree, where neither they nor its nodes are given: those of EAGLE-1's."""
_NODES_PER_EXTRA_LEVEL = 30
"""Nodes that were asked for, for each level more than that: EAGLE-3's 60 nodes have 7."""
_MAX_LEVELS = 8
"""Of a dynamic tree whose nodes are not given: a level is only begun where it promises to pay."""


def eagle(context: BuildContext, options: EagleOptions) -> AnyMethod:
    """EAGLE-1: the same tree at every step."""
    draw = options.draft_sample_method == "probabilistic"
    shape: Shape[Predictor]
    if options.eagle_topk == 1:
        shape = Chain(options.num_steps, draw)
    elif options.speculative_tree is None and options.acceptance is None and options.num_draft_tokens is None:
        shape = FixedTree(_EAGLE1_TREE, draw)
    else:
        nodes = options.num_draft_tokens or len(_EAGLE1_TREE)
        shape = _fixed(nodes, options.acceptance, options.speculative_tree, options.num_steps, draw)
    return Method(EagleDrafter(_eagle_network(context, "eagle")), shape, _acceptor(draw))


def eagle2(context: BuildContext, options: EagleTreeOptions) -> AnyMethod:
    """EAGLE-2: EAGLE-1's layer under a dynamic tree."""
    return eagle_method(_eagle_network(context, "eagle"), options)


def eagle3(context: BuildContext, options: EagleTreeOptions) -> AnyMethod:
    """EAGLE-3: its own layer under a dynamic tree."""
    return eagle_method(_eagle_network(context, "eagle3"), options)


def eagle_method(network: EagleNetwork, options: EagleTreeOptions) -> AnyMethod:
    """A dynamic tree, matched; drawn trees are fixed and tested by rejection."""
    nodes, draw = options.num_draft_tokens, options.draft_sample_method == "probabilistic"
    given = options.is_set("num_draft_tokens")
    depth = options.num_steps or _DEFAULT_DEPTH
    shape: Shape[Predictor]
    if options.speculative_tree is not None or options.acceptance is not None:
        shape = _fixed(nodes, options.acceptance, options.speculative_tree, depth, draw)
    elif options.eagle_topk == 1:
        shape = Chain(options.num_steps or (nodes if given else _DEFAULT_DEPTH), draw, _chain_confidence(options))
    elif draw:
        shape = _fixed(nodes, None, None, depth, draw) if given else FixedTree(_EAGLE1_TREE, draw)
    else:
        grown = _DEFAULT_DEPTH + nodes // _NODES_PER_EXTRA_LEVEL if given else _MAX_LEVELS
        shape = dynamic_tree(options, options.num_steps or grown)
    return Method(EagleDrafter(network), shape, _acceptor(draw))


def mlp_speculator(context: BuildContext, options: MLPSpeculatorOptions) -> AnyMethod:
    """A small recurrence on the target's last state, under the tree that was asked for."""
    network = trained_speculator(context, "mlp_speculator")
    assert isinstance(network, MLPSpeculator)
    return mlp_speculator_method(packed(network), options)


def mlp_speculator_method(network: MLPSpeculator, options: MLPSpeculatorOptions) -> AnyMethod:
    """Stages under a tree, matched; drawn chains and trees are tested by rejection.

    Raises:
        ValueError: a tree deeper than there are stages.
    """
    nodes, draw = options.num_draft_tokens, options.draft_sample_method == "probabilistic"
    depth = options.num_steps or network.stages
    length = nodes if options.is_set("num_draft_tokens") else depth
    is_fixed = options.speculative_tree is not None or options.acceptance is not None
    is_chain = not is_fixed and (draw or options.eagle_topk == 1)
    deepest = max(depth, length if is_chain else 0, *map(len, options.speculative_tree or ()))
    if deepest > network.stages:
        raise ValueError(
            f"this speculator has {network.stages} stages and drafts no deeper, and {deepest} were asked for"
        )
    shape: Shape[Predictor]
    if is_fixed:
        shape = _fixed(nodes, options.acceptance, options.speculative_tree, depth, draw)
    else:
        shape = Chain(length, draw, _chain_confidence(options)) if is_chain else dynamic_tree(options, depth)
    return Method(MLPSpeculatorDrafter(network), shape, _acceptor(draw))


def _acceptor(draw: bool) -> Acceptor:
    return Rejection() if draw else Match()


def _chain_confidence(options: FeatureTreeOptions) -> float:
    """The default is for the nodes of a tree."""
    return options.confidence_threshold if options.is_set("confidence_threshold") else 0.0


def _fixed(
    nodes: int, acceptance: list[float] | None, tree: list[list[int]] | None, depth: int, draw: bool
) -> FixedTree:
    """The paths that were named, else the best tree of so many nodes for these acceptance rates."""
    return (
        FixedTree(sorted_paths(tree), draw)
        if tree is not None
        else optimal_tree(nodes, acceptance or _DEFAULT_ACCEPTANCE, depth, draw)
    )


def _eagle_network(context: BuildContext, kind: str) -> EagleNetwork:
    network = trained_speculator(context, kind)
    assert isinstance(network, EagleNetwork)
    # Eight bits: a level of the tree costs half as long, and drafts may be rounded.
    return packed(network, "int8")


ENTRIES = (
    Entry(
        name="eagle",
        family="feature level",
        description=(
            "One decoder layer goes on in the target's feature space: it guesses the next hidden state, and the "
            "target's own head the token after it; a fixed tree is verified."
        ),
        when_to_use=(
            "where a pass over some 25 tokens costs about as much as one; on a CPU `eagle2` drafts better trees from "
            "the same weights."
        ),
        papers=(Paper("EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", "2401.15077"),),
        drafter=EagleDrafter,
        shape=FixedTree,
        acceptor=Match,
        builder=eagle,
        options=EagleOptions,
        speculator="eagle",
        aliases=("eagle1",),
    ),
    Entry(
        name="eagle2",
        family="feature level",
        description=(
            "EAGLE's layer under a dynamic tree: the likeliest nodes of every level are expanded, and the likeliest "
            "of all are verified."
        ),
        when_to_use="wherever an EAGLE layer is there for the target.",
        papers=(Paper("EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", "2406.16858"),),
        drafter=EagleDrafter,
        shape=DynamicTree,
        acceptor=Match,
        builder=eagle2,
        options=EagleTreeOptions,
        speculator="eagle",
    ),
    Entry(
        name="eagle3",
        family="feature level",
        description=(
            "One layer reads several of the target's hidden states, fused, and is trained on its own outputs; a "
            "dynamic tree is verified."
        ),
        when_to_use=(
            "of all trained drafters it is right deepest, at the price of one layer and the head per level; larger "
            "trees pay where nodes are cheap."
        ),
        papers=(
            Paper(
                "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
                "2503.01840",
            ),
        ),
        drafter=EagleDrafter,
        shape=DynamicTree,
        acceptor=Match,
        builder=eagle3,
        options=EagleTreeOptions,
        speculator="eagle3",
        drafts_with="one layer on several of the target's hidden states, fused",
    ),
    Entry(
        name="mlp_speculator",
        family="feature level",
        description=(
            "The multi-stage MLP speculator: a small state, at first the target's last hidden state, is updated with "
            "every guessed token and scored for the next."
        ),
        when_to_use=(
            "as the cheapest speculator whose guesses depend on one another: its deeper drafts stand more often than "
            "those of heads."
        ),
        papers=(Paper("Accelerating Production LLMs with Combined Token/Embedding Speculators", "2404.19124"),),
        drafter=MLPSpeculatorDrafter,
        shape=DynamicTree,
        acceptor=Match,
        builder=mlp_speculator,
        options=MLPSpeculatorOptions,
        speculator="mlp_speculator",
        aliases=("multi_stage_mlp",),
    ),
)
