"""The decoder against transformers: equal logits from the same checkpoint, for chains in chunks and for trees."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from foretell.core.tree import tree_from_lists
from foretell.model.block.decoder import Decoder
from foretell.model.config.readers.hf import from_hf
from foretell.model.load.build import build_decoder
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from helpers import LLAMA3, chain_tree, oracle_logits, random_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
       "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
       "n_shared_experts": 2, "n_group": 4, "topk_group": 2}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama linear rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0,
    "rope_theta": 5000.0}}),
    "llama biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral window": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3 biased": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma2 biased": ("Gemma2Config", {"head_dim": 8, "attention_bias": True}),
    "gemma2 capped": ("Gemma2Config", {"head_dim": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3 window": (
        "SmolLM3Config",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8, "pad_token_id": 0},
    ),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": 8}),
    "phi3 longrope": ("Phi3Config", {"pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 128}}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
    "granite": (
        "GraniteConfig", {"embedding_multiplier": 3.0, "logits_scaling": 0.8, "residual_multiplier": 0.6,
        "attention_multiplier": 0.4, "mlp_bias": True},
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 5, "residual_multiplier": 0.6, "logits_scaling": 0.8}),
    "granitemoeshared": ("GraniteMoeSharedConfig", {"num_local_experts": 5, "shared_intermediate_size": 20}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2_moe partly dense": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe biased": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 8, "attention_bias": True, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8,
    "rope_parameters": YARN | {"truncate": False}}),
    "deepseek_v2": ("DeepseekV2Config", MLA | {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5}),
    "deepseek_v2 lite": ("DeepseekV2Config", MLA | {"q_lora_rank": None,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek_v3": ("DeepseekV3Config", MLA | {"first_k_dense_replace": 1, "num_mtp_layers": 0}),
    "deepseek_v3 yarn": ("DeepseekV3Config", MLA | {"first_k_dense_replace": 2, "rope_interleave": False,
    "num_mtp_layers": 0, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}}),
    "glm4_moe": ("Glm4MoeConfig", MLA | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True,
    "num_key_value_heads": 2, "num_mtp_layers": 0}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", MLA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0}}),
}  # fmt: skip


def oracle_of(name: str) -> Any:
    """A random model of transformers whose every vector differs from its initial value."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SIZES | values))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model


def read(path: Path) -> Decoder:
    config = from_hf(json.loads((path / "config.json").read_text()))
    return build_decoder(config, SafetensorsWeights(path), torch.float32, torch.device("cpu"))


def random_parents(nodes: int, seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    return [-1, *(int(generator.integers(0, node)) for node in range(1, nodes))]


def check_logits(decoder: Network, oracle: Any, chunks: Sequence[int], atol: float = 1e-4) -> None:
    """Logits of chunks of a text, and of a tree after it, are those of transformers."""
    runner, text = DecoderRunner(decoder), random_tokens(sum(chunks), SIZES["vocab_size"])
    wanted, at = oracle_logits(oracle, text), 0
    assert wanted.std() > 0.3
    for size in chunks:
        found = runner.forward([0], chain_tree(text[at : at + size])).logits
        torch.testing.assert_close(found, wanted[at : at + size], rtol=0, atol=atol)
        runner.commit(0, range(size))
        at += size
    tokens, parents = random_tokens(14, 61, seed=3), random_parents(14, seed=4)
    tree = tree_from_lists([tokens], [parents])
    found = runner.forward([0], tree).logits
    for node in range(14):
        path = [tokens[i] for i in tree.ancestors(0, node)]
        torch.testing.assert_close(found[node], oracle_logits(oracle, [*text, *path])[-1], rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    check_logits(read(tmp_path), oracle, (7, 1, 20, 12))
