"""Builders of methods that draft with a smaller model."""

from foretell.accept import Block, Match, Rejection, Transport
from foretell.catalogue.drafts import KIND, drafter_of, small_models
from foretell.catalogue.parts import Parts, chain_of, grown, nodes_of, paths_of, test_of
from foretell.catalogue.trained import trained
from foretell.config import SpeculativeConfig
from foretell.draft import (
    Cascade,
    DraftModel,
    Lookup,
    Online,
    Translated,
)
from foretell.draft.network.draft_model import DraftNetwork
from foretell.method import AnyMethod, Method
from foretell.shape import (
    Branch,
    Chain,
    Fixed,
    Paced,
    Trie,
    optimal,
)

_WORTH = 0.01
"""Least chance of a node: a language model gives its best token less than that token's chance of being the target's best one, too."""


def draft_model(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A small model drafts a chain."""
    return Method(drafter_of(parts), chain_of(config, 5), test_of(config))


def block_verification(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """The same, accepted in blocks."""
    return Method(drafter_of(parts), chain_of(config, 5), Block())


def specinfer(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Several drafts at every node, drawn from the mixed models."""
    return Method(drafter_of(parts), Branch((2, 2, 1)), Rejection())


def sequoia(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """The tree that is best for the acceptance by rank."""
    draw = config.draft_sample_method == "probabilistic"
    if config.speculative_tree is not None:
        shape = Fixed(paths_of(config.speculative_tree), draw)
    else:
        rates = config.acceptance or (0.6, 0.15, 0.07, 0.04, 0.025, 0.02, 0.015, 0.01)
        shape = optimal(config.num_speculative_tokens or 16, rates, depth=config.num_steps or 6, draw=draw)
    return Method(drafter_of(parts), shape, Rejection() if draw else Match())


def dynamic_tree(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A tree where the small model is confident."""
    return Method(drafter_of(parts), grown(config, config.num_steps or 5, 4, 16, _WORTH), Match())


def spectr(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Chains side by side, accepted by K-SEQ."""
    chains = Branch((config.eagle_topk or 4, *[1] * ((config.num_steps or 4) - 1)), distinct=False)
    return Method(drafter_of(parts), chains, Transport())


def cascade(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Every model drafts for the next larger one."""
    *larger_first, last = small_models(parts)
    drafter = Cascade(last, Method(Lookup(references=parts.references), Trie(8), Match()))
    for runner in reversed(larger_first):
        drafter = Cascade(runner, Method(drafter, Chain(5, draw=False), Match()))
    return Method(drafter, chain_of(config, 5), test_of(config))


def universal_draft(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A draft model with another tokenizer."""
    if len(parts.drafts) != 1 or len(parts.draft_codecs) != 1 or parts.codec is None:
        raise ValueError("this method needs one draft model with its tokenizer: name it with --draft-model")
    length = config.num_speculative_tokens or 6
    confidence = 0.3 if config.confidence_threshold is None else config.confidence_threshold
    draft = Translated(DraftModel(parts.drafts[0]), parts.codec, parts.draft_codecs[0], length, confidence)
    return Method(draft, Trie(2 * length), Match())


def llmcad(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A tree paced by confidence."""
    budget = nodes_of(config) or 16
    return Method(drafter_of(parts), Paced(budget, threshold=config.confidence_threshold or 0.01), Match())


def online(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A trained draft that keeps learning; matched, so that no answer depends on how far it has come."""
    network = trained(parts, KIND)
    assert isinstance(network, DraftNetwork)
    draft = Online(network, config.online_update_interval, config.online_buffer, config.online_learning_rate)
    length = 5 if config.num_speculative_tokens is None else config.num_speculative_tokens
    return Method(draft, Chain(length, draw=False, confidence=config.confidence_threshold or 0.0), Match())
