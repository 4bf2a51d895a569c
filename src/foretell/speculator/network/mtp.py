"""Layers of multi-token prediction that are trained apart from their target (DeepSeek-V3, arXiv 2412.19437; FastMTP,
arXiv 2509.18362).
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.layer import RMSNorm
from foretell.model.block.linear import Linear
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.structures import Precision
from foretell.model.load.mtp import PublishedLayer
from foretell.model.run.mtp import MTPLayer, MTPModule
from foretell.model.run.vocabulary import ReducedVocabulary
from foretell.model.training.full_forward import forward_blocks
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork

NORMS = ("norm", "embedding_norm", "hidden_norm")
"""Norms of a layer beside those of its block."""


class MTPConfig(DraftModelConfig):
    """Configuration of layers of multi-token prediction: `model` is a decoder of these layers."""

    kind: Literal["mtp"] = "mtp"


class MTPInputs(nn.Module):
    """What a layer has beside its block; see `MTPModule`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.hidden
        self.combine = Linear(torch.zeros(d, 2 * d))
        self.norm, self.embedding_norm, self.hidden_norm = (RMSNorm(torch.ones(d), config.norm_eps) for _ in NORMS)

    def forward(self, embedded: Float[torch.Tensor, "*t d"], hidden: Float[torch.Tensor, "*t d"]) -> torch.Tensor:
        """The input of the block."""
        x: torch.Tensor = self.combine(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1))
        return x


class MTPNetwork(DraftNetwork):
    """Layers of multi-token prediction, each a block like the target's last one; see `MTPLayer`, which runs them.

    Layer `k` of several predicts from the output of the layer before it. A single layer reads its own output.
    """

    kind = "mtp"
    config: MTPConfig
    starts_from = ()

    def __init__(self, config: MTPConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        del self.norm
        self.inputs = nn.ModuleList(MTPInputs(config.model) for _ in self.blocks).requires_grad_(True)

    @property
    def parts(self) -> list[MTPInputs]:
        """What each layer has beside its block."""
        return [part for part in self.inputs if isinstance(part, MTPInputs)]

    @property
    def layers(self) -> int:
        """Layers of multi-token prediction."""
        return len(self.blocks)

    def forward(  # type: ignore[override]
        self,
        token: Int[torch.Tensor, "b s"],
        state: Float[torch.Tensor, "b s d"],
        wanted: Sequence[Bool[torch.Tensor, "b t"]],
    ) -> tuple[Float[torch.Tensor, "_ d"], ...]:
        """Inputs of the output head in every step, from the inputs of the target's head; `wanted[i]` marks the
        positions `j` of `0 .. s-2` whose prediction of token `j + 2 + i` is needed.

        Step `i` reads at position `j` the output of the step before there, and token `j + 1 + i`, with causal attention
        over the outputs of that step, as FastMTP and `MtpModel` of transformers do.
        """
        hidden, length, out = state[:, :-1], token.shape[1] - 1, list[torch.Tensor]()
        token = F.pad(token, (0, len(wanted)))
        for i, mask in enumerate(wanted):
            k = min(i, self.layers - 1)
            part = self.parts[k]
            x = part(self.embed(token[:, i + 1 : i + 1 + length]), hidden.to(self.dtype))
            hidden = part.norm(forward_blocks([self.blocks[k]], self.model, self.ropes(), x, k))
            out.append(hidden[mask])
        return tuple(out)

    @torch.no_grad()
    def init_from_layers(self, layers: Sequence[PublishedLayer]) -> None:
        """Copy layers of a checkpoint; further ones are copies of the last one."""
        for k, (block, part) in enumerate(zip(self.blocks, self.parts, strict=True)):
            layer = layers[min(k, len(layers) - 1)]
            block.load_state_dict(layer.block.state_dict())
            part.combine.weight.copy_(layer.combine)
            for name in NORMS:
                getattr(part, name).weight.copy_(getattr(layer, name))

    def to_decoder(self, dtype: torch.dtype) -> Decoder:
        """A copy of the blocks as a decoder in a dtype."""
        return self._decoder(self.parts[0].norm, dtype)

    def to_layer(self, precision: Precision | None = None) -> MTPLayer:
        """A copy for drafting; see `to_network`."""
        run, dtype = self._run(precision), self.get_buffer("_embedding").dtype

        def part(own: MTPInputs) -> MTPModule:
            weight = own.combine.weight.detach().to(dtype)
            combine = NativeLinear(weight, None, run.precision) if isinstance(run, NativeDecoder) else Linear(weight)
            norms = (getattr(own, name) for name in NORMS)
            return MTPModule(combine, *(RMSNorm(norm.weight.detach().clone(), norm.eps) for norm in norms))

        network = run if self.token_of is None else ReducedVocabulary(run, self.token_of)
        return MTPLayer(network, [part(own) for own in self.parts], self.target_info.layers + 1)
