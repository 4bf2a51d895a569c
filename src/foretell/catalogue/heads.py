"""Builders of methods that draft with heads on the target's last state."""

from foretell.accept import Match, Typical
from foretell.catalogue.parts import Parts, nodes_of, paths_of
from foretell.catalogue.trained import trained
from foretell.config import SpeculativeConfig
from foretell.draft import Heads
from foretell.draft.network.heads import HeadsNetwork
from foretell.draft.network.pack import packed
from foretell.method import AnyMethod, Method
from foretell.shape import Chain, Fixed, optimal

_RATES = ((0.5, 0.15, 0.08, 0.05, 0.03), (0.3, 0.12, 0.07, 0.05, 0.03), (0.2, 0.1, 0.06, 0.04, 0.03))
"""Acceptance by rank and depth that uncalibrated heads are given the benefit of."""
_NODES = 8


def medusa(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A sparse tree of what the heads guess."""
    return heads_method(speculator(parts, "medusa"), config)


def medusa_typical(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """The same, typical acceptance."""
    network = speculator(parts, "medusa")
    return Method(
        Heads(network), heads_tree(network, config), Typical(config.posterior_threshold, config.posterior_alpha)
    )


def blockwise(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Every head's best guess, one after the other; a tree where one is asked for."""
    network = speculator(parts, "blockwise")
    if config.speculative_tree is not None or config.num_draft_tokens is not None:
        return heads_method(network, config)
    return Method(Heads(network), Chain(config.num_speculative_tokens or network.heads, draw=False), Match())


def speculator(parts: Parts, kind: str) -> HeadsNetwork:
    """The trained heads of this kind, fast."""
    network = trained(parts, kind)
    assert isinstance(network, HeadsNetwork)
    return packed(network)


def heads_method(network: HeadsNetwork, config: SpeculativeConfig) -> AnyMethod:
    """Heads under their tree, matched: lossless."""
    return Method(Heads(network), heads_tree(network, config), Match())


def heads_tree(network: HeadsNetwork, config: SpeculativeConfig) -> Fixed:
    """The tree that was asked for, else the best one by what the heads were seen to guess in training."""
    if config.speculative_tree is not None:
        return Fixed(paths_of(config.speculative_tree))
    nodes = nodes_of(config) or _NODES
    if config.acceptance is not None or not network.paths:
        return optimal(nodes, config.acceptance or _RATES, depth=network.heads)
    return Fixed(paths_of(network.paths[:nodes]))
