"""Which cached keys and values of a text matter most: the selection rules of KV cache compression."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.model.cache.pages import LEAST_BUDGET, PAGE, page_bounds
from foretell.utils.names import unknown

SINKS = 4
"""First tokens of a text, which all policies keep: the softmax needs them (StreamingLLM, arXiv 2309.17453)."""
_RECENT = 32
"""Last tokens that all policies keep."""
_CHUNK = 8
"""Keys of a chunk (TriForce)."""
_POOL = 7
"""Width of the pooling of votes (SnapKV)."""


class Observed(NamedTuple):
    """What a rule reads of a layer."""

    queries: Float[torch.Tensor, "w g q e"]
    """Of the last `observed` tokens, `q` per key-value head, times the scale of the scores."""
    keys: Float[torch.Tensor, "g n e"]
    sums: Float[torch.Tensor, "g n"]
    """What the keys have received of the softmax; zeros for rules that ignore it."""


@dataclass(frozen=True)
class CachePolicy(ABC):
    """A rule that selects `budget` cached keys per layer and key-value head: always the first `SINKS` and the last
    ones, and of the others those with the highest scores.

    Raises:
        ValueError: the budget is below 8.
    """

    name: ClassVar[str]
    observed: ClassVar[int] = 0
    """Number of last tokens whose queries it reads."""
    accumulates: ClassVar[bool] = False
    """Whether it reads what every key has received of the softmax from all tokens."""
    evicts: ClassVar[bool] = False
    """Whether its paper evicts the other keys, not only leaves them unread."""
    selects: ClassVar[bool] = False
    """Whether in its paper every token selects for itself what it reads (`ModelConfig.page_budget`)."""

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 2 * SINKS:
            raise ValueError(f"a cache policy keeps at least {2 * SINKS} keys, found a budget of {self.budget}")

    def __str__(self) -> str:
        return f"{self.name}@{self.budget}"

    @property
    def recent(self) -> int:
        """Last keys that are always kept."""
        return min(_RECENT, self.budget // 4)

    def tokens_read(self, context: int) -> int:
        """Tokens of a text of `context` tokens whose keys and values take as many bytes as a token reads."""
        return min(context, self.budget)

    @abstractmethod
    def scores(self, layer: Observed) -> Float[torch.Tensor, "g n"]:
        """Scores of the keys of a layer."""

    def select(
        self,
        queries: Float[torch.Tensor, "w g q e"],
        keys: Float[torch.Tensor, "g n e"],
        sums: Float[torch.Tensor, "g n"] | None = None,
    ) -> Int[torch.Tensor, "g b"]:
        """The keys that are kept, ascending: `budget` of them, or all; see `Observed`."""
        heads, count = keys.shape[:2]
        if count <= self.budget:
            return torch.arange(count, device=keys.device).expand(heads, -1)
        sums = torch.zeros(heads, count, device=keys.device) if sums is None else sums
        scores = self.scores(Observed(queries, keys, sums)).clone()
        scores[:, :SINKS] = scores[:, count - self.recent :] = float("inf")
        # Of equal scores the earliest keys are taken, so that the selection is the same everywhere.
        best = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, : self.budget]
        return best.sort(-1).values


class StreamingLLM(CachePolicy):
    """The first tokens and the last ones (arXiv 2309.17453)."""

    name, evicts = "streaming_llm", True

    def scores(self, layer: Observed) -> Float[torch.Tensor, "g n"]:
        """Later keys have higher scores."""
        return torch.arange(layer.keys.shape[1], device=layer.keys.device, dtype=torch.float32).expand_as(layer.sums)


class SnapKV(CachePolicy):
    """The keys that the last 16 tokens attend to most, with their neighbours (arXiv 2404.14469): a key's score is the
    sum of its softmax weights, maximum-pooled over 7 keys.
    """

    name, observed, evicts = "snapkv", 16, True

    def scores(self, layer: Observed) -> Float[torch.Tensor, "g n"]:
        """Pooled votes."""
        votes = attention_weights(layer.queries, layer.keys).sum((0, 2))
        return F.max_pool1d(votes, _POOL, 1, _POOL // 2)


class TOVA(CachePolicy):
    """The keys with the highest softmax weights of the last token, mean over a layer's heads (arXiv 2401.06104)."""

    name, observed, evicts = "tova", 1, True

    def scores(self, layer: Observed) -> Float[torch.Tensor, "g n"]:
        """The same scores for all heads."""
        weights: torch.Tensor = attention_weights(layer.queries, layer.keys).mean((0, 1, 2))
        return weights.expand(len(layer.keys), -1)


class H2O(CachePolicy):
    """Heavy hitters: half of the budget for the keys that received most of the softmax from all tokens so far, half
    for the last ones (arXiv 2306.14048).
    """

    name, accumulates, evicts = "h2o", True, True

    @property
    def recent(self) -> int:
        """Half of the budget."""
        return self.budget // 2

    def scores(self, layer: Observed) -> Float[torch.Tensor, "g n"]:
        """The sums."""
        return layer.sums


class Quest(CachePolicy):
    """Pages of 16 keys with the highest upper bounds of the last token's scores (arXiv 2406.10774): the bound is the
    sum over dimensions of the larger product of the query with the page's minimum and maximum.
    """

    name, observed, selects = "quest", 1, True

    def tokens_read(self, context: int) -> int:
        """The budget, and the bounds of all pages: two numbers for 16 keys and values each."""
        return context if context <= self.budget else min(context, self.budget + context // PAGE)

    def scores(self, layer: Observed) -> Float[torch.Tensor, "g n"]:
        """Of every key the bound of its page, the largest over the queries of the head."""
        bounds = page_bounds(layer.queries[-1], _split(layer.keys, PAGE).flatten(1, 2)).amax(1)
        return bounds.repeat_interleave(PAGE, -1)[:, : layer.keys.shape[1]]


class Retrieval(CachePolicy):
    """Chunks of 8 keys whose mean has the highest score with the last token's query: the retrieval cache of TriForce
    (arXiv 2404.11912).
    """

    name, observed = "retrieval", 1

    def scores(self, layer: Observed) -> Float[torch.Tensor, "g n"]:
        """Of every key the score of its chunk, mean over the queries of the head."""
        means = _split(layer.keys, _CHUNK).mean(2)
        scores = (layer.queries[-1] @ means.transpose(1, 2)).mean(1)
        return scores.repeat_interleave(_CHUNK, -1)[:, : layer.keys.shape[1]]


def attention_weights(
    queries: Float[torch.Tensor, "w g q e"], keys: Float[torch.Tensor, "g n e"]
) -> Float[torch.Tensor, "w g q n"]:
    """Softmax weights of the keys, all of which every query sees."""
    by_head = queries.transpose(0, 1).flatten(1, 2)
    weights: torch.Tensor = (by_head @ keys.transpose(1, 2)).softmax(-1)
    return weights.unflatten(1, (len(queries), -1)).transpose(0, 1)  # type: ignore[no-untyped-call]


def _split(keys: Float[torch.Tensor, "g n e"], size: int) -> Float[torch.Tensor, "g p s e"]:
    """Groups of consecutive keys; the last one is filled up with its last key."""
    missing = -keys.shape[1] % size
    return torch.cat((keys, keys[:, -1:].expand(-1, missing, -1)), 1).view(len(keys), -1, size, keys.shape[2])


POLICIES: dict[str, type[CachePolicy]] = {p.name: p for p in (StreamingLLM, SnapKV, TOVA, H2O, Quest, Retrieval)}


def cache_policy(name: str, budget: int) -> CachePolicy:
    """The policy of this name.

    Raises:
        ValueError: there is none, or the budget is too small.
    """
    if name not in POLICIES:
        raise unknown("cache policy", name, POLICIES)
    return POLICIES[name](budget)


def target_policies() -> list[type[CachePolicy]]:
    """The policies that a target can have: those that evict keys, and those with which every token selects."""
    return [policy for policy in POLICIES.values() if policy.evicts or policy.selects]


def parse_target_policy(text: str) -> CachePolicy:
    """A policy of a target, from `NAME@BUDGET`.

    Raises:
        ValueError: there is none of this name, or the budget is no number or too small.
    """
    name, _, budget = text.partition("@")
    known = [policy.name for policy in target_policies()]
    if name not in known:
        raise unknown("KV cache policy", name, known)
    if not budget.isdecimal():
        raise ValueError(f"a KV cache policy needs a budget of keys, as in {name}@1024; found {text!r}")
    target_policy = POLICIES[name](int(budget))
    if target_policy.selects and target_policy.budget < LEAST_BUDGET:
        raise ValueError(f"{name} reads at least {LEAST_BUDGET} keys, the last ones among them; found {text!r}")
    return target_policy
