"""Builders of methods that draft with a multi-stage speculator."""

from foretell.accept import Match, Rejection
from foretell.catalogue.parts import Parts, grown, nodes_of, paths_of
from foretell.catalogue.trained import trained
from foretell.config import SpeculativeConfig
from foretell.draft import Predictor, Stages
from foretell.draft.network.mlp_speculator import MLPSpeculator
from foretell.draft.network.pack import packed
from foretell.method import AnyMethod, Method
from foretell.shape import Chain, Fixed, Shape, optimal

_NODES, _WIDTH = 12, 4


def mlp_speculator(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A small recurrence on the target's last state, under the tree that was asked for."""
    network = trained(parts, "mlp_speculator")
    assert isinstance(network, MLPSpeculator)
    return stages_method(packed(network), config)


def stages_method(network: MLPSpeculator, config: SpeculativeConfig) -> AnyMethod:
    """Stages under a tree, matched; drawn chains and trees are tested by rejection.

    Raises:
        ValueError: a tree deeper than there are stages.
    """
    draw = config.draft_sample_method == "probabilistic"
    return Method(Stages(network), _shape(network.stages, config, draw), Rejection() if draw else Match())


def _shape(stages: int, config: SpeculativeConfig, draw: bool) -> Shape[Predictor]:
    """The paths that were named; the best tree for the rates that were named; a chain to draw or of width 1; else a tree by confidence."""
    nodes, confidence = nodes_of(config), config.confidence_threshold or 0.0
    if config.speculative_tree is not None:
        paths = paths_of(config.speculative_tree)
        _within(max(map(len, paths), default=0), stages)
        return Fixed(paths, draw)
    depth = _within(config.num_steps or stages, stages)
    if config.acceptance is not None:
        return optimal(nodes or _NODES, config.acceptance, depth, draw)
    if draw or config.eagle_topk == 1:
        return Chain(_within(nodes or depth, stages), draw, confidence)
    return grown(config, depth, _WIDTH, _NODES)


def _within(depth: int, stages: int) -> int:
    if depth > stages:
        raise ValueError(f"this speculator has {stages} stages and drafts no deeper, and {depth} were asked for")
    return depth
