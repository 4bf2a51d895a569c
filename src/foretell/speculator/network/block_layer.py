"""The decoder layer of DFlash: EAGLE's, optionally with a convolution over two neighbouring slots of a block."""

import torch
from jaxtyping import Float
from torch import nn

from foretell.model.block.attention import AttentionBackend
from foretell.model.block.layer import HeadSizes, Stream, StreamAndRoutes
from foretell.model.block.rope import RopeAngles
from foretell.model.config.model import ModelConfig
from foretell.speculator.network.layer import EagleLayer


class TwoTapConvolution(nn.Module):
    """Mixes every slot of a block with the one before it, before and after a sub-layer: `a x_t + b x_(t-1)`.

    `a` and `b` are a learned number per channel plus one per group of channels that depends on the sub-layer's input at
    the slot. Before the first slot of a block there is nothing. A new one changes nothing: `a` is 1 and `b` is 0.
    """

    def __init__(self, width: int, slots: int, group: int = 16) -> None:
        super().__init__()
        self._slots, self._group, self._groups = slots, group, -(-width // group)
        base = torch.zeros(2, 2, width)
        base[:, 0] = 1.0
        self.base = nn.Parameter(base)
        """Numbers per channel: before and after the sub-layer, of the slot and of the one before it."""
        self.dynamic = nn.Linear(width, 4 * self._groups, bias=False)
        nn.init.zeros_(self.dynamic.weight)

    def taps(self, x: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors before and after the sub-layer whose input is `x`, [*t, 2, d] each."""
        groups = self.dynamic(x).unflatten(-1, (2, 2, self._groups))
        taps = self.base.to(x.dtype) + groups.repeat_interleave(self._group, -1)[..., : x.shape[-1]]
        before, after = taps.unbind(-3)
        return before, after

    def mix(self, x: Stream, taps: Float[torch.Tensor, "*t 2 d"]) -> Stream:
        """The slots of whole blocks, one block after the other, mixed with these factors."""
        blocks = x.unflatten(-2, (-1, self._slots))
        earlier = torch.cat((torch.zeros_like(blocks[..., :1, :]), blocks[..., :-1, :]), -2).flatten(-3, -2)
        return taps[..., 0, :] * x + taps[..., 1, :] * earlier


class BlockLayer(EagleLayer):
    """A layer over the slots of blocks with such a convolution around its attention and its feed-forward network."""

    def __init__(self, config: ModelConfig, slots: int, group: int = 16) -> None:
        super().__init__(config)
        self.attention_convolution = TwoTapConvolution(config.hidden, slots, group)
        self.mlp_convolution = TwoTapConvolution(config.hidden, slots, group)

    def add_attention(
        self,
        x: Stream,
        attention_input: Float[torch.Tensor, "*t i"],
        sizes: HeadSizes,
        angles: RopeAngles | None,
        layer: int,
        attention: AttentionBackend,
    ) -> Stream:
        """Add the attention, with the convolution before and after it."""
        around = self.attention_convolution
        before, after = around.taps(attention_input)
        mixed, nothing = around.mix(attention_input, before), torch.zeros_like(x)
        return x + around.mix(super().add_attention(nothing, mixed, sizes, angles, layer, attention), after)

    def add_mlp(self, x: Stream, before: Stream | None = None) -> StreamAndRoutes:
        """Add the feed-forward network, with the convolution before and after it."""
        around, part = self.mlp_convolution, self.post_attention_layernorm(x)
        first, last = around.taps(part)
        return x + around.mix(self.mlp(around.mix(part, first)), last), None
