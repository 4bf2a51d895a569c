"""Methods that draft with the target over a part of its cache; all of it verifies."""

from foretell.accept import Match
from foretell.catalogue.build_context import BuildContext, require_network
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.sparse_cache import SparseKVDraftOptions, TriForceOptions
from foretell.catalogue.speculators import mix_draft_models, require_draft_models
from foretell.draft import CascadeDrafter, DraftModel, SparseCacheDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.model.cache_policy import CachePolicy, Retrieval, cache_policy
from foretell.model.compact_runner import SparseCacheRunner
from foretell.model.halves_runner import UpperHalvesRunner
from foretell.shape import Chain


def sparse_kv_draft(context: BuildContext, options: SparseKVDraftOptions) -> AnyMethod:
    """MagicDec: the target over selected keys drafts a chain."""
    runner: SparseCacheRunner | UpperHalvesRunner
    if options.cache_policy == "upper_halves":
        runner = UpperHalvesRunner(require_network(context, "drafts with a part of the target's cache"))
    else:
        runner = _runner(context, cache_policy(options.cache_policy, options.cache_budget), options.cache_refresh)
    shape = Chain(options.num_speculative_tokens, draw=False, confidence=options.confidence_threshold)
    return Method(SparseCacheDrafter(DraftModel(runner)), shape, Match())


def triforce(context: BuildContext, options: TriForceOptions) -> AnyMethod:
    """TriForce: a small model drafts for the target over retrieved keys, which drafts for the whole target."""
    runner = _runner(context, Retrieval(options.cache_budget), options.cache_refresh)
    small = mix_draft_models(require_draft_models(context))
    proposer = Method(small, Chain(options.draft_model_tokens, draw=False), Match())
    shape = Chain(options.num_speculative_tokens, draw=False, confidence=options.confidence_threshold)
    return Method(SparseCacheDrafter(CascadeDrafter(runner, proposer)), shape, Match())


def _runner(context: BuildContext, policy: CachePolicy, refresh: int) -> SparseCacheRunner:
    return SparseCacheRunner(require_network(context, "drafts with a part of the target's cache"), policy, refresh)


ENTRIES = (
    Entry(
        name="sparse_kv_draft",
        family="self-drafting",
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
        drafter=SparseCacheDrafter,
        shape=Chain,
        acceptor=Match,
        builder=sparse_kv_draft,
        options=SparseKVDraftOptions,
        aliases=("magicdec",),
    ),
    Entry(
        name="triforce",
        family="self-drafting",
        description=(
            "A small model drafts for the target over retrieved chunks of its cache, which drafts for the whole target."
        ),
        when_to_use="as `sparse_kv_draft`, where a draft model exists and the weights of a pass cost much, too.",
        papers=(
            Paper(
                "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
                "2404.11912",
            ),
        ),
        drafter=SparseCacheDrafter,
        shape=Chain,
        acceptor=Match,
        builder=triforce,
        options=TriForceOptions,
        needs="draft model",
        drafts_with="target over retrieved keys, itself drafted for by a draft model",
    ),
)
