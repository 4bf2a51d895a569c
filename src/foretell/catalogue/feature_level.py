"""Methods that draft autoregressively on the target's hidden states: EAGLE, and the multi-stage MLP speculator."""

from functools import partial

from foretell.accept import Acceptor, Match
from foretell.catalogue.build_context import BuildContext, elastic_tree, rejection, require_network, sorted_paths
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.feature_level import (
    BeamSearchOptions,
    EagleOptions,
    EagleTreeOptions,
    FeatureTreeOptions,
    MLPSpeculatorOptions,
)
from foretell.catalogue.speculators import packed_speculator, read_speculator, trained_speculator
from foretell.draft import (
    AssistantDrafter,
    DFlashDrafter,
    EagleDrafter,
    MLPSpeculatorDrafter,
    MTPDrafter,
    MTPModulesDrafter,
    PEagleDrafter,
    Predictor,
    ReDrafterDrafter,
)
from foretell.draft.heads import OnePassPredictor
from foretell.engine.method import AnyMethod, Method
from foretell.model.load.assistant import is_assistant, load_assistant
from foretell.model.run.mtp import MTPLayer
from foretell.shape import BeamSearch, Chain, DynamicTree, FixedTree, Shape, optimal_tree
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.eagle import EagleNetwork
from foretell.speculator.network.mlp_speculator import MLPSpeculator
from foretell.speculator.network.mtp import AssistantNetwork, MTPNetwork
from foretell.speculator.network.pack import describe_packed
from foretell.speculator.network.redrafter import ReDrafter

OnePassDrafter = DFlashDrafter | PEagleDrafter | OnePassPredictor
"""Drafters that predict all tokens of a draft in one pass."""
_EAGLE1_TREE = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""Rank paths of EAGLE-1's tree of 25 nodes (arXiv 2401.15077, figure 7)."""
_DEFAULT_ACCEPTANCE = (0.6, 0.15, 0.07, 0.04)
"""Acceptance rates by rank where none are given."""
_DEFAULT_DEPTH = 5
"""Levels of a tree where neither levels nor nodes are set: those of EAGLE-1's tree."""
_NODES_PER_EXTRA_LEVEL = 30
"""Nodes for each further level: EAGLE-3's tree of 60 nodes has 7 levels."""
_MAX_LEVELS = 8
"""Most levels of a dynamic tree whose number of nodes is not set; unlikely nodes are not expanded anyway."""


def eagle(context: BuildContext, options: EagleOptions) -> AnyMethod:
    """EAGLE-1: a fixed tree."""
    draw = options.draft_sample_method == "probabilistic"
    shape: Shape[Predictor]
    if options.eagle_topk == 1:
        shape = Chain(options.num_steps, draw)
    elif options.speculative_tree is None and options.acceptance is None and options.num_draft_tokens is None:
        shape = FixedTree(_EAGLE1_TREE, draw)
    else:
        nodes = options.num_draft_tokens or len(_EAGLE1_TREE)
        shape = _fixed(nodes, options.acceptance, options.speculative_tree, options.num_steps, draw)
    accept = rejection(options, options.draft_sample_method)
    return _method(EagleDrafter(packed_speculator(context, EagleNetwork, "eagle")), shape, accept)


def eagle2(context: BuildContext, options: EagleTreeOptions) -> AnyMethod:
    """EAGLE-2: EAGLE-1's network with a dynamic tree."""
    return eagle_method(packed_speculator(context, EagleNetwork, "eagle"), options)


def eagle3(context: BuildContext, options: EagleTreeOptions) -> AnyMethod:
    """EAGLE-3: its own network with a dynamic tree."""
    return eagle_method(packed_speculator(context, EagleNetwork, "eagle3"), options)


def mtp(context: BuildContext, options: EagleTreeOptions) -> AnyMethod:
    """The checkpoint's multi-token prediction layer, or an assistant, with a dynamic tree.

    Raises:
        ValueError: there is neither.
    """
    network = require_network(context, "drafts with the checkpoint's multi-token prediction layer")
    if context.speculator is not None and is_assistant(context.speculator):
        return feature_method(AssistantDrafter(load_assistant(context.speculator, network)), options)
    if context.speculator is not None and context.speculator.is_dir():
        given = read_speculator(context, context.speculator)
        if isinstance(given, AssistantNetwork):
            return feature_method(AssistantDrafter(given.to_assistant(network)), options)
        trained = trained_speculator(context, MTPNetwork.kind)
        assert isinstance(trained, MTPNetwork)
        return mtp_method(trained.to_layer(), options)
    if context.checkpoint is None:
        raise ValueError("mtp drafts with a layer of the target's checkpoint, which cannot be read again here")
    return mtp_method(context.checkpoint.mtp_layer(network, context.speculator), options)


def mtp_method(layer: MTPLayer, options: EagleTreeOptions) -> AnyMethod:
    """`feature_method` with the layers of multi-token prediction."""
    drafter = MTPDrafter if len(layer.modules) == 1 else MTPModulesDrafter
    return feature_method(drafter(layer, window=options.prompt_window), options)


def eagle_method(network: EagleNetwork, options: EagleTreeOptions) -> AnyMethod:
    """`feature_method` with EAGLE's drafter."""
    return feature_method(EagleDrafter(network, window=options.prompt_window), options)


def feature_method(drafter: EagleDrafter | AssistantDrafter, options: EagleTreeOptions) -> AnyMethod:
    """A dynamic tree with matching; sampled drafts form a fixed tree or a chain with rejection sampling."""
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
        shape = elastic_tree(options, options.num_steps or grown)
    return _method(drafter, shape, rejection(options, options.draft_sample_method))


def mlp_speculator(context: BuildContext, options: MLPSpeculatorOptions) -> AnyMethod:
    """The MLP speculator with the tree of the options."""
    return mlp_speculator_method(packed_speculator(context, MLPSpeculator), options)


def mlp_speculator_method(network: MLPSpeculator, options: MLPSpeculatorOptions) -> AnyMethod:
    """An MLP speculator with matching; sampled drafts with rejection sampling.

    Raises:
        ValueError: the tree is deeper than the network has stages.
    """
    return method_of_levels(MLPSpeculatorDrafter(network), network.stages, "stages, one for each level", options)


def redrafter(context: BuildContext, options: BeamSearchOptions) -> AnyMethod:
    """ReDrafter with beam search."""
    return redrafter_method(packed_speculator(context, ReDrafter), options)


def redrafter_method(network: ReDrafter, options: BeamSearchOptions) -> AnyMethod:
    """ReDrafter with matching.

    Raises:
        ValueError: the sequences are longer than those that the network was trained for.
    """
    depth = options.num_steps or network.stages
    if depth > network.stages:
        raise ValueError(f"this speculator was trained to draft {network.stages} tokens, and {depth} were asked for")
    return _method(ReDrafterDrafter(network), BeamSearch(depth, options.num_beams), Match())


def method_of_levels(
    drafter: MLPSpeculatorDrafter | OnePassDrafter,
    levels: int,
    kind: str,
    options: MLPSpeculatorOptions,
) -> AnyMethod:
    """A drafter with so many levels, of this kind.

    Raises:
        ValueError: the tree is deeper.
    """
    nodes, draw = options.num_draft_tokens, options.draft_sample_method == "probabilistic"
    depth = options.num_steps or levels
    length = nodes if options.is_set("num_draft_tokens") else depth
    is_fixed = options.speculative_tree is not None or options.acceptance is not None
    is_chain = not is_fixed and (draw or options.eagle_topk == 1)
    deepest = max(depth, length if is_chain else 0, *map(len, options.speculative_tree or ()))
    if deepest > levels:
        raise ValueError(f"this speculator has {levels} {kind}, and {deepest} levels were asked for")
    shape: Shape[Predictor]
    if is_fixed:
        shape = _fixed(nodes, options.acceptance, options.speculative_tree, depth, draw)
    else:
        shape = Chain(length, draw, _chain_confidence(options)) if is_chain else elastic_tree(options, depth)
    return _method(drafter, shape, rejection(options, options.draft_sample_method))


def _method(
    drafter: EagleDrafter | AssistantDrafter | MLPSpeculatorDrafter | OnePassDrafter,
    shape: Shape[Predictor],
    accept: Acceptor,
) -> AnyMethod:
    """A method that names the precision of its drafter."""
    network = None if isinstance(drafter, OnePassPredictor) else drafter.network
    label = describe_packed(drafter.label, network) if isinstance(network, Speculator) else drafter.label
    return Method(drafter, shape, accept, drafter_label=label)


def _chain_confidence(options: FeatureTreeOptions) -> float:
    """The confidence threshold of a chain: the default of the option is for trees."""
    return options.confidence_threshold if options.is_set("confidence_threshold") else 0.0


def _fixed(
    nodes: int, acceptance: list[float] | None, tree: list[list[int]] | None, depth: int, draw: bool
) -> FixedTree:
    """The tree with these paths, else the optimal tree with `nodes` nodes for these acceptance rates."""
    return (
        FixedTree(sorted_paths(tree), draw)
        if tree is not None
        else optimal_tree(nodes, acceptance or _DEFAULT_ACCEPTANCE, depth, draw)
    )


_entry = partial(Entry, family="feature level", shape=DynamicTree, acceptor=Match, reads=("speculators",))
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="eagle",
        description=(
            "One decoder layer predicts the target's next hidden state, and the target's head predicts the token from "
            "it; a fixed tree is verified."
        ),
        when_to_use=(
            "where a pass over some 25 tokens costs about as much as one; on a CPU `eagle2` drafts better trees with "
            "the same weights."
        ),
        papers=(Paper("EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", "2401.15077"),),
        drafter=EagleDrafter,
        shape=FixedTree,
        builder=eagle,
        options=EagleOptions,
        speculator="eagle",
        aliases=("eagle1",),
    ),
    _entry(
        name="eagle2",
        description=(
            "EAGLE's layer with a dynamic tree: the most probable nodes of every level are expanded, and the most "
            "probable nodes of all levels are verified."
        ),
        when_to_use="where an EAGLE speculator exists for the target.",
        papers=(Paper("EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", "2406.16858"),),
        drafter=EagleDrafter,
        builder=eagle2,
        options=EagleTreeOptions,
        speculator="eagle",
    ),
    _entry(
        name="eagle3",
        description=(
            "One decoder layer reads the hidden states of several target layers, fused, and is trained on its own "
            "outputs; a dynamic tree is verified."
        ),
        when_to_use=(
            "for the longest accepted drafts of all trained drafters, at the cost of one layer and the head per level; "
            "with larger trees where further nodes cost little."
        ),
        papers=(
            Paper(
                "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
                "2503.01840",
            ),
        ),
        drafter=EagleDrafter,
        builder=eagle3,
        options=EagleTreeOptions,
        speculator="eagle3",
        drafts_with="one decoder layer on hidden states of several target layers",
    ),
    _entry(
        name="mtp",
        description=(
            "The multi-token prediction layers of the target's own checkpoint (Qwen3-Next, Qwen3.5, DeepSeek-V3, GLM-4 "
            "MoE), or Gemma 4's assistant, draft from its last hidden state; a dynamic tree is verified."
        ),
        when_to_use="where the checkpoint has such a layer: it was trained with the model.",
        papers=(Paper("DeepSeek-V3 Technical Report", "2412.19437"),),
        drafter=MTPDrafter,
        builder=mtp,
        options=EagleTreeOptions,
        needs="a checkpoint with such a layer, layers that were trained for it, or an assistant",
        aliases=("deepseek_mtp", "gemma4_mtp", "glm4_moe_mtp", "qwen3_next_mtp"),
    ),
    _entry(
        name="mlp_speculator",
        description=(
            "The multi-stage MLP speculator: a state that starts as the target's last hidden state is updated with "
            "every draft token and gives the logits of the next one."
        ),
        when_to_use=(
            "as the cheapest speculator whose draft tokens depend on one another: deeper ones are accepted more often "
            "than those of Medusa heads."
        ),
        papers=(Paper("Accelerating Production LLMs with Combined Token/Embedding Speculators", "2404.19124"),),
        drafter=MLPSpeculatorDrafter,
        builder=mlp_speculator,
        options=MLPSpeculatorOptions,
        speculator="mlp_speculator",
        aliases=("multi_stage_mlp",),
    ),
    _entry(
        name="redrafter",
        description=(
            "A small recurrent network reads the drafted tokens beside the target's last hidden state; the best "
            "sequences of a beam search are verified, their common beginnings once."
        ),
        when_to_use="as a cheap drafter whose weights do not grow with the length of its drafts.",
        papers=(Paper("Recurrent Drafter for Fast Speculative Decoding in Large Language Models", "2403.09919"),),
        drafter=ReDrafterDrafter,
        shape=BeamSearch,
        builder=redrafter,
        options=BeamSearchOptions,
        speculator="redrafter",
        aliases=("recurrent_drafter",),
    ),
)
