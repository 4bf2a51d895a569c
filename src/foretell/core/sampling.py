"""Sampling parameters, how they turn logits into a distribution, and random numbers.

Order of the steps, as in Hugging Face `generate`: repetition penalty, presence and frequency penalties, bias,
temperature, top-k, top-p, min-p. Penalties count the tokens of the sequence and the ancestors of the tree node, so that
every parameter is exact at every drafted token. Temperature 0 is a one-hot distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, isfinite
from numbers import Real

import numpy as np
import torch
from jaxtyping import Float, Int

_MASK = (1 << 64) - 1
_NUCLEUS_ROUNDING = 0.999
"""Share of the bound on the probability of tokens outside the nucleus below which tokens are not sorted."""
"""64 bits."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; names and meanings as in vLLM and Hugging Face.

    Raises:
        ValueError: a value of a wrong type or outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Number of most probable tokens to keep; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the answer (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted once for every occurrence in the answer (OpenAI)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            if not is_integer(value := getattr(self, name)):
                raise ValueError(f"{name} must be a whole number, found {value!r}")
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else ((None, None),)
        if not all(is_integer(token) and isinstance(value, Real) for token, value in bias):
            raise ValueError(f"logit_bias must give a number for every token id, found {self.logit_bias!r}")
        _check_range("temperature", self.temperature, 0)
        _check_range("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0, 1, above=True)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0, above=True)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)

    @property
    def depends_on_history(self) -> bool:
        """Whether penalties make the distribution depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def uses_raw_logits(self) -> bool:
        """Whether the logits are used without penalties or bias; temperature and truncation may still apply."""
        return not self.depends_on_history and not self.logit_bias


def _check_range(name: str, value: float, low: float, high: float = inf, above: bool = False) -> None:
    if not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, found {value!r}")
    if not (isfinite(value) and low <= value <= high) or (above and value == low):
        bound = f"{'above' if above else 'at least'} {low:g}" + ("" if high == inf else f" and at most {high:g}")
        raise ValueError(f"{name} must be {bound}, found {value}")


def is_integer(value: object) -> bool:
    """Whether this is an integer; a bool is not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Stream(IntEnum):
    """Independent uses of random numbers at one position: the first stream number of each.

    The uses at tree nodes add the depth of the node and, where one node takes several numbers, a multiple of
    `DEPTHS_PER_STREAM`.
    """

    TARGET = 0
    """The target's own token."""
    ACCEPT = 1 << 10
    """Acceptance tests of drafted tokens, one number each."""
    RESIDUAL = 1 << 21
    """The token sampled after a rejection."""
    DRAFT = 1 << 22
    """Drafted tokens, one number each."""
    JACOBI = 1 << 30
    """Initial tokens of Jacobi decoding."""
    LOOKAHEAD = (1 << 30) + 1
    """Initial tokens in the window of lookahead decoding."""


DEPTHS_PER_STREAM = 1 << 10
"""Depths that get a stream of their own, so that a position drafted again in a later step gets another number."""


class CounterRNG:
    """A counter-based random number generator: a number depends on (seed, position, stream) only, so an answer never
    depends on the other requests of the batch.

    SplitMix64's finalizer over the mixed counter; positions can be asked for in any order.
    """

    def __init__(self, seed: int) -> None:
        self._key = _splitmix64((seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK)

    def uniform(self, position: int, stream: int = Stream.TARGET) -> float:
        """A number in [0, 1) for the token at `position` of the sequence; `stream`: see `AnswerWriter`, below 2^32."""
        return (_splitmix64(self._key ^ _splitmix64((position << 32) + stream)) >> 11) / 2.0**53


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def apply_penalties(
    logits: Float[torch.Tensor, " v"], history: Int[np.ndarray, " t"], prompt_length: int, sampling: SamplingParams
) -> Float[torch.Tensor, " v"]:
    """Logits after repetition, presence and frequency penalties and bias.

    `history`: the tokens so far, of which the first `prompt_length` are the prompt.
    """
    out = logits.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(history)).to(out.device)
        value = out[seen]
        out[seen] = torch.where(value > 0, value / sampling.repetition_penalty, value * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        tokens, counts = np.unique(history[prompt_length:], return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * torch.from_numpy(counts).to(out)
        out[torch.from_numpy(tokens).to(out.device)] -= penalty
    for token, value in sampling.logit_bias.items():
        out[token] += value
    return out


def truncate_distribution(p: Float[torch.Tensor, " v"], sampling: SamplingParams) -> Float[torch.Tensor, " v"]:
    """The distribution truncated by top-k, top-p (nucleus sampling, arXiv 1904.09751) and min-p (arXiv 2407.01082), in
    this order, and renormalised after each.
    """
    if sampling.top_k and sampling.top_k < p.shape[-1]:
        p = torch.where(p >= p.topk(sampling.top_k).values[-1], p, 0)
        p = p / p.sum()
    if sampling.top_p < 1:
        # All tokens below this probability weigh less than 1 - top_p together, so none of them is kept: only the others
        # are sorted. The factor leaves room for rounding.
        candidates = (p >= _NUCLEUS_ROUNDING * (1 - sampling.top_p) / p.shape[-1]).nonzero()[:, 0]
        ordered, order = p[candidates].sort(descending=True, stable=True)
        kept = candidates[order[ordered.cumsum(-1) - ordered < sampling.top_p]]
        p = torch.zeros_like(p).index_copy_(0, kept, p[kept])
        p = p / p.sum()
    if sampling.min_p > 0:
        p = torch.where(p >= sampling.min_p * p.max(), p, 0)
        p = p / p.sum()
    return p


def sample_from(p: Float[torch.Tensor, " v"], uniform: float) -> int:
    """The token at quantile `uniform` of a distribution, which need not be normalised; never one of probability 0."""
    cumulative = p.cumsum(-1)
    total = cumulative[-1]
    index = int(torch.searchsorted(cumulative, total * uniform, right=True))
    return index if index < p.shape[-1] else int(p.nonzero()[-1])
