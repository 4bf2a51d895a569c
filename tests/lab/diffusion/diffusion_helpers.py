"""Tiny checkpoints of masked diffusion models, and an independent implementation of their forward pass."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from command import tiny_tokenizer
from foretell.lab.diffusion.load import DiffusionModel, load_diffusion

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, CONTEXT = 16, 4, 2, 4, 24, 2, 96
LLADA: Mapping[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": HIDDEN, "n_heads": HEADS,
    "n_kv_heads": KV_HEADS, "n_layers": LAYERS, "mlp_hidden_size": FFN, "max_sequence_length": CONTEXT,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False, "block_type": "llama",
    "activation_type": "silu", "layer_norm_type": "rms", "rope": True, "include_bias": False,
    "include_qkv_bias": False,
}  # fmt: skip
DREAM: Mapping[str, Any] = {
    "model_type": "Dream", "architectures": ["DreamModel"], "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS, "intermediate_size": FFN,
    "max_position_embeddings": CONTEXT, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
SDAR: Mapping[str, Any] = {**DREAM, "model_type": "sdar", "head_dim": HEAD_DIM, "block_size": 4}
FAST_DLLM: Mapping[str, Any] = {**DREAM, "model_type": "Fast_dLLM_Qwen", "bd_size": 4}
_SHIFTED = ("Dream", "Fast_dLLM_Qwen")
_LLADA_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip


def tensors(kind: str, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the names of Llama."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    out = {"model.embed_tokens.weight": 4 * random(vocab, HIDDEN), "model.norm.weight": 1 + random(HIDDEN)}
    out["lm_head.weight"] = 3 * random(vocab, HIDDEN)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, HIDDEN), ("self_attn.k_proj", kv, HIDDEN), ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, q), ("mlp.gate_proj", FFN, HIDDEN), ("mlp.up_proj", FFN, HIDDEN),
            ("mlp.down_proj", HIDDEN, FFN),
        ):  # fmt: skip
            out[f"{at}{name}.weight"] = random(rows, columns)
            if kind in _SHIFTED and name[-6] in "qkv" and "self_attn" in name:
                out[f"{at}{name}.bias"] = random(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{name}.weight"] = 1 + random(HIDDEN)
        if kind == "sdar":
            out |= {f"{at}self_attn.{n}_norm.weight": 1 + random(HEAD_DIM) for n in "qk"}
    return out


def llada_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under LLaDA's names."""
    out = {
        "model.transformer.wte.weight": weights["model.embed_tokens.weight"],
        "model.transformer.ln_f.weight": weights["model.norm.weight"],
        "model.transformer.ff_out.weight": weights["lm_head.weight"],
    }
    for i in range(LAYERS):
        for ours, theirs in _LLADA_NAMES.items():
            out[f"model.transformer.blocks.{i}.{theirs}.weight"] = weights[f"model.layers.{i}.{ours}.weight"]
    return out


def save(folder: Path, base: Mapping[str, Any], seed: int = 0, **changed: Any) -> Path:
    """Write a checkpoint of random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = 260
    config = {**base, "vocab_size": vocab, "mask_token_id": vocab - 1, "eos_token_id": 256, **changed}
    weights = tensors(base["model_type"], vocab, seed)
    save_file(llada_names(weights) if base["model_type"] == "llada" else weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


class Reference:
    """The forward pass in a few lines: one sequence, everything at once."""

    def __init__(self, model: DiffusionModel, base: Mapping[str, Any], seed: int = 0) -> None:
        self.kind, self.mask, self.block = base["model_type"], model.config.mask, model.config.block
        self.weights = {n: t.double() for n, t in tensors(self.kind, model.config.model.vocab, seed).items()}
        self.theta, self.eps = base["rope_theta"], base["rms_norm_eps"]

    def logits(self, token: torch.Tensor) -> torch.Tensor:
        """Logits of the token at every position; the mask is never predicted."""
        w, n = self.weights, len(token)
        x = w["model.embed_tokens.weight"][token]
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            h = self._norm(x, w[at + "input_layernorm.weight"])
            q, k, v = (self._heads(at + f"self_attn.{letter}", h) for letter in "qkv")
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
            mask = None
            if self.block:
                number = torch.arange(n) // self.block
                mask = number[None] <= number[:, None]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).reshape(n, -1)
            x = x + mixed @ w[at + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[at + "post_attention_layernorm.weight"])
            gate, up = (h @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
        out: torch.Tensor = self._norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
        if self.kind in _SHIFTED:
            out = torch.cat((out[:1], out[:-1]))
        out[:, self.mask] = float("-inf")
        return out

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight
        return normed

    def _heads(self, name: str, h: torch.Tensor) -> torch.Tensor:
        part = h @ self.weights[f"{name}_proj.weight"].T + self.weights.get(f"{name}_proj.bias", 0)
        part = part.view(len(h), -1, HEAD_DIM).transpose(0, 1)
        if f"{name}_norm.weight" in self.weights:
            part = self._norm(part, self.weights[f"{name}_norm.weight"])
        if name[-1] == "v":
            return part
        angle = torch.arange(len(h))[:, None] * self.theta ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM).double()
        one, two = part.chunk(2, -1)
        return torch.cat((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), -1)


def load_double(folder: Path) -> DiffusionModel:
    """A checkpoint in float64."""
    found = load_diffusion(str(folder))
    found.predictor.decoder.double()
    return found
