"""Sampling from logits: temperature, top-k, top-p, min-p, and the choice of a token; on the CPU kernels where they run,
with torch elsewhere, with the same result to the bit.

A token weighs 2^bits * exp((logit - largest logit) / temperature), rounded to an integer. Sums of integers do not
depend on their order, so which tokens are kept does not depend on batch, threads or device. The token is chosen by the
Gumbel-max trick with noise that depends on the request's seed, the position and the token only: a drafter that knows
the noise can draft the token that the target will choose (Daliri et al., arXiv 2408.07978).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.sampling import LN2, LOG_TERMS, SamplingParams, exponential_variates
from foretell.model import kernels
from foretell.model.kernels.structures import Sampling
from foretell.model.triton import has_triton
from foretell.utils.transfer import to_device

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
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants as signed integers."""
_NUCLEUS_ROUNDING = 0.999
"""Share of the bound on the weight of tokens outside the nucleus below which tokens are not sorted."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that top-k, top-p and min-p keep, by rising id, with integer weights above 0."""

    token: Int[np.ndarray, " t"]
    weight: Int[np.ndarray, " t"]

    @staticmethod
    def of(weights: Int[torch.Tensor, " v"]) -> "KeptTokens":
        """From the weights of all tokens."""
        held: Int[np.ndarray, " v"] = weights.cpu().numpy()
        token = np.flatnonzero(held)
        return KeptTokens(token.astype(np.int32), held[token])

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
    elif logits.device.type == "cpu":
        kept = map(KeptTokens.of, kept_weights(logits[list(rows)], sampling))
        tokens = [_race(each, key) for each, key in zip(kept, keys, strict=True)]
    else:
        tokens = draw(logits, rows, sampling, keys)[0].tolist()
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
        kept = KeptTokens.of(kept_weights(logits[None], [sampling])[0])
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
    inverse = to_device(torch.tensor([_inverse(t) for t in temperatures], dtype=torch.float64), wide.device)[:, None]
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


def kept_weights(logits: Float[torch.Tensor, "k v"], sampling: Sequence[SamplingParams]) -> Int[torch.Tensor, "k v"]:
    """Weights of all tokens of every row, 0 of those that truncation leaves out; on their device, without a wait."""
    if kernels.runs_on(logits):
        weights = torch.zeros(logits.shape, dtype=torch.int64)
        for row, x, s in zip(weights, logits, sampling, strict=True):
            token, weight = kernels.kept_tokens(x, sampling_struct(s))
            row[torch.from_numpy(token).long()] = torch.from_numpy(weight)
        return weights
    return _truncated(_weights(logits, [s.temperature for s in sampling]), sampling)


def _truncated(w: Int[torch.Tensor, "k v"], sampling: Sequence[SamplingParams]) -> Int[torch.Tensor, "k v"]:
    vocab, bits = w.shape[1], _weight_bits(w.shape[1])

    def column(numbers: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=dtype), w.device)[:, None]

    counts = [min(s.top_k or vocab, vocab) for s in sampling]
    if most := max((count for count in counts if count < vocab), default=0):
        last = w.topk(most).values.gather(1, column([min(count, most) - 1 for count in counts]))
        w = torch.where((w >= last) | (column(counts) == vocab), w, 0)
    if any(s.top_p < 1 for s in sampling):
        top_p, total = column([s.top_p for s in sampling], torch.float64), w.sum(-1, keepdim=True).double()
        part, columns = w, None
        if w.device.type == "cpu":
            # All tokens below this weight weigh less than 1 - top_p together, so none of them is kept: only the others
            # are sorted.
            bound = (_NUCLEUS_ROUNDING * (1 - top_p) * total / vocab).long().clamp(min=1)
            columns = (w >= bound).any(0).nonzero()[:, 0]
            part = w[:, columns]
        ordered, order = part.sort(dim=-1, descending=True, stable=True)
        nucleus = ordered.cumsum(-1) - ordered < (top_p * total).ceil().long()
        order = order if columns is None else columns[order]
        w = torch.where(top_p < 1, torch.zeros_like(w).scatter_(1, order, torch.where(nucleus, ordered, 0)), w)
    return torch.where(w >= column([max(1, ceil(s.min_p * 2.0**bits)) for s in sampling]), w, 0)


def draw(
    logits: Float[torch.Tensor, "k v"], rows: Sequence[int], sampling: Sequence[SamplingParams], keys: Sequence[int]
) -> tuple[Int[torch.Tensor, " r"], Int[torch.Tensor, "r v"]]:
    """The token of each of these rows, -1 where there is none, and the weights of all tokens after truncation: as
    `sample`, on the device of the logits and without a wait.
    """
    if has_triton(logits.device):
        return _draw_by_kernel(logits, rows, sampling, keys)
    place, key = (to_device(np.array(x, t), logits.device) for x, t in ((rows, np.int32), (_signed(keys), np.int64)))
    weights = kept_weights(logits[place], sampling)
    time = torch.where(weights > 0, _variates(key, logits.shape[1]) / weights.double(), torch.inf)
    return torch.where(weights.amax(-1) > 0, time.argmin(-1), -1), weights


def _draw_by_kernel(
    logits: Float[torch.Tensor, "k v"], rows: Sequence[int], sampling: Sequence[SamplingParams], keys: Sequence[int]
) -> tuple[Int[torch.Tensor, " r"], Int[torch.Tensor, "r v"]]:
    from foretell.model.triton import sampling as kernel

    vocab = logits.shape[1]
    bits = _weight_bits(vocab)
    real = np.array([[_inverse(s.temperature), s.top_p] for s in sampling]).view(np.int64)
    whole = [[max(1, ceil(s.min_p * 2.0**bits)), min(s.top_k or vocab, vocab)] for s in sampling]
    fields = np.column_stack([np.array(rows), _signed(keys), real, np.array(whole)])
    truncates = bool((fields[:, 5] < vocab).any()) or any(s.top_p < 1 for s in sampling)
    launches, tokens, weights = kernel.draw(logits, to_device(fields, logits.device), bits, truncates)
    for launch in launches:
        launch.run()
    return tokens, weights


def _signed(keys: Sequence[int]) -> Int[np.ndarray, " r"]:
    """Keys of 64 bits as signed integers, which torch has."""
    signed: Int[np.ndarray, " r"] = np.array(keys, np.uint64).view(np.int64)
    return signed


def noise_bits(key: Int[torch.Tensor, " r"], token: Int[torch.Tensor, " w"]) -> Int[torch.Tensor, "r w"]:
    """53 random bits per key and token; see `core.sampling.exponential_variates`."""
    x = key[:, None] + _GOLDEN * (token + 1)
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return _shifted(x ^ _shifted(x, 31), 11)


def _shifted(x: Int[torch.Tensor, "r w"], bits: int) -> Int[torch.Tensor, "r w"]:
    """`x >> bits` of unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _variates(key: Int[torch.Tensor, " r"], vocab: int) -> Float[torch.Tensor, "r v"]:
    """`core.sampling.exponential_variates` of all tokens on a device, to the bit."""
    bits = noise_bits(key, torch.arange(vocab, device=key.device))
    m, exponent = torch.frexp(bits.double() * 2.0**-53 + 2.0**-54)
    small = m < sqrt(0.5)
    m, exponent = torch.where(small, m * 2, m), exponent - small.int()
    s = (m - 1) / (m + 1)
    z, series = s * s, torch.zeros_like(m)
    for i in reversed(range(LOG_TERMS)):
        series = series * z + 1.0 / (2 * i + 1)
    return -(exponent.double() * LN2 + 2 * s * series)


def _race(kept: KeptTokens, key: int) -> int:
    """The Gumbel-max trick as a race of exponential clocks: the token with the least noise over weight; -1: none."""
    if not len(kept.token):
        return -1
    return int(kept.token[np.argmin(exponential_variates(key, kept.token) / kept.weight.astype(np.float64))])
