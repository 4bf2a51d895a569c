"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

A token's cache entry is one vector that all heads share: its latent vector c and its rotated key. The matrices that
would expand c to keys and values per head are applied to queries and outputs instead, so that this is attention of many
query heads to one key, whose first numbers are the value too.
"""

import torch
from jaxtyping import Float
from torch import nn

from foretell.model.block.layer import DecoderBlock, HeadSizes, RMSNorm
from foretell.model.block.rope import RopeAngles, apply_rope
from foretell.model.config.model import MLAConfig

LATENT_EPS = 1e-6
"""Of the norms within latent attention, whatever the configuration says (as in transformers)."""


class LatentProjection(nn.Module):
    """Projects inputs to the queries and the shared key of latent attention, and expands its outputs.

    `query`: from the input to `heads * (nope_dim + rope_dim)` numbers. `compress`: to the latent vector and the key to
    rotate. `key`, `value`: what expands a latent vector, by head.
    """

    def __init__(
        self,
        sizes: MLAConfig,
        query: nn.Module,
        compress: nn.Module,
        norm: RMSNorm,
        key: Float[torch.Tensor, "h n r"],
        value: Float[torch.Tensor, "h v r"],
    ) -> None:
        super().__init__()
        self.sizes, self.query, self.compress, self.norm = sizes, query, compress, norm
        self.key, self.value = (nn.Parameter(part, requires_grad=False) for part in (key, value))

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t p"]:
        """Queries of all heads, the latent vector, and the key to rotate."""
        return torch.cat((self.query(x), self.compress(x)), -1)

    def absorb(
        self, projected: Float[torch.Tensor, "*t p"], angles: RopeAngles
    ) -> tuple[Float[torch.Tensor, "*t h e"], Float[torch.Tensor, "*t 1 e"]]:
        """Absorbed queries, and the key: latent vector, then rotated part."""
        s, width = self.sizes, len(self.key) * (self.sizes.nope_dim + self.sizes.rope_dim)
        query, latent, shared = projected.split((width, s.kv_rank, s.rope_dim), -1)
        plain, rotary = query.unflatten(-1, (len(self.key), -1)).split((s.nope_dim, s.rope_dim), -1)
        absorbed = torch.einsum("...hn,hnr->...hr", plain.to(self.key.dtype), self.key)
        q = torch.cat((absorbed, apply_rope(rotary, angles).to(absorbed.dtype)), -1)
        k = torch.cat((self.norm(latent)[..., None, :], apply_rope(shared[..., None, :], angles)), -1)
        return q, k.to(q.dtype)

    def expand(self, out: Float[torch.Tensor, "*t he"]) -> Float[torch.Tensor, "*t hv"]:
        """Values per head from weighted sums of keys, whose last numbers are dropped."""
        latent = out.unflatten(-1, (len(self.value), -1))[..., : self.sizes.kv_rank]
        return torch.einsum("...hr,hvr->...hv", latent.to(self.value.dtype), self.value).flatten(-2)


class LatentBlock(DecoderBlock):
    """A decoder block whose attention is latent; `qkv` is a `LatentProjection`."""

    def _rotated(
        self, projected: Float[torch.Tensor, "*t p"], sizes: HeadSizes, angles: RopeAngles | None
    ) -> tuple[Float[torch.Tensor, "*t h e"], Float[torch.Tensor, "*t 1 e"], Float[torch.Tensor, "*t 1 e"]]:
        """Absorbed queries, and the shared key twice."""
        assert isinstance(self.qkv, LatentProjection) and angles is not None
        q, k = self.qkv.absorb(projected, angles)
        return q, k, k

    def merge_heads(self, out: Float[torch.Tensor, "*t he"]) -> Float[torch.Tensor, "*t hv"]:
        """Values per head."""
        assert isinstance(self.qkv, LatentProjection)
        return self.qkv.expand(out)
