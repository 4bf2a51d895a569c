"""Gemma 4, Llama 4 and Ministral 3 against transformers: windows, chunks and shared keys crossed by chunks of a text
and by trees.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from test_decoder import SIZES, YARN, check_logits, read

from foretell.model.decoder import Decoder

S, F = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 7, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8,
    "layer_types": [S, S, F, S, F, S, F], "vocab_size_per_layer_input": 61, "pad_token_id": 0,
}  # fmt: skip
NO_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 3, "layer_types": [S, F, F]}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 3, "floor_scale": 4,
    "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 shared": ("Gemma4TextConfig", GEMMA | {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True}),
    "gemma4 k is v": ("Gemma4TextConfig", GEMMA | NO_INPUTS | {"attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0, "attention_bias": True}),
    "gemma4 experts": ("Gemma4TextConfig", GEMMA | NO_INPUTS | {"enable_moe_block": True, "num_experts": 5,
    "top_k_experts": 2, "moe_intermediate_size": 24}),
    "llama4": ("Llama4TextConfig", LLAMA4),
    "llama4 two experts": ("Llama4TextConfig", LLAMA4 | {"num_experts_per_tok": 2, "moe_layers": [0, 3],
    "use_qk_norm": False, "attention_bias": True, "no_rope_layers": [0, 1, 1, 0]}),
    "llama4 dense": ("Llama4TextConfig", LLAMA4 | {"moe_layers": [], "attn_temperature_tuning": False}),
    "ministral3": ("Ministral3Config", {"head_dim": 8, "pad_token_id": 0, "rope_parameters": YARN | {
    "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}),
    "ministral3 window": ("Ministral3Config", {"head_dim": 8, "pad_token_id": 0, "sliding_window": 8}),
}  # fmt: skip


@cache
def oracle_of(name: str) -> Any:
    """A random model of transformers whose every vector differs from its initial value."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SIZES | values))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *(b for n, b in model.named_buffers() if "layer_scalar" in n)]:
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@cache
def decoder_of(name: str) -> Decoder:
    folder = Path(mkdtemp(prefix="foretell-family-"))
    oracle_of(name).save_pretrained(folder)
    return read(folder)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    check_logits(decoder_of(name), oracle_of(name), (7, 1, 1, 19, 12))
