"""Options of the methods that draft with the target over a part of its cache."""

from typing import Annotated, Literal

from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.fields import ChainConfidence, ChainLength, option

CacheBudget = Annotated[int, option("Keys per layer and head that a draft attends to.", ge=8)]
CacheRefresh = Annotated[int, option("Tokens after which keys are selected anew; until then new ones are added.", ge=1)]


SelectedKeys = Annotated[
    Literal["streaming_llm", "snapkv", "tova", "h2o", "quest", "retrieval", "upper_halves"],
    option(
        "Which keys: streaming_llm, the first 4 and the last ones; snapkv, those that the last 16 tokens "
        "attend to; tova, those of the last one; h2o, those of all tokens so far, and as many last ones; "
        "quest, pages of 16 by a bound of the last token's scores; retrieval, chunks of 8 by their mean key "
        "(TriForce). All keep the first 4 and the last 32. "
        "upper_halves: the upper 4 bits of all keys, of a cache of --kv-cache-dtype int8-halves (QuantSpec); "
        "budget and refresh are not read."
    ),
]


class SparseKVDraftOptions(MethodOptions):
    """The target over a part of its cache."""

    num_speculative_tokens: ChainLength = 4
    confidence_threshold: ChainConfidence = 0.4
    cache_policy: SelectedKeys = "retrieval"
    cache_budget: CacheBudget = 512
    cache_refresh: CacheRefresh = 256


class TriForceOptions(MethodOptions):
    """The target over a part of its cache, for which a small model drafts."""

    num_speculative_tokens: ChainLength = 6
    confidence_threshold: ChainConfidence = 0.4
    cache_policy: SelectedKeys = "retrieval"
    cache_budget: CacheBudget = 512
    cache_refresh: CacheRefresh = 256
    first_level: Annotated[
        Literal["draft_model", "ngram", "sam_recycling", "eagle3"],
        option(
            "What drafts for the target over a part of its cache: a small model, or the drafts of ngram, "
            "sam_recycling or eagle3, which need no draft model."
        ),
    ] = "draft_model"
    draft_model_tokens: Annotated[
        int | None,
        option(
            "Most tokens that the first level drafts for a pass of the middle one. Unset: 2 with a draft model, "
            "else 8.",
            ge=0,
            le=64,
        ),
    ] = None

    @property
    def unread(self) -> frozenset[str]:
        """The first level reads what its method reads."""
        kinds = {"draft_model": {"drafts", "speculators"}, "eagle3": {"speculators"}}
        return frozenset({"drafts", "speculators", "references"}) - kinds.get(self.first_level, {"references"})
