"""Networks made of decoder blocks of the target's width, between its embedding and its head."""

import copy
from dataclasses import replace

import torch
from jaxtyping import Float
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
from foretell.speculator.network.base import Speculator, SpeculatorConfig

_INIT_STD = 0.02
"""Standard deviation of random matrices, that of GPT-2."""


class BlocksConfig(SpeculatorConfig):
    """Configuration of a network made of decoder blocks."""

    model: ModelConfig
    """A decoder of these blocks."""


class BlocksNetwork(Speculator):
    """Decoder blocks, which are trained and stored; subclasses add norms."""

    config: BlocksConfig

    def __init__(self, config: BlocksConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.model = replace(config.model, vocab=embedding_and_head.vocab)
        self.blocks = blank_blocks(config.model).requires_grad_(True)
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

    def decoder(
        self, final: RMSNorm, dtype: torch.dtype, embedding: Float[torch.Tensor, "v d"] | None = None
    ) -> Decoder:
        """A copy as a decoder in a dtype with this final norm; its head gives logits over the draft vocabulary.
        `embedding`: another one than the target's.
        """
        blocks = [frozen_copy(block, dtype) for block in self.blocks]
        norm = RMSNorm(final.weight.detach().clone(), self.model.norm_eps)
        embedding = (self.get_buffer("_embedding") if embedding is None else embedding).to(dtype)
        return Decoder(self.model, embedding, blocks, norm, Linear(self.lm_head.detach().to(dtype)))

    def run(self, final: RMSNorm, precision: Precision | None) -> NativeDecoder | Decoder:
        """`decoder` for drafting: on the CPU kernels where they support it, else in plain torch in the dtype of the
        target's embedding.

        `precision` of the CPU kernels; None: float32 for a float32 target, else int8.
        """
        embedding = self.get_buffer("_embedding")
        fast = embedding.device.type == "cpu" and embedding.dtype != torch.float64
        if fast and native.available() and NativeDecoder.supports(self.model):
            precision = precision or ("float32" if embedding.dtype == torch.float32 else "int8")
            dtype = torch.float32 if precision == "float32" else torch.bfloat16
            return NativeDecoder(self.decoder(final, dtype), precision)
        return self.decoder(final, embedding.dtype)


class _BlankWeights(NamedWeights):
    """Matrices and biases of zeros, norms of ones, to be overwritten by a checkpoint or the target's weights."""

    def require(self, name: str, *shape: int) -> Float[torch.Tensor, "*shape"]:
        """A tensor of this shape."""
        return torch.ones(*shape) if "norm" in name or name.endswith("layer_scalar") else torch.zeros(*shape)


def blank_norm(config: ModelConfig) -> RMSNorm:
    """A norm of ones to be trained."""
    return RMSNorm(torch.ones(config.hidden), config.norm_eps).requires_grad_(True)


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
