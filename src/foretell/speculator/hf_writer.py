"""Writes a decoder as a Hugging Face model directory: a fine-tuned target, or a draft model for other engines."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.modules import to_weights
from foretell.model.block.spec import LinearWeights
from foretell.model.block.weights import further_fields, map_linears, tensors_of
from foretell.model.config.compressed import LowRank
from foretell.model.config.model import Activation, ModelConfig, RopeConfig
from foretell.model.load.weights import EMBEDDING, FINAL_NORM, HEAD
from foretell.speculator.checkpoint import write_weights
from foretell.speculator.config_file import CONFIG
from foretell.tokenizer.codec import TextCodec
from foretell.utils.paths import replace_file

_ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}


def write_hf(
    folder: Path, decoder: Decoder, codec: TextCodec | None = None, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> None:
    """Write `config.json`, `model.safetensors` and, with a codec, the tokenizer; files of the same names are replaced,
    each atomically. `more`: further keys of the configuration.

    Raises:
        ValueError: the network is not of the Llama architecture.
    """
    config = llama_config(decoder.config, dtype) | more
    tensors = {name: t.detach().to("cpu", dtype).clone() for name, t in llama_tensors(decoder).items()}
    write_directory(folder, config, tensors, codec)


def write_directory(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], codec: TextCodec | None
) -> None:
    """Write a configuration, weights and, with a codec, the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, tensors)
    replace_file(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    if codec is not None:
        write_codec(folder, codec)


def llama_config(c: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The configuration of a Llama model as transformers writes it.

    Raises:
        ValueError: the network has a part that a Llama model has not.
    """
    unsupported = {
        "experts": c.experts is not None,
        "latent attention": c.latent is not None,
        "norms of queries and keys": c.qk_norm,
        "norms after its sub-layers": c.post_norms or c.norm_offset != 0,
        "parallel blocks": c.parallel_blocks,
        "a sliding window": c.window > 0,
        "soft caps": c.attention_softcap > 0 or c.logit_softcap > 0,
        "a scaled embedding": c.embedding_scale != 1,
        "biases on some attention matrices only": c.qkv_bias != c.output_bias,
        "an attention scale of its own": c.scale != c.head_dim**-0.5,
        "no gate in its feed-forward": not c.gated,
    }
    own = further_fields(c) - {"attention_shortcut", "mlp_shortcut"}
    unsupported |= {f"weights that Llama has not ({name})": True for name in sorted(own)}
    unsupported_part = next((part for part, present in unsupported.items() if present), None)
    if unsupported_part is not None:
        raise ValueError(
            f"only networks of the Llama architecture can be written as a Hugging Face directory, and this "
            f"{c.architecture} has {unsupported_part}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": _ACTIVATIONS[c.activation],
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": c.tied,
        "bos_token_id": c.bos,
        "eos_token_id": list(c.eos) if len(c.eos) != 1 else c.eos[0],
        "torch_dtype": str(dtype).removeprefix("torch."),
        **_rope(c),
        **({} if c.mask_token is None else {"pard_token": c.mask_token, "spd_type": "pard"}),
    }


def _rope(c: ModelConfig) -> dict[str, Any]:
    rope = c.rope
    if rope is None or rope.divisors or rope.fraction != 1 or rope.kind not in ("default", "linear", "llama3"):
        kind = (
            "no rotary positions" if rope is None else f"rotary positions of the kind {rope.kind}, divided one by one"
        )
        raise ValueError(f"only plain, linear and llama3 rotary positions can be written, and this model has {kind}")
    return {"rope_theta": rope.theta, "rope_scaling": _scaling(rope)}


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def llama_tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The weights under the names of Hugging Face, with fused matrices split."""
    c = decoder.config
    out: dict[str, torch.Tensor] = {
        EMBEDDING: decoder.embedding,
        FINAL_NORM: decoder.norm.weight,
    }
    if not c.tied:
        out[HEAD] = decoder.head.weight
    if c.shortcuts:
        raise ValueError("a model with a sliced residual stream cannot be written as a Hugging Face directory")
    whole = replace(c, architecture="llama", low_rank=LowRank())
    for i, block in enumerate(decoder.blocks):
        assert isinstance(block, DecoderBlock)
        weights = map_linears(to_weights(block), lambda path, linear: _product(linear))
        out |= tensors_of(whole, i, weights)
    return out


def _product(linear: LinearWeights) -> LinearWeights:
    """The layer with the product of its factors in their place."""
    if not isinstance(linear.factor, torch.Tensor):
        return linear
    parts = [part @ linear.factor for part in linear.parts if isinstance(part, torch.Tensor)]
    return LinearWeights(tuple(parts), linear.bias)


def write_codec(folder: Path, codec: TextCodec) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; files of these names are replaced."""
    replace_file(folder / "tokenizer.json", codec.tokenizer.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": codec.bos, "eos_token": codec.eos}
    config["chat_template"] = codec.chat_template
    replace_file(folder / "tokenizer_config.json", json.dumps({k: v for k, v in config.items() if v}, indent=2) + "\n")
