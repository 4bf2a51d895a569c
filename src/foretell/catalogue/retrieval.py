"""Methods that draft by retrieval: from prompt and answer, references, a datastore, or earlier passes."""

from functools import partial
from pathlib import Path

from foretell.accept import Match
from foretell.catalogue.build_context import BuildContext, elastic_trie, require_network, text_retrievers, trie
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.retrieval import (
    LlmaOptions,
    NgramOptions,
    PhraseOptions,
    RecyclingOptions,
    RestOptions,
    SamRecyclingOptions,
    SuffixOptions,
)
from foretell.catalogue.options.shared import HybridOptions
from foretell.draft import (
    CombinedRetriever,
    DatastoreRetriever,
    PhraseRetriever,
    PromptLookup,
    SuffixRetriever,
    TokenRecycling,
)
from foretell.draft.phrases import encode_documents
from foretell.engine.method import AnyMethod, Method
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.retrieval.datastore import Datastore, open_datastore
from foretell.shape import Trie


def ngram(context: BuildContext, options: NgramOptions) -> AnyMethod:
    """Prompt lookup."""
    copied = max(options.num_speculative_tokens, 1)
    lookup = PromptLookup(options.prompt_lookup_max, options.prompt_lookup_min, copied, context.references)
    return Method(lookup, trie(options), Match())


def llma(context: BuildContext, options: LlmaOptions) -> AnyMethod:
    """Prompt lookup in references only.

    Raises:
        ValueError: there are no references.
    """
    if not context.references:
        raise ValueError("llma drafts from reference documents: name at least one with --reference FILE")
    lookup = PromptLookup(
        options.prompt_lookup_max,
        options.prompt_lookup_min,
        max(options.num_speculative_tokens, 1),
        context.references,
        scope="references",
        choice="first",
    )
    return Method(lookup, trie(options), Match())


def suffix(context: BuildContext, options: SuffixOptions) -> AnyMethod:
    """The longest suffix match."""
    return Method(SuffixRetriever(context.references, options.prompt_lookup_min), trie(options), Match())


def recycling(context: BuildContext, options: RecyclingOptions) -> AnyMethod:
    """Token recycling."""
    return Method(TokenRecycling(context.vocab), trie(options), Match())


def sam_recycling(context: BuildContext, options: SamRecyclingOptions) -> AnyMethod:
    """Suffix matches and token recycling."""
    return Method(text_retrievers(context), trie(options), Match())


def hybrid(context: BuildContext, options: HybridOptions) -> AnyMethod:
    """Suffix matches and token recycling, in a trie of the most profitable size."""
    return Method(text_retrievers(context), elastic_trie(options), Match())


def rest(context: BuildContext, options: RestOptions) -> AnyMethod:
    """Retrieval from a datastore.

    Raises:
        ValueError: there is neither a datastore nor a reference.
    """
    if options.datastore is not None:
        store = open_datastore(Path(options.datastore), context.codec)
    elif context.references:
        store = Datastore.from_documents(context.references)
    else:
        raise ValueError(
            "rest drafts from a datastore: build one with `foretell datastore build` and name it under the key "
            "datastore of the speculative config, or give documents with --reference FILE"
        )
    return Method(
        DatastoreRetriever(store, options.prompt_lookup_max or store.depth, options.prompt_lookup_min),
        trie(options),
        Match(),
    )


def phrases(context: BuildContext, options: PhraseOptions) -> AnyMethod:
    """Phrase retrieval by hidden state."""
    network = require_network(context, "reads hidden states of the target")
    hidden_layer = network.config.layers + 1
    documents = (
        encode_documents(DecoderRunner(network), context.references, hidden_layer) if context.references else None
    )
    return Method(PhraseRetriever(hidden_layer, documents), trie(options), Match())


_SAM_DECODING = Paper("SAM Decoding: Speculative Decoding via Suffix Automaton", "2411.10666")
_TOKEN_RECYCLING = Paper(
    "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", "2408.08696"
)
RETRIEVAL_LABEL = "longest suffix match, and successors from earlier passes"

_entry = partial(Entry, family="retrieval", shape=Trie, acceptor=Match, reads=("references",))
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="ngram",
        description=(
            "Prompt lookup: the last tokens are searched in prompt, answer and `--reference` files, and the tokens "
            "after the latest match are drafted."
        ),
        when_to_use=(
            "for answers that repeat their prompt (extraction, editing, retrieval-augmented generation) or "
            "themselves; it gains little on free prose."
        ),
        papers=(Paper("Prompt Lookup Decoding (Saxena 2023)"),),
        drafter=PromptLookup,
        builder=ngram,
        options=NgramOptions,
        aliases=("prompt_lookup", "pld"),
    ),
    _entry(
        name="llma",
        description=(
            "Inference with reference: as `ngram`, but only `--reference` documents are searched, and the first match "
            "is used."
        ),
        when_to_use="for answers that quote documents which are known in advance and are not in the prompt.",
        papers=(Paper("Inference with Reference: Lossless Acceleration of Large Language Models", "2304.04487"),),
        drafter=PromptLookup,
        builder=llma,
        options=LlmaOptions,
        needs="references",
        drafts_with="n-gram match in references",
    ),
    _entry(
        name="suffix",
        description=(
            "Suffix automata over prompt, answer and references find the longest repeated suffix of any length, and "
            "the tokens after it are drafted."
        ),
        when_to_use="in place of `ngram`: it wastes fewer draft tokens and costs almost nothing where nothing repeats.",
        papers=(
            _SAM_DECODING,
            Paper("SuffixDecoding: A Model-Free Approach to Speeding Up Large Language Model Inference", "2411.04975"),
        ),
        drafter=SuffixRetriever,
        builder=suffix,
        options=SuffixOptions,
        aliases=("sam",),
    ),
    _entry(
        name="recycling",
        description=(
            "Token recycling: for every token the eight most probable next tokens of the target's earlier passes are "
            "kept, and the most probable nodes of the tree that they form are drafted."
        ),
        when_to_use=(
            "where a pass over some ten tokens costs about as much as one (GPUs at batch 1); alone it gains little on "
            "a small CPU."
        ),
        papers=(_TOKEN_RECYCLING,),
        drafter=TokenRecycling,
        builder=recycling,
        reads=(),
        options=RecyclingOptions,
        aliases=("token_recycling",),
    ),
    _entry(
        name="sam_recycling",
        description=(
            "`suffix` and `recycling` together: both propose continuations, and the most probable nodes form the trie."
        ),
        when_to_use="almost always: it is the best default of the methods that need no model and no training.",
        papers=(_SAM_DECODING, _TOKEN_RECYCLING),
        drafter=CombinedRetriever,
        builder=sam_recycling,
        options=SamRecyclingOptions,
        drafts_with=RETRIEVAL_LABEL,
    ),
    _entry(
        name="rest",
        description=(
            "The longest suffix of prompt and answer is looked up in a datastore, and the most frequent continuations "
            "are drafted."
        ),
        when_to_use="with a corpus that resembles the answers, above all code, where there is no draft model.",
        papers=(Paper("REST: Retrieval-Based Speculative Decoding", "2311.08252"),),
        drafter=DatastoreRetriever,
        builder=rest,
        options=RestOptions,
        needs="datastore or references",
    ),
    _entry(
        name="phrases",
        description=(
            "Phrases are retrieved by hidden state: the tokens after the most similar earlier hidden states of the "
            "target, in prompt, answer and references, are drafted."
        ),
        when_to_use=(
            "for answers from given documents (summaries, questions with sources), where only the meaning decides "
            "between several matches."
        ),
        papers=(Paper("Copy Is All You Need", "2307.06962"),),
        drafter=PhraseRetriever,
        builder=phrases,
        options=PhraseOptions,
        aliases=("copy_is_all_you_need",),
    ),
    _entry(
        name="hybrid",
        description=(
            "As `sam_recycling`, with the number of nodes that maximizes the expected tokens per second, estimated "
            "from observed acceptance rates and pass times; none where plain decoding is faster."
        ),
        when_to_use="when you do not want to choose: it nearly always gains a little and hardly ever loses.",
        papers=(_SAM_DECODING, _TOKEN_RECYCLING),
        drafter=CombinedRetriever,
        builder=hybrid,
        options=HybridOptions,
        drafts_with=RETRIEVAL_LABEL,
    ),
)
"""In the order of `foretell methods`."""
