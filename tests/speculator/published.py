"""Small checkpoints in other projects' formats, written anew for every test."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import TargetInfo

D, V, LAYERS = 8, 23, 6
CARD = TargetInfo(name="tiny", fingerprint="", hidden=D, vocab=V, layers=LAYERS)
Tensors = dict[str, torch.Tensor]


def embedding_and_head(seed: int = 0) -> EmbeddingAndHead:
    return EmbeddingAndHead(matrix(V, D, seed=seed), matrix(V, D, seed=seed + 1))


def matrix(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def drawn(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {name: matrix(*shape, seed=100 + i) for i, (name, shape) in enumerate(shapes.items())}


def put(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / file)
    return folder


def authors_medusa(heads: int = 3, blocks: int = 2) -> tuple[dict[str, Any], Tensors]:
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(heads):
        for i in range(blocks):
            shapes |= {f"{h}.{i}.linear.weight": (D, D), f"{h}.{i}.linear.bias": (D,)}
        shapes[f"{h}.{blocks}.weight"] = (V, D)
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    return config, drawn(shapes)


def vllm_medusa(
    heads: int = 2, kept: int = V, biased: bool = False, shared: bool = False
) -> tuple[dict[str, Any], Tensors]:
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(heads):
        shapes[f"blocks.{h}.layers.0.weight"] = (D, D)
        if biased:
            shapes[f"blocks.{h}.layers.0.bias"] = (D,)
        if not shared or h == 0:
            shapes[f"lm_heads.{h}.weight"] = (kept, D)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": D,
        "vocab_size": V,
        "num_heads": heads,
        "num_hidden_layers": 1,
        "truncated_vocab_size": kept,
        "medusa_fc_bias": biased,
        "original_lm_head": shared,
    }
    tensors = drawn(shapes)
    if kept < V:
        tensors["token_map"] = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:kept]
    return config, tensors


def ibm_mlp(
    stages: int = 3,
    inner: int = 6,
    tied: bool = False,
    scale_input: bool = False,
    architecture: str = "MLPSpeculatorPreTrainedModel",
) -> tuple[dict[str, Any], Tensors]:
    width = inner or D
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(1 if tied else stages):
        shapes |= {f"emb.{i}.weight": (V, width), f"head.{i}.weight": (V, width)}
        shapes |= {f"ln.{i}.weight": (width,), f"ln.{i}.bias": (width,)}
    for i in range(2 if tied else stages):
        shapes[f"proj.{i}.weight"] = (width, D if i == 0 else width)
    config = {
        "architectures": [architecture],
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "emb_dim": D,
        "inner_dim": inner,
        "n_predict": stages,
        "top_k_tokens_per_head": [4, 3, 2][:stages],
        "n_candidates": 5,
        "tie_weights": tied,
        "scale_input": scale_input,
    }
    return config, drawn(shapes)


LAYER = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "vocab_size": V,
}


def layer_shapes(
    at: str, inputs: int, norms: tuple[str, ...], head_dim: int, biased: bool = False
) -> dict[str, tuple[int, ...]]:
    rows = {"q": 4 * head_dim, "k": 2 * head_dim, "v": 2 * head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{at}.{n}.weight": (D,) for n in norms}
    for n, r in rows.items():
        shapes[f"{at}.self_attn.{n}_proj.weight"] = (r, inputs)
        if biased:
            shapes[f"{at}.self_attn.{n}_proj.bias"] = (r,)
    shapes[f"{at}.self_attn.o_proj.weight"] = (D, 4 * head_dim)
    shapes |= {f"{at}.mlp.{n}_proj.weight": (12, D) for n in ("gate", "up")}
    return shapes | {f"{at}.mlp.down_proj.weight": (D, 12)}


def eagle1(bias: bool = True, biased_qkv: bool = False, layers: int = 1) -> tuple[dict[str, Any], Tensors]:
    """As SafeAILab publishes it: under the architecture of its target, no first norm, a copy of the embedding."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (V, D), "fc.weight": (D, 2 * D)}
    if bias:
        shapes["fc.bias"] = (D,)
    for i in range(layers):
        norms = ("post_attention_layernorm",) + (("input_layernorm",) if i else ())
        shapes |= layer_shapes(f"layers.{i}", D, norms, D // 4, biased_qkv)
    config = {"architectures": ["LlamaForCausalLM"], **LAYER, "num_hidden_layers": layers, "bias": bias}
    return config, drawn(shapes) | {"embed_tokens.weight": embedding_and_head().embedding}


def eagle3(kept: int = 9, head_dim: int = 4, layer: str = "midlayer", aux: int = 3) -> tuple[dict[str, Any], Tensors]:
    """As SafeAILab and SpecForge publish it."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, aux * D), "norm.weight": (D,), "lm_head.weight": (kept, D)}
    shapes |= layer_shapes(layer, 2 * D, ("input_layernorm", "hidden_norm", "post_attention_layernorm"), head_dim)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "head_dim": head_dim, "draft_vocab_size": kept}
    tensors = drawn(shapes)
    if kept < V:
        tokens = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:kept].sort().values
        tensors["d2t"] = tokens - torch.arange(kept)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True)
    return config, tensors


def speculators_eagle3(kept: int = 9, **flags: Any) -> tuple[dict[str, Any], Tensors]:
    """As the `speculators` library saves it; `norm_before_residual` is absent unless asked for."""
    hidden_layers = flags.get("eagle_aux_hidden_state_layer_ids") or (2, 3, 3)
    config, tensors = eagle3(kept, layer="layers.0", aux=len(hidden_layers))
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = matrix(len(hidden_layers) * D, seed=70)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": matrix(D, seed=71 + i) for i in range(len(hidden_layers))}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    layer = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": kept,
        "target_hidden_size": None,
        **flags,
    }, tensors
