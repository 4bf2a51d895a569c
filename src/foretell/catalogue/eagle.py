"""Builders of methods that draft with EAGLE's layer."""

from foretell.accept import Match, Rejection
from foretell.catalogue.parts import Parts, grown, nodes_of, paths_of
from foretell.catalogue.trained import trained
from foretell.config import SpeculativeConfig
from foretell.draft import Eagle, Predictor
from foretell.draft.network.eagle import EagleNetwork
from foretell.draft.network.pack import packed
from foretell.method import AnyMethod, Method
from foretell.shape import Chain, Fixed, Shape, optimal

_FIRST = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""Rank paths of EAGLE-1's tree of 25 nodes (arXiv 2401.15077, figure 7)."""
_DEPTH, _WIDTH, _NODES = 5, 4, 12
"""Of the dynamic tree; see `grown`."""
_NODES_PER_LEVEL = 30
"""Nodes that were asked for, for each level more: EAGLE-3's 60 nodes have 7."""
_DEEPEST = 8
"""Where no number of nodes was: a level is only begun where it promises to pay."""


def eagle(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """EAGLE-1: the same tree at every step."""
    network = _network(parts, "eagle")
    if config.draft_sample_method == "probabilistic":
        return Method(Eagle(network), _drawn(config), Rejection())
    return Method(Eagle(network), _fixed(config, draw=False), Match())


def eagle2(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """EAGLE-2: EAGLE-1's layer under a tree by confidence."""
    return eagle_method(_network(parts, "eagle"), config)


def eagle3(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """EAGLE-3: its own layer under a tree by confidence."""
    return eagle_method(_network(parts, "eagle3"), config)


def eagle_method(network: EagleNetwork, config: SpeculativeConfig) -> AnyMethod:
    """A tree by confidence, matched; drawn trees are tested by rejection."""
    if config.draft_sample_method == "probabilistic":
        return Method(Eagle(network), _drawn(config), Rejection())
    return Method(Eagle(network), _picked(config), Match())


def _network(parts: Parts, kind: str) -> EagleNetwork:
    network = trained(parts, kind)
    assert isinstance(network, EagleNetwork)
    # Eight bits: a level of the tree costs half as long, and drafts may be rounded.
    return packed(network, "int8")


def _picked(config: SpeculativeConfig) -> Shape[Predictor]:
    """The paths that were named, a chain where one wants but one child, else a tree by confidence."""
    if config.speculative_tree is not None:
        return _fixed(config, draw=False)
    nodes, least = nodes_of(config), config.confidence_threshold or 0.0
    if config.eagle_topk == 1:
        return Chain(config.num_steps or nodes or _DEPTH, draw=False, confidence=least)
    depth = _DEPTH + nodes // _NODES_PER_LEVEL if nodes else _DEEPEST
    return grown(config, config.num_steps or depth, _WIDTH, _NODES)


def _drawn(config: SpeculativeConfig) -> Shape[Predictor]:
    """A chain where one wants but one child, else a tree whose children are drawn without replacement."""
    if config.eagle_topk == 1:
        return Chain(config.num_steps or config.num_speculative_tokens or _DEPTH, draw=True)
    return _fixed(config, draw=True)


def _fixed(config: SpeculativeConfig, draw: bool) -> Fixed:
    """The paths that were named, the best tree for rates and sizes that were, or EAGLE-1's."""
    nodes = nodes_of(config)
    if config.speculative_tree is not None:
        return Fixed(paths_of(config.speculative_tree), draw)
    if config.acceptance is not None or nodes is not None:
        rates = config.acceptance or (0.6, 0.15, 0.07, 0.04)
        return optimal(nodes or len(_FIRST), rates, depth=config.num_steps or _DEPTH, draw=draw)
    return Fixed(_FIRST, draw)
