"""A drafter's logits with the noise that the target will sample with (Daliri et al., arXiv 2408.07978): a drafter
without error would rank first what the target chooses. csrc/speculators.h does the same for drafts in one call.
"""

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64

from foretell.core.context import Context
from foretell.core.noise import LevelNoise, target_noise
from foretell.distributions.sampler import kept_tokens, sampling_struct
from foretell.model import kernels
from foretell.model.kernels.structures import Sampling

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants as signed integers."""


def add_noise(
    logits: Float[torch.Tensor, "k w"],
    logit_index: Int[np.ndarray, "b n"],
    noise: LevelNoise,
    token_of: Int[np.ndarray, " w"] | None = None,
) -> Float[torch.Tensor, "k w"]:
    """Logits after truncation, with the noise in units of the temperature. The row `logit_index[i, j]` is that of node
    `j` of batch row `i`; rows of requests that do not sample are unchanged. `token_of`: the tokens of the columns.
    """
    sampling = [i for i, s in enumerate(noise.sampling_params) if s.temperature]
    gumbel = gumbel_noise(noise.key[sampling], logits.shape[1], logits.device, token_of)
    out = logits.float().clone()
    for i, of_request in zip(sampling, gumbel, strict=True):
        params, nodes = noise.sampling_params[i], noise.frontier[i]
        for place in {int(at) for at in logit_index[i, nodes] if at >= 0}:
            if params.truncates:
                kept = torch.from_numpy(kept_tokens(out[place], params).token).to(out.device, torch.int64)
                out[place] = torch.full_like(out[place], -torch.inf).index_copy_(0, kept, out[place, kept])
            out[place] += params.temperature * of_request
    return out


def kernel_noise(context: Context, depth: int) -> kernels.Noise | None:
    """The noise of the first `depth` levels below the roots for drafts in one call of the kernels; see
    `target_noise`.
    """
    noise = target_noise(context, depth)
    if noise is None:
        return None
    structs = [sampling_struct(s) if s.temperature else Sampling() for s in noise.sampling_params]
    return kernels.Noise((Sampling * len(structs))(*structs), noise.key)


def gumbel_noise(
    key: UInt64[np.ndarray, " b"], width: int, device: torch.device, token_of: Int[np.ndarray, " w"] | None = None
) -> Float[torch.Tensor, "b w"]:
    """Gumbel noise of the first `width` tokens, or of `token_of`, at positions with these keys: -log of their
    exponential variates, in single precision.
    """
    if device.type == "cpu" and kernels.available():
        return kernels.gumbel_noise(key, width, token_of)
    tokens = torch.arange(width) if token_of is None else torch.from_numpy(token_of)
    x = torch.from_numpy(key.view(np.int64)).to(device)[:, None] + _GOLDEN * (tokens.to(device) + 1)
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    rest = (((1 << 53) - _shifted(x ^ _shifted(x, 31), 11)).double() - 0.5) * 2.0**-53
    return -(-torch.log1p(-rest)).log().float()


def _shifted(x: Int[torch.Tensor, "b w"], bits: int) -> Int[torch.Tensor, "b w"]:
    """`x >> bits` of unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
