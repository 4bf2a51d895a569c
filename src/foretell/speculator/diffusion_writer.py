"""Writes a masked diffusion model as a directory in the format of Dream."""

from collections.abc import Collection
from pathlib import Path

import torch

from foretell.speculator.hf_writer import llama_config, llama_tensors, write_directory
from foretell.speculator.network.masked_diffusion import MaskedDiffusion
from foretell.tokenizer.codec import TextCodec


def choose_mask_token(codec: TextCodec, eos: Collection[int]) -> int:
    """The last special token that the chat template does not use.

    Raises:
        ValueError: there is none.
    """
    free = codec.unused_special_tokens(eos)
    if not free:
        raise ValueError("a mask token must be a special token that the chat template does not use, and there is none")
    return free[-1]


def write_dream(folder: Path, network: MaskedDiffusion, codec: TextCodec | None) -> None:
    """Write configuration, weights (bfloat16) and tokenizer. Dream's attention has biases: they are zero.

    Raises:
        ValueError: the network is not of the Llama architecture.
    """
    decoder, dtype = network.to_decoder(torch.bfloat16), torch.bfloat16
    c = decoder.config
    config = llama_config(c, dtype) | {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "mask_token_id": network.config.mask_token,
        "use_sliding_window": False,
    }
    tensors = {name: t.detach().to("cpu", dtype).clone() for name, t in llama_tensors(decoder).items()}
    for i in range(c.layers if not c.qkv_bias else 0):
        for letter, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            tensors[f"model.layers.{i}.self_attn.{letter}_proj.bias"] = torch.zeros(heads * c.head_dim, dtype=dtype)
    write_directory(folder, config, tensors, codec)
