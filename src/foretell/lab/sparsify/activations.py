"""What the matrices of a model read on calibration text, one block at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int

from foretell.lab.quantize.base import Role, linears
from foretell.lab.quantize.calibration import observed, run_block
from foretell.model.block.activation import gated
from foretell.model.block.decoder import decoder_rope_tables
from foretell.model.block.layer import DecoderBlock, FeedForward
from foretell.model.config.model import ModelConfig
from foretell.model.load.build import build_block, build_without_blocks
from foretell.model.load.weights import Weights

Tensor = torch.Tensor
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BlockActivations:
    """Inputs of the matrices of a block for all calibration tokens, float32."""

    index: int
    block: DecoderBlock
    inputs: dict[Role, Float[Tensor, "t i"]]

    def gates(self) -> Float[Tensor, "t f"]:
        """The activated gates of all neurons."""
        mlp = self.block.mlp
        assert isinstance(mlp, FeedForward)
        with torch.inference_mode():
            gate = self.inputs["gate_up"] @ mlp.gate_up.weight.chunk(2)[0].T
            return gated(gate, torch.ones_like(gate), mlp.activation)


def block_activations(config: ModelConfig, weights: Weights, tokens: Int[Tensor, "b s"]) -> Iterator[BlockActivations]:
    """The activations of one block after the other, in float32."""
    ropes = decoder_rope_tables(config)
    with torch.inference_mode():
        x = build_without_blocks(config, weights, torch.float32, _CPU).embed(tokens.flatten()).view(*tokens.shape, -1)
    for i in range(config.layers):
        block = build_block(config, i, weights, torch.float32, _CPU)
        seen: dict[Role, list[Tensor]] = {role: [] for role in linears(block)}
        with observed(block, partial(_add, seen)):
            x = run_block(config, ropes, i, block, x)
        yield BlockActivations(i, block, {role: torch.cat(parts) for role, parts in seen.items()})
        weights.release_pages()


def _add(seen: Mapping[Role, list[Tensor]], role: Role, read: Tensor) -> None:
    seen[role].append(read.flatten(0, -2).float())
