"""Sampling parameters, how they turn logits into a distribution, and random numbers.

Order of the steps, as in Hugging Face `generate`: repetition penalty, presence and frequency penalties, bias, tokens
that are not allowed (`core.token_rules`), temperature, top-k, top-p, min-p. Penalties count the tokens of the sequence
and the ancestors of the tree node, so that every parameter is exact at every drafted token. Temperature 0 is a one-hot
distribution. The target's token is chosen by the Gumbel-max trick, with a number per position and token; see
`distributions.sampler`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from math import sqrt
from numbers import Real

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.parameters import PARAMETERS, check, is_integer
from foretell.utils.transfer import to_device

_MASK = (1 << 64) - 1
"""64 bits."""
_GOLDEN = 0x9E3779B97F4A7C15
LN2 = 0.6931471805599453
LOG_TERMS = 12
"""Terms of the series of the inverse hyperbolic tangent in `exponential_variates`."""
_LARGEST = 3e38
"""Bound of a penalised logit: what float32 holds."""
_SAMPLING = tuple(name for name, parameter in PARAMETERS.items() if parameter.is_sampling)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; names and meanings as in vLLM and Hugging Face.

    Raises:
        ValueError: a value of a wrong type or outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Number of most probable tokens to keep; 0 or -1: all, and 0 is what it holds then."""
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
    min_tokens: int = 0
    """Least number of new tokens: no token that ends the answer before."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that do not occur in the answer."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens of the answer; None: all."""

    def __post_init__(self) -> None:
        check(vars(self), _SAMPLING)
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else ((None, None),)
        if not all(is_integer(token) and isinstance(value, Real) for token, value in bias):
            raise ValueError(f"logit_bias must give a number for every token id, found {self.logit_bias!r}")
        if not isinstance(self.bad_words, Sequence):
            raise ValueError(f"bad_words must hold sequences of token ids, found {self.bad_words!r:.80}")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "bad_words", tuple(_token_ids("each of bad_words", word) for word in self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))

    @cached_property
    def bias_tensors(self) -> tuple[Int[torch.Tensor, " n"], Float[torch.Tensor, " n"]]:
        """The tokens of `logit_bias`, and their biases."""
        tokens = torch.tensor([int(t) for t in self.logit_bias], dtype=torch.int64)
        return tokens, torch.tensor([float(b) for b in self.logit_bias.values()], dtype=torch.float64)

    @property
    def depends_on_history(self) -> bool:
        """Whether penalties make the distribution depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def uses_raw_logits(self) -> bool:
        """Whether the logits are used without penalties or bias; temperature and truncation may still apply."""
        return not self.depends_on_history and not self.logit_bias

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may leave tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _token_ids(name: str, tokens: object) -> tuple[int, ...]:
    if not isinstance(tokens, Sequence) or not all(is_integer(t) for t in tokens) or not tokens:
        raise ValueError(f"{name} must be a sequence of token ids that is not empty, found {tokens!r:.80}")
    return tuple(int(t) for t in tokens)


class Stream(IntEnum):
    """Independent uses of random numbers at one position: the first stream number of each.

    The uses at tree nodes add the depth of the node and, where one node takes several numbers, a multiple of
    `DEPTHS_PER_STREAM`.
    """

    TARGET = 0
    """The noise of the target's own token: a number per token of the vocabulary; see `CounterRNG.key`."""
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
    CHOICE = (1 << 30) + 2
    """Seeds of the second and further answers to one prompt."""
    PLAN = (1 << 30) + 3
    """Seeds of the requests of a plan."""


DEPTHS_PER_STREAM = 1 << 10
"""Depths that get a stream of their own, so that a position drafted again in a later step gets another number."""


class CounterRNG:
    """A counter-based random number generator: a number depends on (seed, position, stream) only, so an answer never
    depends on the other requests of the batch.

    SplitMix64's finalizer over the mixed counter; positions can be asked for in any order.
    """

    def __init__(self, seed: int) -> None:
        self.seed_key = _splitmix64((seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK)

    def uniform(self, position: int, stream: int = Stream.TARGET) -> float:
        """A number in [0, 1) for the token at `position` of the sequence; `stream`: see `Stream`, below 2^32."""
        return (self.key(position, stream) >> 11) / 2.0**53

    def key(self, position: int, stream: int = Stream.TARGET) -> int:
        """64 random bits, from which `exponential_variates` makes a number for every token."""
        return _splitmix64(self.seed_key ^ _splitmix64((position << 32) + stream))


def exponential_variates(key: int, tokens: Int[np.ndarray, " t"]) -> Float[np.ndarray, " t"]:
    """Exponentially distributed numbers, one per token id: -log(u) of the SplitMix64 stream of `key`.

    Computed by single float64 operations in a fixed order, as csrc/sampler.h does: the same bits everywhere.
    """
    x = np.uint64(key) + np.uint64(_GOLDEN) * (tokens.astype(np.uint64) + np.uint64(1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    m, exponent = np.frexp(((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54)
    small = m < sqrt(0.5)
    m, exponent = np.where(small, m * 2, m), exponent - small
    s = (m - 1) / (m + 1)
    z, series = s * s, np.zeros_like(m)
    for i in reversed(range(LOG_TERMS)):
        series = series * z + 1.0 / (2 * i + 1)
    numbers: Float[np.ndarray, " t"] = -(exponent.astype(np.float64) * LN2 + 2 * s * series)
    return numbers


def _splitmix64(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def apply_penalties(
    logits: Float[torch.Tensor, "k v"],
    histories: Sequence[Int[np.ndarray, " t"]],
    prompt_lengths: Sequence[int],
    sampling: Sequence[SamplingParams],
) -> Float[torch.Tensor, "k v"]:
    """Logits after repetition, presence and frequency penalties and bias.

    `histories`: the tokens so far of every row, of which the first `prompt_lengths` are the prompt. Penalties are
    computed in float64.
    """
    out, vocab, device = logits.clone(), logits.shape[1], logits.device
    flat, places, factors, reductions = out.view(-1), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for i, (history, prompt, s) in enumerate(zip(histories, prompt_lengths, sampling, strict=True)):
        if s.depends_on_history:
            seen = np.flatnonzero(np.bincount(history))
            count = np.bincount(history[prompt:], minlength=seen[-1] + 1)[seen]
            places.append(seen + i * vocab)
            factors.append(np.full(len(seen), s.repetition_penalty))
            reductions.append(np.where(count > 0, s.presence_penalty + s.frequency_penalty * count, 0.0))
    if places:
        place, factor, less = (to_device(np.concatenate(parts), device) for parts in (places, factors, reductions))
        value = flat[place].double()
        value = torch.where(value > 0, value / factor, value * factor).clamp(-_LARGEST, _LARGEST)
        flat[place] = (value - less).to(out.dtype)
    biased = [(i * vocab + s.bias_tensors[0], s.bias_tensors[1]) for i, s in enumerate(sampling) if s.logit_bias]
    if biased:
        place, bias = (to_device(torch.cat(parts), device) for parts in zip(*biased, strict=True))
        flat[place] += bias.to(out.dtype)
    return out


def sample_from(p: Float[torch.Tensor, " v"], uniform: float) -> int:
    """The token at quantile `uniform` of a distribution, which need not be normalised; never one of probability 0."""
    cumulative = p.cumsum(-1)
    total = cumulative[-1]
    index = int(torch.searchsorted(cumulative, total * uniform, right=True))
    return index if index < p.shape[-1] else int(p.nonzero()[-1])
