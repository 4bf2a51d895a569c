"""Builders of methods in which the target iterates on several positions at once."""

from foretell.accept import Match
from foretell.catalogue.parts import Parts, trie_of
from foretell.config import SpeculativeConfig
from foretell.draft import (
    Jacobi,
    Lookahead,
)
from foretell.method import AnyMethod, Method


def lookahead(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Lookahead decoding."""
    width, ngram = config.max_window_size or 7, config.max_ngram_size or 5
    candidates = width if config.max_verification_set_size is None else config.max_verification_set_size
    return Method(
        Lookahead(width, ngram, candidates, eos=parts.eos), trie_of(config, candidates * (ngram - 1), 0.0), Match()
    )


def jacobi(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Jacobi decoding, its window sliding."""
    width = config.max_window_size or config.num_speculative_tokens or 8
    return Method(Jacobi(width), trie_of(config, width, 0.0), Match())


def gauss_seidel_jacobi(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Jacobi decoding block by block."""
    width = config.max_window_size or config.num_speculative_tokens or 3
    return Method(Jacobi(width, slide=False), trie_of(config, width, 0.0), Match())
