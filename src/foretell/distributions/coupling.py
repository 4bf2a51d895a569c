"""A drafter's logits with the noise that the target will sample with (Daliri et al., arXiv 2408.07978): a drafter
without error would rank first what the target chooses. csrc/speculators.h does the same for drafts in one call.
"""

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64

from foretell.core.context import Context
from foretell.core.noise import LevelNoise, target_noise
from foretell.distributions.sampler import kept_weights, noise_bits, sampling_struct
from foretell.model import kernels
from foretell.model.kernels.structures import Sampling
from foretell.utils.transfer import to_device


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
                out[place] = torch.where(kept_weights(out[place][None], [params])[0] > 0, out[place], -torch.inf)
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
    tokens = torch.arange(width, device=device) if token_of is None else to_device(token_of, device)
    bits = noise_bits(to_device(key.view(np.int64), device), tokens)
    return -(-torch.log1p(-(((1 << 53) - bits).double() - 0.5) * 2.0**-53)).log().float()
