"""The kernels that sample from rows of logits; distributions/sampler.py computes the same with torch."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int, UInt64
from torch import Tensor

from foretell.model.kernels import build
from foretell.model.kernels.linear import check_tensor
from foretell.model.kernels.structures import Sampling


def sample(x: Tensor, place: Sequence[int], sampling: Sequence[Sampling]) -> list[int]:
    """A token from each of the rows `place` of float32 logits [t, v], -1 where no logit is above -infinity."""
    check_tensor(x, torch.float32, "x", *x.shape[:2])
    if len(sampling) != len(place) or not all(0 <= i < len(x) for i in place):
        raise ValueError(f"rows {list(place)} of {len(x)} rows of logits, with {len(sampling)} sampling parameters")
    count = len(place)
    rows, out = np.array(place, np.int64), np.empty(count, np.int64)
    build.library().foretell_sample(
        x.data_ptr(),
        rows.ctypes.data,
        (Sampling * count)(*sampling),
        out.ctypes.data,
        count,
        x.shape[1],
        torch.get_num_threads(),
    )
    tokens: list[int] = out.tolist()
    return tokens


def kept_tokens(x: Tensor, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32, that sampling keeps of float32 logits [v], by rising id, and their integer weights, int64."""
    check_tensor(x, torch.float32, "x", len(x))
    tokens, weights = np.empty(len(x), np.int32), np.empty(len(x), np.int64)
    count = build.library().foretell_kept_tokens(
        x.data_ptr(), sampling, tokens.ctypes.data, weights.ctypes.data, len(x), torch.get_num_threads()
    )
    return tokens[:count], weights[:count]


def gumbel_noise(key: UInt64[np.ndarray, " b"], width: int, token_of: Int[np.ndarray, " w"] | None = None) -> Tensor:
    """Gumbel noise, float32 [b, width], of the tokens `token_of` (None: the first `width`) at positions with these
    keys.
    """
    out = torch.empty(len(key), width)
    keys = np.ascontiguousarray(key, np.uint64)
    tokens = None if token_of is None else np.ascontiguousarray(token_of, np.int64)
    build.library().foretell_gumbel_noise(
        keys.ctypes.data,
        None if tokens is None else tokens.ctypes.data,
        out.data_ptr(),
        len(key),
        width,
        torch.get_num_threads(),
    )
    return out
