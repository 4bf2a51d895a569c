"""Builders of lossy methods."""

from foretell.accept import Lenient, Near, Rollback, Topmost, Typical
from foretell.catalogue.drafts import drafter_of, named_drafts_only
from foretell.catalogue.heads import speculator
from foretell.catalogue.parts import Parts, chain_of
from foretell.config import SpeculativeConfig
from foretell.draft import Heads
from foretell.method import AnyMethod, Method
from foretell.shape import (
    Chain,
)


def lenience(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Rejection that forgives a factor."""
    return Method(drafter_of(parts), chain_of(config, 5), Lenient(config.lenience))


def blockwise_tolerant(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Among the target's best tokens, or near its best; heads draft where a speculator is named."""
    chain = Chain(config.num_speculative_tokens or 5, draw=False)
    draft = drafter_of(parts) if named_drafts_only(parts) else Heads(speculator(parts, "blockwise"))
    if config.accept_distance is not None:
        return Method(draft, chain, Near(config.accept_distance, minimum=config.minimum_block))
    return Method(draft, chain, Topmost(config.accept_top_k, minimum=config.minimum_block))


def bild(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A long chain, rolled back where the target disagrees strongly."""
    chain = Chain(config.num_speculative_tokens or 10, draw=False, fallback=config.fallback_threshold)
    return Method(drafter_of(parts), chain, Rollback(config.rollback_threshold))


def typical(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Typical acceptance."""
    return Method(drafter_of(parts), chain_of(config, 5), Typical(config.posterior_threshold, config.posterior_alpha))
