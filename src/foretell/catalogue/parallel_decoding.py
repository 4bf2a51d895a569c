"""Methods in which the target itself predicts several positions in one pass: Jacobi, lookahead decoding, PaSS."""

from functools import partial

from foretell.accept import Match, Rejection
from foretell.catalogue.build_context import BuildContext, chain, rejection
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.parallel_decoding import (
    GaussSeidelJacobiOptions,
    JacobiOptions,
    LookAheadEmbeddingsOptions,
    LookaheadOptions,
)
from foretell.catalogue.speculators import packed_speculator
from foretell.draft import JacobiDrafter, LookaheadDrafter, ParallelDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.shape import Chain, Trie
from foretell.speculator.network.look_ahead import LookAheadEmbeddings


def lookahead(context: BuildContext, options: LookaheadOptions) -> AnyMethod:
    """Lookahead decoding."""
    width, ngram = options.max_window_size, options.max_ngram_size
    candidates = width if options.max_verification_set_size is None else options.max_verification_set_size
    nodes = candidates * (ngram - 1) if options.num_speculative_tokens is None else options.num_speculative_tokens
    drafter = LookaheadDrafter(width, ngram, candidates, options.pool_from_prompt, eos=context.eos)
    return Method(drafter, Trie(nodes, options.confidence_threshold), Match())


def jacobi(context: BuildContext, options: JacobiOptions) -> AnyMethod:
    """Jacobi decoding with a sliding window."""
    width = options.max_window_size
    return Method(JacobiDrafter(width), Trie(width, options.confidence_threshold), Match())


def gauss_seidel_jacobi(context: BuildContext, options: GaussSeidelJacobiOptions) -> AnyMethod:
    """Jacobi decoding with one block after another."""
    width = options.max_window_size
    return Method(JacobiDrafter(width, slide=False), Trie(width, options.confidence_threshold), Match())


def look_ahead_embeddings(context: BuildContext, options: LookAheadEmbeddingsOptions) -> AnyMethod:
    """PaSS: look-ahead embeddings."""
    return parallel_method(packed_speculator(context, LookAheadEmbeddings), options)


def parallel_method(network: LookAheadEmbeddings, options: LookAheadEmbeddingsOptions) -> AnyMethod:
    """A chain predicted at look-ahead embeddings: sampled with rejection sampling, or greedy with matching."""
    if options.num_speculative_tokens is None:
        options = options.model_copy(update={"num_speculative_tokens": network.ahead})
    accept = rejection(options, options.draft_sample_method)
    return Method(ParallelDrafter(network, options.look_ahead_groups), chain(options), accept)


_entry = partial(Entry, family="parallel decoding", shape=Trie, acceptor=Match)
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="lookahead",
        description=(
            "Jacobi iteration on a window of future positions runs in the same pass as verification; the n-grams that "
            "it produces are pooled, and those that begin with the last token are verified."
        ),
        when_to_use=(
            "on hardware with spare compute at batch 1, for text that repeats its own phrases (code, lists); never on "
            "small CPUs or at large batches."
        ),
        papers=(Paper("Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", "2402.02057"),),
        drafter=LookaheadDrafter,
        builder=lookahead,
        options=LookaheadOptions,
    ),
    _entry(
        name="jacobi",
        description=(
            "Jacobi decoding: every pass reads a sliding window of draft tokens, and the target's predictions there "
            "are the drafts of the next pass."
        ),
        when_to_use=(
            "with models in which a token depends weakly on its neighbours (images, audio) or that were trained to "
            "converge; it gains little with other language models."
        ),
        papers=(
            Paper("Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving", "2002.03629"),
            Paper("Predictive Sampling with Forecasting Autoregressive Models", "2002.09928"),
        ),
        drafter=JacobiDrafter,
        builder=jacobi,
        options=JacobiOptions,
    ),
    _entry(
        name="gauss_seidel_jacobi",
        description="Jacobi decoding in blocks, one after another, instead of a sliding window.",
        when_to_use="as `jacobi`, where wide passes are expensive; it never takes fewer passes than `jacobi`.",
        papers=(Paper("Accelerating Transformer Inference for Translation via Parallel Decoding", "2305.10427"),),
        drafter=JacobiDrafter,
        builder=gauss_seidel_jacobi,
        options=GaussSeidelJacobiOptions,
        drafts_with="its own previous iterate, block by block",
        aliases=("gs_jacobi",),
    ),
    _entry(
        name="pass",
        description=(
            "Parallel speculative sampling: the target reads learned embeddings at the next positions, and its hidden "
            "states there give the drafts."
        ),
        when_to_use="where a pass over ten tokens costs about as much as one and there is no memory for a drafter.",
        papers=(Paper("PaSS: Parallel Speculative Sampling", "2311.13581"),),
        drafter=ParallelDrafter,
        shape=Chain,
        acceptor=Rejection,
        builder=look_ahead_embeddings,
        reads=("speculators",),
        options=LookAheadEmbeddingsOptions,
        speculator="pass",
        aliases=("look_ahead_embeddings",),
    ),
)
