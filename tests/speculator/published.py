"""Small checkpoints by the schemas of other projects, written afresh for every test."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foretell.draft.network.base import TargetCard
from foretell.model.ends import Ends

D, V, LAYERS = 8, 23, 6
CARD = TargetCard(name="tiny", fingerprint="", hidden=D, vocab=V, layers=LAYERS)
Tensors = dict[str, torch.Tensor]


def ends(seed: int = 0) -> Ends:
    return Ends(matrix(V, D, seed=seed), matrix(V, D, seed=seed + 1))


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
