"""What layers with a recurrent state do between their input and output projections."""

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn

from foretell.model.block.linear import Linear, widen
from foretell.model.cache.state_store import LayerStates
from foretell.model.config.states import DeltaNetConfig, Mamba2Config, ShortConvConfig

Projected: TypeAlias = Float[torch.Tensor, "t p"]
Mixed: TypeAlias = Float[torch.Tensor, "t o"]
_NORM_EPS = 1e-6
"""Added to the squared length of DeltaNet's queries and keys (as in transformers)."""


class StateMixer(nn.Module, ABC):
    """Mixes the tokens of a layer by its states, in place of attention."""

    @abstractmethod
    def forward(self, projected: Projected, x: Float[torch.Tensor, "t d"], states: LayerStates) -> Mixed:
        """The input of the output projection; `projected` is the layer's input `x` after the input projection."""


class GatedDeltaNet(StateMixer):
    """Gated DeltaNet (Yang et al., arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

    The rows of the input projection are queries, keys, values, and the gates z of the output; `gates` holds the rows
    of b (beta), then those of a (decay). The weight of the convolution is `[channels, taps]`.
    """

    def __init__(
        self,
        config: DeltaNetConfig,
        convolution: Float[torch.Tensor, "c w"],
        gates: Linear,
        log_decay: Float[torch.Tensor, " h"],
        time_bias: Float[torch.Tensor, " h"],
        norm: Float[torch.Tensor, " v"],
        eps: float,
    ) -> None:
        super().__init__()
        self.config, self.gates, self.eps = config, gates, eps
        self.convolution, self.log_decay, self.time_bias, self.norm = (
            nn.Parameter(part, requires_grad=False) for part in (convolution, log_decay, time_bias, norm)
        )

    def forward(self, projected: Projected, x: Float[torch.Tensor, "t d"], states: LayerStates) -> Mixed:
        """Convolution, delta rule, and gated norm."""
        c = self.config
        keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        mixed, z = torch.split(widen(projected), [2 * keys + values, values], -1)
        mixed = F.silu(states.convolve(mixed, self.convolution.to(mixed.dtype)))
        q, k, v = torch.split(mixed, [keys, keys, values], -1)
        q, k = (part.reshape(-1, c.key_heads, c.key_dim) for part in (q, k))
        q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + _NORM_EPS) for part in (q, k))
        v, z = (part.reshape(-1, c.value_heads, c.value_dim) for part in (v, z))
        b, a = widen(self.gates(x)).chunk(2, -1)
        rate = F.softplus(a + self.time_bias.to(a.dtype)) * self.log_decay.to(a.dtype).exp()
        out = states.recur(k, v, torch.exp(-rate), q * c.key_dim**-0.5, torch.sigmoid(b))
        out = F.rms_norm(out, (c.value_dim,), self.norm.to(out.dtype), self.eps) * F.silu(z)
        return out.flatten(-2)


class ShortConvolution(StateMixer):
    """The gated short convolution of LFM2 (arXiv 2511.23404): `C * conv(B * x)`.

    The rows of the input projection are B, C and x.
    """

    def __init__(
        self,
        config: ShortConvConfig,
        convolution: Float[torch.Tensor, "c w"],
        bias: Float[torch.Tensor, " c"] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.convolution = nn.Parameter(convolution, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, projected: Projected, x: Float[torch.Tensor, "t d"], states: LayerStates) -> Mixed:
        """Gate, convolution, gate."""
        before, after, value = widen(projected).chunk(3, -1)
        out = states.convolve(before * value, self.convolution.to(before.dtype))
        return after * (out if self.bias is None else out + self.bias.to(out.dtype))


class Mamba2(StateMixer):
    """Mamba-2 (Dao and Gu, arXiv 2405.21060), as in Granite 4.

    The rows of the input projection are x, B, C, and the gates z of the output; `gates` holds the rows of the time
    steps. `skip` is the weight of x in the output, per head.
    """

    def __init__(
        self,
        config: Mamba2Config,
        convolution: Float[torch.Tensor, "c w"],
        convolution_bias: Float[torch.Tensor, " c"] | None,
        gates: Linear,
        log_decay: Float[torch.Tensor, " h"],
        time_bias: Float[torch.Tensor, " h"],
        skip: Float[torch.Tensor, " h"],
        norm: Float[torch.Tensor, " i"],
        eps: float,
    ) -> None:
        super().__init__()
        self.config, self.gates, self.eps = config, gates, eps
        self.convolution, self.log_decay, self.time_bias, self.skip, self.norm = (
            nn.Parameter(part, requires_grad=False) for part in (convolution, log_decay, time_bias, skip, norm)
        )
        self.convolution_bias = (
            None if convolution_bias is None else nn.Parameter(convolution_bias, requires_grad=False)
        )

    def forward(self, projected: Projected, x: Float[torch.Tensor, "t d"], states: LayerStates) -> Mixed:
        """Convolution, state space model, and gated norm."""
        c = self.config
        inner, shared = c.heads * c.head_dim, c.groups * c.state_dim
        mixed, z = torch.split(widen(projected), [inner + 2 * shared, inner], -1)
        mixed = states.convolve(mixed, self.convolution.to(mixed.dtype))
        if self.convolution_bias is not None:
            mixed = mixed + self.convolution_bias.to(mixed.dtype)
        value, b, c_ = torch.split(F.silu(mixed), [inner, shared, shared], -1)
        key, query = (part.reshape(-1, c.groups, c.state_dim) for part in (b, c_))
        value = value.reshape(-1, c.heads, c.head_dim)
        time = F.softplus(widen(self.gates(x)) + self.time_bias.to(value.dtype))
        decay = torch.exp(-time * self.log_decay.to(value.dtype).exp())
        out = states.recur(key, value * time[..., None], decay, query) + value * self.skip.to(value.dtype)[:, None]
        out = (out.flatten(-2) * F.silu(z)).unflatten(-1, (c.groups, -1))
        return F.rms_norm(out, out.shape[-1:], eps=self.eps).flatten(-2) * self.norm.to(out.dtype)
