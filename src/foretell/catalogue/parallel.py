"""Builders of methods in which the target reads learned vectors to look ahead."""

from foretell.accept import Match
from foretell.catalogue.parts import Parts, chain_of, test_of
from foretell.catalogue.trained import trained
from foretell.config import SpeculativeConfig
from foretell.draft import ParallelSampling
from foretell.draft.network.look_ahead import LookAheadEmbeddings
from foretell.draft.network.pack import packed
from foretell.method import AnyMethod, Method


def look_ahead_embeddings(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """PaSS."""
    network = trained(parts, "pass")
    assert isinstance(network, LookAheadEmbeddings)
    return parallel_method(packed(network), config)


def parallel_method(network: LookAheadEmbeddings, config: SpeculativeConfig) -> AnyMethod:
    """A chain of what the vectors guess, drawn and tested, or with greedy drafts picked and matched: lossless."""
    groups = 2 if config.look_ahead_groups is None else config.look_ahead_groups
    drafter = ParallelSampling(network, groups)
    accept = Match() if config.draft_sample_method == "greedy" else test_of(config)
    return Method(drafter, chain_of(config, network.ahead), accept)
