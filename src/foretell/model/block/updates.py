"""Updates of low rank beside the linear layers of a decoder in torch (LoRA, Hu et al., arXiv 2106.09685)."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock, sharing
from foretell.model.block.linear import FactoredLinear, Linear
from foretell.model.block.spec import LinearWeights
from foretell.model.matrices.stored import widened


class UpdatedLinear(nn.Module):
    """A linear layer and an update in float32 of its first outputs, or, `last`, of its last ones."""

    def __init__(self, inner: nn.Module, update: LinearWeights, device: torch.device, last: bool = False) -> None:
        super().__init__()
        assert update.factor is not None
        low, high = widened(update.factor), torch.cat([widened(part) for part in update.parts])
        self.inner, self.last = inner, last
        self.update = FactoredLinear(Linear(low.float().to(device)), Linear(high.float().to(device)))

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis."""
        out, own = self.inner(x), self.update(x.float())
        others = out.shape[-1] - own.shape[-1]
        both: torch.Tensor = out + F.pad(own, (others, 0) if self.last else (0, others))
        return both.to(out.dtype)


def updated_decoder(decoder: Decoder, updates: Sequence[Mapping[str, LinearWeights]]) -> Decoder:
    """A decoder with updates, which shares all weights; they are those of `NativeDecoder.with_updates`."""
    return decoder.with_blocks([_updated(decoder.block(i), own, decoder.device) for i, own in enumerate(updates)])


def _updated(block: DecoderBlock, updates: Mapping[str, LinearWeights], device: torch.device) -> DecoderBlock:
    out = sharing(block)
    out.mlp = sharing(block.mlp)
    for path, update in updates.items():
        # The gates of attention are the last outputs of the projection.
        last = path == "attention_gate"
        parent, _, name = ("qkv" if last else path).rpartition(".")
        module = out.get_submodule(parent)
        setattr(module, name, UpdatedLinear(module.get_submodule(name), update, device, last))
    return out
