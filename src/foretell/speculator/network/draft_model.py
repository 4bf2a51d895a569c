"""A trained draft model: a few decoder blocks between the target's embedding and head."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field

from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.structures import Precision
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.vocabulary import ReducedVocabulary
from foretell.model.training.full_forward import forward_blocks
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.blocks import BlocksConfig, BlocksNetwork, blank_norm


class DraftModelConfig(BlocksConfig):
    """Configuration of a trained draft model; `model` has fewer layers than the target."""

    kind: Literal["draft_model", "pard", "mtp", "assistant"] = "draft_model"
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


class DraftNetwork(BlocksNetwork):
    """A small decoder that reads tokens only, none of the target's hidden states.

    Its blocks and its final norm are trained and stored.
    """

    kind = "draft_model"
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.norm = blank_norm(config.model)

    def init_from_target(self, target: Decoder, blocks: Sequence[int]) -> None:
        """Copy these blocks of the target, in this order, and its final norm."""
        for mine, i in zip(self.blocks, blocks, strict=True):
            mine.load_state_dict(target.blocks[i].state_dict())
        self.norm.load_state_dict(target.norm.state_dict())

    def adapt_state_dict(self, smaller: Speculator) -> dict[str, torch.Tensor]:
        """The state dict of a network with fewer blocks, each block where this network has the same block of the
        target; the other blocks get output matrices of zero, so that they leave the residual stream as it is.
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
            elif part == "scale":
                out[name] = torch.ones_like(tensor)
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
        return self.decoder(self.norm, dtype)

    def to_network(self, precision: Precision | None = None) -> Network:
        """A copy for drafting, over the target's whole vocabulary; see `BlocksNetwork.run`."""
        run = self.run(self.norm, precision)
        return run if self.token_of is None else ReducedVocabulary(run, self.token_of)

    def to_runner(self, precision: Precision | None = None) -> DecoderRunner:
        """`to_network` with an empty cache."""
        return DecoderRunner(self.to_network(precision))
