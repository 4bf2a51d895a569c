"""From a model's logits to the distributions that acceptors see: the one room for temperature, truncation, penalties
and bias.

Order, as in Hugging Face `generate`: repetition penalty, presence and frequency penalties, bias, temperature, top-k,
top-p, min-p. A node's history is its text plus its ancestors in the tree, so every parameter is exact at every draft.
Temperature 0 is a one-hot distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from numbers import Real

import numpy as np
import torch
from jaxtyping import Float, Int

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into a distribution; names and meanings as in vLLM and Hugging Face.

    Raises:
        ValueError: a value of a wrong type or outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most probable tokens; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer (Keskar et al., arXiv
    1909.05858).
    """
    presence_penalty: float = 0.0
    """Subtracted once for every token the answer holds (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted for every occurrence in the answer (OpenAI)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            if not is_integer(value := getattr(self, name)):
                raise ValueError(f"{name} must be a whole number, found {value!r}")
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else ((None, None),)
        if not all(is_integer(token) and isinstance(value, Real) for token, value in bias):
            raise ValueError(f"bias must give a number for every token id, found {self.logit_bias!r}")
        _check_range("temperature", self.temperature, 0)
        _check_range("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0, 1, above=True)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0, above=True)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)

    @property
    def depends_on_history(self) -> bool:
        """Whether the distribution depends on which tokens came before, beyond the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def uses_raw_logits(self) -> bool:
        """Whether logits are used as they are, up to temperature."""
        return not self.depends_on_history and not self.logit_bias


def _check_range(name: str, value: float, low: float, high: float = inf, above: bool = False) -> None:
    if not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, found {value!r}")
    if not (isfinite(value) and low <= value <= high) or (above and value == low):
        bound = f"{'above' if above else 'at least'} {low:g}" + ("" if high == inf else f" and at most {high:g}")
        raise ValueError(f"{name} must be {bound}, found {value}")


def is_integer(value: object) -> bool:
    """Whether this is a whole number, as token ids and counts are."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class CounterRNG:
    """Uniform numbers that depend only on (seed, position, stream): an answer never depends on who shares the batch.

    A counter-based generator (SplitMix64 finalizer over the mixed counter), so any position can be asked for in any
    order.
    """

    def __init__(self, seed: int) -> None:
        self._key = _splitmix64((seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK)

    def uniform(self, position: int, stream: int = 0) -> float:
        """A number in [0, 1) for the token at `position` of the text; `stream` (below 2^32) separates independent uses
        (0: the target's own draw).
        """
        return (_splitmix64(self._key ^ _splitmix64((position << 32) + stream)) >> 11) / 2.0**53


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def apply_penalties(
    logits: Float[torch.Tensor, " v"], history: Int[np.ndarray, " t"], prompt_length: int, sampling: SamplingParams
) -> Float[torch.Tensor, " v"]:
    """Apply repetition, presence and frequency penalties and bias; the first `prompt_length` tokens of `history` are
    the prompt.
    """
    out = logits.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(history)).to(out.device)
        value = out[seen]
        out[seen] = torch.where(value > 0, value / sampling.repetition_penalty, value * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        tokens, counts = np.unique(history[prompt_length:], return_counts=True)
        cost = sampling.presence_penalty + sampling.frequency_penalty * torch.from_numpy(counts).to(out)
        out[torch.from_numpy(tokens).to(out.device)] -= cost
    for token, value in sampling.logit_bias.items():
        out[token] += value
    return out


def truncate_distribution(p: Float[torch.Tensor, " v"], sampling: SamplingParams) -> Float[torch.Tensor, " v"]:
    """Keep top-k, then top-p (nucleus, Holtzman et al., arXiv 1904.09751), then min-p (arXiv 2407.01082) of a
    distribution, renormalised.
    """
    if sampling.top_k and sampling.top_k < p.shape[-1]:
        p = torch.where(p >= p.topk(sampling.top_k).values[-1], p, 0)
        p = p / p.sum()
    if sampling.top_p < 1:
        ordered, index = p.sort(descending=True, stable=True)
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        p = p.index_fill(-1, index[dropped], 0)
        p = p / p.sum()
    if sampling.min_p > 0:
        p = torch.where(p >= sampling.min_p * p.max(), p, 0)
        p = p / p.sum()
    return p


def sample_from(p: Float[torch.Tensor, " v"], uniform: float) -> int:
    """The token at quantile `uniform` of an (unnormalised) distribution; never one of probability 0."""
    cumulative = p.cumsum(-1)
    total = cumulative[-1]
    index = int(torch.searchsorted(cumulative, total * uniform, right=True))
    return index if index < p.shape[-1] else int(p.nonzero()[-1])
