"""Builders of methods that draft by copying: from the text, from references, from a datastore, from earlier passes."""

from pathlib import Path

from foretell.accept import Match
from foretell.catalogue.parts import Parts, copies, frugal_of, own, trie_of
from foretell.config import SpeculativeConfig
from foretell.datastore import Datastore, open_datastore
from foretell.draft import (
    Lookup,
    PhraseRetrieval,
    Recycling,
    Rest,
    Suffix,
    Together,
)
from foretell.draft.phrases import encode
from foretell.method import AnyMethod, Method
from foretell.model.runner import DecoderRunner


def ngram(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Prompt lookup."""
    tree = trie_of(config, 10, 0.1)
    lookup = Lookup(config.prompt_lookup_max or 3, config.prompt_lookup_min or 1, max(tree.budget, 1), parts.references)
    return Method(lookup, tree, Match())


def llma(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Copies from references only."""
    if not parts.references:
        raise ValueError("llma copies from reference documents: name at least one with --reference FILE")
    tree = trie_of(config, 15, 0.0)
    lookup = Lookup(
        config.prompt_lookup_max or 5,
        config.prompt_lookup_min or 1,
        max(tree.budget, 1),
        parts.references,
        scope="references",
        choice="first",
    )
    return Method(lookup, tree, Match())


def suffix(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Longest suffix match."""
    return Method(Suffix(parts.references, config.prompt_lookup_min or 1), trie_of(config, 8, 0.1), Match())


def recycling(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Successors seen in earlier passes."""
    return Method(Recycling(parts.vocab), trie_of(config, 8, 0.06), Match())


def sam_recycling(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Suffix matches and recycled successors together."""
    return Method(Together([Suffix(parts.references), Recycling(parts.vocab)]), trie_of(config, 7, 0.1), Match())


def hybrid(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Copies, or nothing."""
    return Method(copies(parts), frugal_of(config), Match())


def rest(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Retrieval from a datastore."""
    if config.datastore is not None:
        store = open_datastore(Path(config.datastore), parts.codec)
    elif parts.references:
        store = Datastore.of(parts.references)
    else:
        raise ValueError(
            "rest drafts from a datastore: build one with `foretell datastore build` and name it under the key datastore of the speculative config, "
            "or give documents with --reference FILE"
        )
    return Method(
        Rest(store, config.prompt_lookup_max or store.depth, config.prompt_lookup_min or 2),
        trie_of(config, 16, 0.04),
        Match(),
    )


def phrases(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Phrases by hidden state."""
    network = own(parts, "reads hidden states of the target")
    tap = network.config.layers + 1
    documents = encode(DecoderRunner(network), parts.references, tap) if parts.references else None
    return Method(PhraseRetrieval(tap, documents), trie_of(config, 16, 0.04), Match())
