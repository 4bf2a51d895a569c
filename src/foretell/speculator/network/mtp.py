"""Layers of multi-token prediction that are trained apart from their target (DeepSeek-V3, arXiv 2412.19437; FastMTP,
arXiv 2509.18362), and Gemma 4's assistant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.layer import RMSNorm
from foretell.model.block.linear import Linear
from foretell.model.block.modules import to_weights
from foretell.model.block.weights import tensors_of
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.structures import Precision
from foretell.model.load.assistant import run_assistant
from foretell.model.load.mtp import PublishedLayer
from foretell.model.load.weights import EMBEDDING, FINAL_NORM, NamedWeights
from foretell.model.run.assistant import Assistant
from foretell.model.run.mtp import MTPLayer, MTPModule
from foretell.model.run.network import Network
from foretell.model.run.vocabulary import ReducedVocabulary
from foretell.model.training.chunked_attention import KeyValue
from foretell.model.training.full_forward import CausalAttention, forward_blocks
from foretell.speculator.network.blocks import BlocksNetwork, blank_norm
from foretell.speculator.network.draft_model import DraftModelConfig
from foretell.utils.validation import Fields

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


class MTPNetwork(BlocksNetwork):
    """Layers of multi-token prediction, each a block like the target's last one; see `MTPLayer`, which runs them.

    Layer `k` of several predicts from the output of the layer before it. A single layer reads its own output.
    """

    kind = "mtp"
    config: MTPConfig

    def __init__(self, config: MTPConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.inputs = nn.ModuleList(MTPInputs(config.model) for _ in self.blocks).requires_grad_(True)

    @property
    def parts(self) -> list[MTPInputs]:
        """What each layer has beside its block."""
        return [part for part in self.inputs if isinstance(part, MTPInputs)]

    @property
    def layers(self) -> int:
        """Layers of multi-token prediction."""
        return len(self.blocks)

    def forward(
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

    def to_layer(self, precision: Precision | None = None) -> MTPLayer:
        """A copy for drafting; see `BlocksNetwork.run`."""
        run, dtype = self.run(self.parts[0].norm, precision), self.get_buffer("_embedding").dtype

        def part(own: MTPInputs) -> MTPModule:
            weight = own.combine.weight.detach().to(dtype)
            combine = NativeLinear(weight, None, run.precision) if isinstance(run, NativeDecoder) else Linear(weight)
            norms = (getattr(own, name) for name in NORMS)
            return MTPModule(combine, *(RMSNorm(norm.weight.detach().clone(), norm.eps) for norm in norms))

        network = run if self.token_of is None else ReducedVocabulary(run, self.token_of)
        return MTPLayer(network, [part(own) for own in self.parts], self.target_info.layers + 1)


class AssistantConfig(DraftModelConfig):
    """Configuration of an assistant, whose layers `model` read keys and values of layers numbered after them."""

    kind: Literal["assistant"] = "assistant"


class AssistantNetwork(BlocksNetwork):
    """A small decoder with a head of its own; see `Assistant`, which runs it."""

    kind = "assistant"
    config: AssistantConfig
    layers = 1
    """Its layers predict one token after the other together."""

    def __init__(self, config: AssistantConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        width, d = config.model.hidden, config.target.hidden
        self.softcap = 0.0  # its logits have no bound
        self.combine, self.project = Linear(torch.zeros(width, 2 * d)), Linear(torch.zeros(d, width))
        self.head = nn.Parameter(torch.zeros(config.target.vocab, width))
        self.norm = blank_norm(config.model)
        self.requires_grad_(True)

    def forward(
        self,
        token: Int[torch.Tensor, "b s"],
        state: Float[torch.Tensor, "b s d"],
        keys: Mapping[int, KeyValue],
        wanted: Sequence[Bool[torch.Tensor, "b t"]],
    ) -> tuple[Float[torch.Tensor, "_ h"], ...]:
        """Inputs of the output head in every step, from the inputs of the target's head and the keys and values of each
        layer of `kv_layers`; `wanted` as of `MTPNetwork`. Step `i` reads at position `j` token `j + 1 + i` and the
        state of the step before. All steps stand at position `j + 1`, and see the keys up to position `j`.
        """
        length, hidden, out = token.shape[1] - 1, state[:, :-1], list[torch.Tensor]()
        kept = {layer: (k[:, :length], v[:, :length]) for layer, (k, v) in keys.items()}
        attention = CausalAttention(replace(self.model, window=self.model.window - 1), kept=kept)
        position, token = torch.arange(1, length + 1, device=token.device), F.pad(token, (0, len(wanted)))
        for i, mask in enumerate(wanted):
            x = self.combine(torch.cat((self.embed(token[:, i + 1 : i + 1 + length]), hidden.to(self.dtype)), -1))
            x = self.norm(forward_blocks(self.blocks, self.model, self.ropes(), x, 0, attention, position))
            hidden = self.project(x)
            out.append(x[mask])
        return tuple(out)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights by their published names."""
        tensors: dict[str, torch.Tensor] = {EMBEDDING: self.lm_head, FINAL_NORM: self.norm.weight}
        tensors |= {"pre_projection.weight": self.combine.weight, "post_projection.weight": self.project.weight}
        for i, block in enumerate(self.blocks):
            tensors |= tensors_of(self.model, i, to_weights(block))
        return {name: tensor.detach().to(self.dtype) for name, tensor in tensors.items()}

    def to_assistant(self, target: Network) -> Assistant:
        """A copy for drafting."""
        config = replace(self.model, context=target.config.context, cache_dtype=target.config.cache_dtype)
        weights = NamedWeights("an assistant in memory", self.tensors())
        return run_assistant(Fields({}, weights.source), config, weights, target)
