"""Methods that draft with the target over a part of its cache; all of it verifies."""

from functools import partial

from foretell.accept import Match
from foretell.catalogue.build_context import BuildContext, require_network
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.feature_level import eagle3
from foretell.catalogue.options.feature_level import EagleTreeOptions
from foretell.catalogue.options.retrieval import NgramOptions, SamRecyclingOptions
from foretell.catalogue.options.sparse_cache import SparseKVDraftOptions, TriForceOptions
from foretell.catalogue.retrieval import ngram, sam_recycling
from foretell.catalogue.speculators import one_draft_model, require_draft_models
from foretell.draft import CascadeDrafter, DraftModel, SparseCacheDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.model.cache.policy import cache_policy
from foretell.model.run.compact_runner import SparseCacheRunner
from foretell.model.run.halves_runner import UpperHalvesRunner
from foretell.shape import Chain

_DRAFT_MODEL_TOKENS, _FREE_TOKENS = 2, 8
"""Tokens that a small model, or a first level that costs nearly nothing, drafts for a pass of the middle one."""


def sparse_kv_draft(context: BuildContext, options: SparseKVDraftOptions) -> AnyMethod:
    """MagicDec: the target over selected keys drafts a chain."""
    shape = Chain(options.num_speculative_tokens, draw=False, confidence=options.confidence_threshold)
    return Method(SparseCacheDrafter(DraftModel(_runner(context, options))), shape, Match())


def triforce(context: BuildContext, options: TriForceOptions) -> AnyMethod:
    """TriForce: what is cheap drafts for the target over retrieved keys, which drafts for the whole target."""
    drafter = CascadeDrafter(_runner(context, options), _first_level(context, options))
    shape = Chain(options.num_speculative_tokens, draw=False, confidence=options.confidence_threshold)
    return Method(SparseCacheDrafter(drafter), shape, Match())


def _first_level(context: BuildContext, options: TriForceOptions) -> AnyMethod:
    count = options.draft_model_tokens
    if options.first_level == "draft_model":
        small = one_draft_model(require_draft_models(context))
        return Method(small, Chain(_DRAFT_MODEL_TOKENS if count is None else count, draw=False), Match())
    count = _FREE_TOKENS if count is None else count
    if options.first_level == "eagle3":
        return eagle3(context, EagleTreeOptions(num_draft_tokens=max(1, count)))
    if options.first_level == "ngram":
        return ngram(context, NgramOptions(num_speculative_tokens=count))
    return sam_recycling(context, SamRecyclingOptions(num_speculative_tokens=count))


def _runner(
    context: BuildContext, options: SparseKVDraftOptions | TriForceOptions
) -> SparseCacheRunner | UpperHalvesRunner:
    network = require_network(context, "drafts with a part of the target's cache")
    if options.cache_policy == "upper_halves":
        return UpperHalvesRunner(network)
    return SparseCacheRunner(network, cache_policy(options.cache_policy, options.cache_budget), options.cache_refresh)


_entry = partial(Entry, family="self-drafting", drafter=SparseCacheDrafter, shape=Chain, acceptor=Match)
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="sparse_kv_draft",
        description="The target drafts for itself, attending to selected keys and values of its cache.",
        when_to_use=(
            "with texts so long that a pass reads more keys and values than weights, on hardware where a pass over "
            "several tokens costs about as much as one over a single token; elsewhere it gains little."
        ),
        papers=(
            Paper(
                "MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative "
                "Decoding",
                "2408.11049",
            ),
            Paper(
                "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache",
                "2502.10424",
            ),
        ),
        builder=sparse_kv_draft,
        options=SparseKVDraftOptions,
        aliases=("magicdec",),
    ),
    _entry(
        name="triforce",
        description=(
            "A small model, or copied text, drafts for the target over a part of its cache, which drafts for the whole "
            "target."
        ),
        when_to_use=(
            "as `sparse_kv_draft`, where the weights of a pass cost much, too, and a draft model exists or text can be "
            "copied."
        ),
        papers=(
            Paper(
                "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
                "2404.11912",
            ),
        ),
        builder=triforce,
        reads=("drafts", "speculators", "references"),
        options=TriForceOptions,
        needs="draft model, or another first_level",
        drafts_with="target over a part of its cache, itself drafted for by a draft model or text",
    ),
)
