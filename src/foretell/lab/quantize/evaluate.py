"""How far a quantised model is from its source: on text held back, in float32, one block at a time."""

import torch
from jaxtyping import Float, Int

from foretell.lab.quantize.calibration import BlocksOnText
from foretell.model.block.decoder import Decoder
from foretell.model.config.model import ModelConfig
from foretell.model.load.build import build_without_blocks
from foretell.model.load.weights import Weights
from foretell.verify.comparison import Comparison, compare_logits

Tensor = torch.Tensor
_CHUNK = 256
"""Positions whose distributions are compared at once."""


def compare(
    source: tuple[ModelConfig, Weights], quantized: tuple[ModelConfig, Weights], tokens: Int[Tensor, "b s"]
) -> Comparison:
    """Compare the next-token distributions of two models."""
    (p, p_states), (q, q_states) = (_final_states(c, w, tokens) for c, w in (source, quantized))
    targets = tokens[:, 1:].flatten()
    parts = [slice(at, at + _CHUNK) for at in range(0, len(targets), _CHUNK)]
    return compare_logits((p.logits(p_states[part]), q.logits(q_states[part]), targets[part]) for part in parts)


@torch.inference_mode()
def _final_states(
    config: ModelConfig, weights: Weights, tokens: Int[Tensor, "b s"]
) -> tuple[Decoder, Float[Tensor, "t d"]]:
    """The model without its blocks, and the input of its head at all positions but the last of a sequence."""
    shell = build_without_blocks(config, weights, torch.float32, torch.device("cpu"))
    walk = BlocksOnText(config, weights, shell.embed(tokens.flatten()).view(*tokens.shape, -1))
    for _ in walk:
        pass
    assert walk.states is not None
    return shell, shell.final_norm(walk.states)[:, :-1].flatten(0, 1)
