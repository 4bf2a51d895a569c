"""Sampling from logits: temperature, top-k, top-p, min-p, and the choice of a token; on the CPU kernels where they run,
with torch elsewhere, with the same result to the bit.

A token weighs 2^bits * exp((logit - largest logit) / temperature), rounded to an integer. Sums of integers do not
depend on their order, so which tokens are kept does not depend on batch, threads or device. The token is chosen by the
Gumbel-max trick with noise that depends on the request's seed, the position and the token only: a drafter that knows
the noise can draft the token that the target will choose (Daliri et al., arXiv 2408.07978).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.sampling import SamplingParams, exponential_variates
from foretell.model import kernels
from foretell.model.kernels.structures import Sampling

_MOST_BITS = 50
"""Of a weight: float64 rounds numbers below 2^51 to integers by an addition."""
_SUM_BITS = 62
_ROUND = 1.5 * 2.0**52
"""Adding it to a float64 below 2^51 rounds it to an integer, which its low bits then hold."""
_ROUND_BITS = int(np.float64(_ROUND).view(np.int64))
_LEAST_EXPONENT = -40.0
"""A token whose exponent is lower weighs nothing: 2^50 e^-40 rounds to 0."""
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
_EXPONENTIAL = (
    1.0 / 3628800,
    1.0 / 362880,
    1.0 / 40320,
    1.0 / 5040,
    1.0 / 720,
    1.0 / 120,
    1.0 / 24,
    1.0 / 6,
    0.5,
    1.0,
    1.0,
)
"""Coefficients of the Taylor series of e^r, from r^10 down: to 3e-13 for |r| <= ln(2) / 2."""
_MOST_INVERSE_TEMPERATURE = 1e300
_NUCLEUS_ROUNDING = 0.999
"""Share of the bound on the weight of tokens outside the nucleus below which tokens are not sorted."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that top-k, top-p and min-p keep, by rising id, with integer weights above 0."""

    token: Int[np.ndarray, " t"]
    weight: Int[np.ndarray, " t"]

    @property
    def probability(self) -> Float[np.ndarray, " t"]:
        """Probabilities, float64."""
        return self.weight / np.float64(self.weight.sum())


def sample(
    logits: Float[torch.Tensor, "k v"], rows: Sequence[int], sampling: Sequence[SamplingParams], keys: Sequence[int]
) -> list[int]:
    """The token of each of these rows of logits. `sampling`: temperatures above 0, and truncation; penalties and bias
    are in the logits. `keys`: of the noise, see `CounterRNG.key`.

    A row's token does not depend on the other rows.

    Raises:
        NoTokenError: a row has no logit above -infinity.
    """
    if kernels.runs_on(logits):
        structs = [sampling_struct(s, key) for s, key in zip(sampling, keys, strict=True)]
        tokens = kernels.sample(logits, rows, structs)
    else:
        weights = _weights(logits[list(rows)], [s.temperature for s in sampling])
        tokens = [_race(_keep_with_torch(w, s), key) for w, s, key in zip(weights, sampling, keys, strict=True)]
    if min(tokens, default=0) < 0:
        raise NoTokenError
    return tokens


def kept_tokens(logits: Float[torch.Tensor, " v"], sampling: SamplingParams) -> KeptTokens:
    """The tokens that may be sampled from a row of logits, at a temperature above 0.

    Raises:
        NoTokenError: no logit is above -infinity.
    """
    if kernels.runs_on(logits):
        kept = KeptTokens(*kernels.kept_tokens(logits, sampling_struct(sampling)))
    else:
        kept = _keep_with_torch(_weights(logits[None], [sampling.temperature])[0], sampling)
    if not len(kept.token):
        raise NoTokenError
    return kept


class NoTokenError(ValueError):
    """No token may follow."""

    def __init__(self) -> None:
        super().__init__(
            "no token can be sampled: the logits are NaN or -infinity for all tokens; check logit_bias, "
            "allowed_token_ids, bad_words, min_tokens and the constraint, which together may forbid every token, and "
            "the model's weights"
        )


def sampling_struct(s: SamplingParams, key: int = 0) -> Sampling:
    """The parameters as the kernels take them, with the key of a position's noise."""
    return Sampling(_inverse(s.temperature), s.top_p, s.min_p, key, min(s.top_k, (1 << 31) - 1))


def _inverse(temperature: float) -> float:
    return min(1 / temperature, _MOST_INVERSE_TEMPERATURE) if temperature > 1e-305 else _MOST_INVERSE_TEMPERATURE


def _weight_bits(vocab: int) -> int:
    return min(_MOST_BITS, _SUM_BITS - vocab.bit_length())


def _weights(logits: Float[torch.Tensor, "k v"], temperatures: Sequence[float]) -> Int[torch.Tensor, "k v"]:
    """Integer weights of all tokens of every row; those of NaN are 0, and all where no logit is above -infinity."""
    wide = logits.double()
    inverse = wide.new_tensor([_inverse(t) for t in temperatures])[:, None]
    largest = wide.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(-1, keepdim=True)
    x = torch.where(wide == largest, 0.0, (wide - largest) * inverse)
    counts = (x >= _LEAST_EXPONENT) & (largest > -torch.inf)
    x = torch.where(counts, x, _LEAST_EXPONENT)
    rounded = x * _LOG2_E + _ROUND
    n = rounded - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = torch.full_like(r, _EXPONENTIAL[0])
    for coefficient in _EXPONENTIAL[1:]:
        p = p * r + coefficient
    shift = (rounded.view(torch.int64) - _ROUND_BITS + _weight_bits(logits.shape[-1])) << 52
    scaled = (p.view(torch.int64) + shift).view(torch.float64)
    return torch.where(counts, (scaled + _ROUND).view(torch.int64) - _ROUND_BITS, 0)


def _keep_with_torch(w: Int[torch.Tensor, " v"], s: SamplingParams) -> KeptTokens:
    """The tokens of these weights that truncation keeps."""
    if 0 < s.top_k < len(w):
        w = torch.where(w >= w.topk(s.top_k).values[-1], w, 0)
    if s.top_p < 1 and (total := int(w.sum())):
        # All tokens below this weight weigh less than 1 - top_p together, so none of them is kept: only the others are
        # sorted.
        candidates = (w >= max(1, int(_NUCLEUS_ROUNDING * (1 - s.top_p) * total / len(w)))).nonzero()[:, 0]
        ordered, order = w[candidates].sort(descending=True, stable=True)
        kept = candidates[order[ordered.cumsum(-1) - ordered < ceil(s.top_p * float(total))]]
        w = torch.zeros_like(w).index_copy_(0, kept, w[kept])
    token = (w >= max(1, ceil(s.min_p * 2.0 ** _weight_bits(len(w))))).nonzero()[:, 0]
    return KeptTokens(token.to(torch.int32).cpu().numpy(), w[token].cpu().numpy())


def _race(kept: KeptTokens, key: int) -> int:
    """The Gumbel-max trick as a race of exponential clocks: the token with the least noise over weight; -1: none."""
    if not len(kept.token):
        return -1
    return int(kept.token[np.argmin(exponential_variates(key, kept.token) / kept.weight.astype(np.float64))])
