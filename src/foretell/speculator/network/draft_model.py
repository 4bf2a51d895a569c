"""A small decoder cut from the target: a few of its blocks between the target's own embedding and head."""

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
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder, DecoderBlock, RMSNorm
from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.linear import Linear
from foretell.model.load.weights import Weights, build_block
from foretell.model.reduced_vocabulary import ReducedVocabulary
from foretell.model.rope import tables
from foretell.model.runner import DecoderRunner, Network
from foretell.model.training.full_forward import through
from foretell.speculator.network.base import Speculator, SpeculatorConfig


class DraftModelConfig(SpeculatorConfig):
    """The draft's own shape, and which of the target's blocks it started as."""

    kind: Literal["draft_model"] = "draft_model"
    model: ModelConfig
    """A decoder as wide as the target, with fewer layers."""
    blocks: tuple[int, ...] = Field(default=(), description="Blocks of the target that it was cut from; empty: none")


def draft_config(target: ModelConfig, blocks: Sequence[int]) -> ModelConfig:
    """The shape of some of a target's blocks one after the other.

    Raises:
        ValueError: none, a block that the target lacks, or one with experts.
    """
    if not blocks or not all(0 <= i < target.layers for i in blocks):
        raise ValueError(f"a draft is cut from blocks 0 to {target.layers - 1} of its target, found {list(blocks)}")
    if target.experts is not None:
        raise ValueError("a draft cannot be cut from blocks with experts; train another kind of speculator")
    windowed = tuple(i for i, block in enumerate(blocks) if block in target.window_layers)
    return replace(target, layers=len(blocks), window_layers=windowed)


class DraftNetwork(Speculator):
    """Reads tokens only, none of the target's states, so that it drafts as any other small model does.

    What is trained (and stored): its blocks and its last norm.
    """

    kind = "draft_model"
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.model = replace(config.model, vocab=embedding_and_head.vocab)
        self.blocks = nn.ModuleList(
            build_block(config.model, i, _BlankWeights(), torch.float32, torch.device("cpu"))
            for i in range(config.model.layers)
        )
        self.norm = RMSNorm(torch.ones(config.model.hidden), config.model.norm_eps)
        self.requires_grad_(True)
        for name, rope in (("full", config.model.rope), ("local", config.model.local_rope or config.model.rope)):
            assert rope is not None
            for part, table in zip(
                ("cos", "sin"), tables(rope, config.model.head_dim, config.model.context), strict=True
            ):
                self.register_buffer(f"_{name}_{part}", table, persistent=False)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the target's head sees: the teacher in training; drafting needs none."""
        return (self.target_info.layers + 1,)

    def init_random(self) -> None:
        """Draw small Gaussian matrices from torch's own generator, for a draft that is cut from nothing."""
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.02)

    def init_from_target(self, target: Decoder, blocks: Sequence[int]) -> None:
        """Take over some of the target's blocks, in this order, and its last norm."""
        for mine, i in zip(self.blocks, blocks, strict=True):
            mine.load_state_dict(target.blocks[i].state_dict())
        self.norm.load_state_dict(target.norm.state_dict())

    def adapt_state_dict(self, smaller: Speculator) -> dict[str, torch.Tensor]:
        """Weights of one that may have fewer blocks, each where this one has the same block of the target; the others
        change nothing at first.
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
                # What it adds to the residual stream is learned from nothing.
                out[name] = torch.zeros_like(tensor) if part.startswith(("output.", "mlp.down.")) else tensor
        return out

    def hidden_states(self, token: Int[torch.Tensor, "b s"]) -> Float[torch.Tensor, "b s d"]:
        """What the head sees at every position of texts from their first token on, padded at the end."""
        ropes = tuple((self.get_buffer(f"_{n}_cos"), self.get_buffer(f"_{n}_sin")) for n in ("full", "local"))
        return self.norm(through(self.blocks, self.model, (ropes[0], ropes[1]), self.embed(token)))

    def forward(self, token: Int[torch.Tensor, "b s"], where: Bool[torch.Tensor, "b s"]) -> Float[torch.Tensor, "k d"]:
        """What the head sees at the marked positions, text by text; `score` makes logits of it."""
        return self.hidden_states(token)[where]

    def teacher_logits(self, state: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """The target's own logits over the drafted tokens, from what its head saw."""
        rows = self._target_head.to(state.device)
        rows = rows if self.token_of is None else rows[self.token_of]
        return self._apply_softcap(F.linear(state.to(rows.dtype), rows).float())

    def to_decoder(self, dtype: torch.dtype) -> Decoder:
        """A copy as a decoder in a dtype; its head scores the drafted tokens only, in the order of `token_of`."""
        blocks = [_frozen(block, dtype) for block in self.blocks]
        norm = RMSNorm(self.norm.weight.detach().clone(), self.model.norm_eps)
        head = self.get_buffer("_shared_head") if self.head is None else self.head
        embedding = self.get_buffer("_embedding").to(dtype)
        return Decoder(self.model, embedding, blocks, norm, Linear(head.detach().to(dtype)))

    def to_network(self, precision: Precision | None = None) -> Network:
        """A copy, packed, as fast as this machine runs it; over the target's whole vocabulary.

        `precision` is for the CPU kernels (None: int8).

        A float64 target, and one that the kernels do not run, get plain torch in the dtype of the target's embedding.
        """
        embedding = self.get_buffer("_embedding")
        fast = embedding.device.type == "cpu" and embedding.dtype != torch.float64
        run: Network
        if fast and native.available() and NativeDecoder.supports(self.model):
            precision = precision or ("float32" if embedding.dtype == torch.float32 else "int8")
            run = NativeDecoder(self.to_decoder(torch.float32 if precision == "float32" else torch.bfloat16), precision)
        else:
            run = self.to_decoder(embedding.dtype)
        return run if self.token_of is None else ReducedVocabulary(run, self.token_of)

    def to_runner(self, precision: Precision | None = None) -> DecoderRunner:
        """`network` with an empty cache."""
        return DecoderRunner(self.to_network(precision))


class _BlankWeights(Weights):
    """Matrices and biases of zero, norms of one: what a checkpoint or the target then fills."""

    source = "blank weights"

    def find(self, name: str) -> Float[torch.Tensor, "*shape"] | None:
        """Nothing is optional."""
        return None

    def need(self, name: str, *shape: int) -> Float[torch.Tensor, "*shape"]:
        """A tensor of this shape."""
        return torch.ones(*shape) if "norm" in name else torch.zeros(*shape)

    def release(self) -> None:
        """Nothing is held."""


def _frozen(block: nn.Module, dtype: torch.dtype) -> DecoderBlock:
    """A copy whose matrices have a dtype and whose norms are in float32."""
    fresh = copy.deepcopy(block).requires_grad_(False)
    assert isinstance(fresh, DecoderBlock)
    for part in fresh.modules():
        if isinstance(part, Linear | RMSNorm):
            part.to(torch.float32 if isinstance(part, RMSNorm) else dtype)
    return fresh
