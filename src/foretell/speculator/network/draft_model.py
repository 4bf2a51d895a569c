"""A trained draft model: a few decoder blocks between the target's embedding and head."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import nn

from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder, decoder_rope_tables
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.layer import DecoderBlock, RMSNorm
from foretell.model.block.linear import Linear
from foretell.model.block.rope import RopeTables
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.load.build import build_block
from foretell.model.load.weights import NamedWeights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.vocabulary import ReducedVocabulary
from foretell.model.training.full_forward import forward_blocks
from foretell.speculator.network.base import Speculator, SpeculatorConfig

_INIT_STD = 0.02
"""Standard deviation of random matrices, that of GPT-2."""


class DraftModelConfig(SpeculatorConfig):
    """Configuration of a trained draft model."""

    kind: Literal["draft_model", "pard", "mtp", "assistant"] = "draft_model"
    model: ModelConfig
    """A decoder of the target's width, with fewer layers."""
    blocks: tuple[int, ...] = Field(
        default=(), description="Blocks of the target that it was initialised from; empty: none"
    )


def draft_config(target: ModelConfig, blocks: Sequence[int]) -> ModelConfig:
    """The configuration of a decoder made of these blocks of the target.

    Raises:
        ValueError: no blocks, a block that the target lacks, or a target with experts.
    """
    if not blocks or not all(0 <= i < target.layers for i in blocks):
        raise ValueError(
            f"a draft model is cut from blocks 0 to {target.layers - 1} of its target, found {list(blocks)}"
        )
    if target.experts is not None:
        raise ValueError("a draft model cannot be cut from blocks with experts; train another kind of speculator")
    return target.of_layers(blocks)


class DraftNetwork(Speculator):
    """A small decoder that reads tokens only, none of the target's hidden states.

    Its blocks and its final norm are trained and stored.
    """

    kind = "draft_model"
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.model = replace(config.model, vocab=embedding_and_head.vocab)
        self.blocks = blank_blocks(config.model)
        self.norm = RMSNorm(torch.ones(config.model.hidden), config.model.norm_eps)
        self.requires_grad_(True)
        self.ropes = BlockRopes(self.model)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The input of the target's output head: the teacher in training; drafting needs none."""
        return (self.target_info.layers + 1,)

    def init_random(self) -> None:
        """Initialise the matrices with small Gaussian numbers from torch's default generator."""
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=_INIT_STD)

    def init_from_target(self, target: Decoder, blocks: Sequence[int]) -> None:
        """Copy these blocks of the target, in this order, and its final norm."""
        for mine, i in zip(self.blocks, blocks, strict=True):
            mine.load_state_dict(target.blocks[i].state_dict())
        self.norm.load_state_dict(target.norm.state_dict())

    def adapt_state_dict(self, smaller: Speculator) -> dict[str, torch.Tensor]:
        """The state dict of a network with fewer blocks, each block where this network has the same block of the
        target; the other blocks get output matrices of zero, so that they add nothing to the residual stream.
        """
        assert isinstance(smaller, DraftNetwork)
        given, before, now = smaller.state_dict(), smaller.config.blocks, self.config.blocks
        if not set(before) < set(now):
            return given
        out = {name: tensor for name, tensor in given.items() if not name.startswith("blocks.")}
        for name, tensor in self.state_dict().items():
            _, _, rest = name.partition("blocks.")
            number, _, part = rest.partition(".")
            if not rest:
                continue
            if now[int(number)] in before:
                out[name] = given[f"blocks.{before.index(now[int(number)])}.{part}"]
            else:
                out[name] = torch.zeros_like(tensor) if part.startswith(("output.", "mlp.down.")) else tensor
        return out

    def hidden_states(self, token: Int[torch.Tensor, "b s"]) -> Float[torch.Tensor, "b s d"]:
        """Inputs of the output head at every position of sequences that begin with their first token and are padded at
        the end.
        """
        return self.norm(forward_blocks(self.blocks, self.model, self.ropes(), self.embed(token)))

    def forward(self, token: Int[torch.Tensor, "b s"], mask: Bool[torch.Tensor, "b s"]) -> Float[torch.Tensor, "k d"]:
        """Inputs of the output head at the positions in `mask`, sequence by sequence; see `compute_logits`."""
        return self.hidden_states(token)[mask]

    def teacher_logits(self, state: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """The target's logits over the draft vocabulary, from the inputs of its output head."""
        rows = self._target_head.to(state.device)
        rows = rows if self.token_of is None else rows[self.token_of]
        return self._apply_softcap(F.linear(state.to(rows.dtype), rows).float())

    def to_decoder(self, dtype: torch.dtype) -> Decoder:
        """A copy as a decoder in a dtype; its head gives logits over the draft vocabulary."""
        return self._decoder(self.norm, dtype)

    def _decoder(self, final: RMSNorm, dtype: torch.dtype) -> Decoder:
        blocks = [frozen_copy(block, dtype) for block in self.blocks]
        norm = RMSNorm(final.weight.detach().clone(), self.model.norm_eps)
        embedding = self.get_buffer("_embedding").to(dtype)
        return Decoder(self.model, embedding, blocks, norm, Linear(self.lm_head.detach().to(dtype)))

    def to_network(self, precision: Precision | None = None) -> Network:
        """A copy for drafting, over the target's whole vocabulary: on the CPU kernels where they support it, else in
        plain torch in the dtype of the target's embedding.

        `precision` of the CPU kernels; None: float32 for a float32 target, else int8.
        """
        run = self._run(precision)
        return run if self.token_of is None else ReducedVocabulary(run, self.token_of)

    def _run(self, precision: Precision | None) -> NativeDecoder | Decoder:
        embedding = self.get_buffer("_embedding")
        fast = embedding.device.type == "cpu" and embedding.dtype != torch.float64
        if fast and native.available() and NativeDecoder.supports(self.model):
            precision = precision or ("float32" if embedding.dtype == torch.float32 else "int8")
            return NativeDecoder(
                self.to_decoder(torch.float32 if precision == "float32" else torch.bfloat16), precision
            )
        return self.to_decoder(embedding.dtype)

    def to_runner(self, precision: Precision | None = None) -> DecoderRunner:
        """`to_network` with an empty cache."""
        return DecoderRunner(self.to_network(precision))


class _BlankWeights(NamedWeights):
    """Matrices and biases of zeros, norms of ones, to be overwritten by a checkpoint or the target's weights."""

    def require(self, name: str, *shape: int) -> Float[torch.Tensor, "*shape"]:
        """A tensor of this shape."""
        return torch.ones(*shape) if "norm" in name or name.endswith("layer_scalar") else torch.zeros(*shape)


class BlockRopes(nn.Module):
    """The rotary tables of full and of sliding-window layers, which are not stored."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        for name, (cos, sin) in zip(("full", "local"), decoder_rope_tables(config), strict=True):
            self.register_buffer(f"{name}_cos", cos, persistent=False)
            self.register_buffer(f"{name}_sin", sin, persistent=False)

    def forward(self) -> tuple[RopeTables, RopeTables]:
        """Both."""
        full, local = ((self.get_buffer(f"{n}_cos"), self.get_buffer(f"{n}_sin")) for n in ("full", "local"))
        return full, local


def blank_blocks(config: ModelConfig) -> nn.ModuleList:
    """The blocks of a decoder in float32, matrices of zeros and norms of ones."""
    blank, cpu = _BlankWeights("blank weights", {}), torch.device("cpu")
    return nn.ModuleList(build_block(config, i, blank, torch.float32, cpu) for i in range(config.layers))


def frozen_copy(block: nn.Module, dtype: torch.dtype) -> DecoderBlock:
    """A copy without gradients, matrices in this dtype and norms in float32."""
    fresh = copy.deepcopy(block).requires_grad_(False)
    assert isinstance(fresh, DecoderBlock)
    for part in fresh.modules():
        if isinstance(part, Linear | RMSNorm):
            part.to(torch.float32 if isinstance(part, RMSNorm) else dtype)
    return fresh
