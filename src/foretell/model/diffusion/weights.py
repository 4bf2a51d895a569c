"""Reads the decoder of a masked diffusion checkpoint."""

import re
from pathlib import Path

import torch
from jaxtyping import Float

from foretell.model.block.decoder import Decoder
from foretell.model.diffusion.config import DiffusionConfig
from foretell.model.load.build import build_decoder
from foretell.model.load.weights import SafetensorsWeights, Weights

_OUTER = {
    "model.embed_tokens.weight": "model.transformer.wte.weight",
    "model.norm.weight": "model.transformer.ln_f.weight",
    "lm_head.weight": "model.transformer.ff_out.weight",
}
_IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def llada_name(name: str) -> str:
    """LLaDA's name of a tensor that Llama calls `name`."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _OUTER.get(name, name)
    return f"model.transformer.blocks.{block[1]}.{_IN_BLOCK.get(block[2], block[2])}.weight"


class _LladaWeights(Weights):
    """The tensors of LLaDA under Llama's names."""

    def __init__(self, weights: Weights) -> None:
        self.source, self.files, self.mapped, self._weights = weights.source, weights.files, weights.mapped, weights

    def get(self, name: str) -> Float[torch.Tensor, "*shape"] | None:
        """The tensor that Llama calls `name`, or None."""
        return self._weights.get(llada_name(name))


def read_decoder(folder: Path, config: DiffusionConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The decoder of a checkpoint directory.

    Raises:
        ValueError: a file is missing or damaged, or a tensor is missing or has another shape.
    """
    stored = SafetensorsWeights(folder)
    stored.check_layers(config.model.layers)
    weights: Weights = stored
    if weights.get("model.transformer.wte.weight") is not None:
        weights = _LladaWeights(weights)
    decoder = build_decoder(config.model, weights, dtype, device)
    weights.release_pages()
    return decoder
