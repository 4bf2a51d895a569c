"""Experts in files: GGUF tensors of all experts of a layer, and MXFP4 blocks, give the logits of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from test_decoder import YARN

from foretell.core.sampling import SamplingParams
from foretell.engine.request import Request
from foretell.load import load
from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels import structures
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import PANEL_KINDS
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import load_native
from foretell.model.load.quantization_config import parse_quantization
from foretell.model.load.quantized import QuantizedWeights
from foretell.model.load.weights import SafetensorsWeights, Weights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import letter_codec
from helpers import all_logits, chain_tree, random_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.15,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 64}
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "gate": "ffn_gate_inp", "router": "ffn_gate_inp", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "shared_expert_gate": "ffn_gate_inp_shexp", "gate_proj": "ffn_gate_shexp",
    "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp",
}  # fmt: skip
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
         "lm_head.weight": "output.weight"}  # fmt: skip
GGUF_ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
GPT_OSS = {"sliding_window": 8, "rope_parameters": YARN | {"truncate": False}}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": ("MixtralConfig", {}),
    "qwen2_moe": ("Qwen2MoeConfig", SHARED),
    "qwen3_moe": ("Qwen3MoeConfig", {"norm_topk_prob": True}),
    "gpt_oss": ("GptOssConfig", GPT_OSS),
}


def oracle_of(name: str) -> Any:
    """A random model of transformers whose every vector differs from its initial value."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **values})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 or "bias" in parameter.__class__.__name__:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def stored(kind: Kind, values: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """The bytes of a tensor in a file, and what can be read back."""
    raw = quantize(values.detach().contiguous().numpy(), kind)
    return raw, torch.from_numpy(dequantize(raw, kind).astype(np.float32))


def experts_of(name: str, key: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of a fused tensor of transformers: [experts, outputs, inputs] by name in GGUF."""
    kind, gpt = "bias" if key.endswith("_bias") else "weight", name == "gpt_oss"
    if gpt and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if "down" in key:
        return [(f"ffn_down_exps.{kind}", tensor)]
    half = tensor.shape[1] // 2
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if gpt else (tensor[:, :half], tensor[:, half:])
    return [(f"ffn_gate_exps.{kind}", gate), (f"ffn_up_exps.{kind}", up)]


def interleaved(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """llama.cpp's order of a Llama's query and key rows: rotary pairs side by side."""
    return weight.view(-1, 2, dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, name: str, oracle: Any, kind: Kind) -> None:
    """A GGUF file of the model, its experts stored as `kind`, which the model then has, too."""
    c = oracle.config
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES[name])
    for key, value in {
        "vocab_size": c.vocab_size, "embedding_length": c.hidden_size, "block_count": c.num_hidden_layers,
        "head_count": c.num_attention_heads, "head_count_kv": c.num_key_value_heads, "key_length": c.head_dim or 16,
        "feed_forward_length": c.intermediate_size, "context_length": c.max_position_embeddings,
        "layer_norm_rms_eps": c.rms_norm_eps, "rope_freq_base": c.rope_parameters["rope_theta"],
        "expert_count": 4, "expert_used_count": 2,
        **({} if name == "mixtral" else {"expert_feed_forward_length": 32}),
        **({"expert_shared_feed_forward_length": 64} if name == "qwen2_moe" else {}),
        **({"sliding_window": 8, "rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0,
            "rope_scaling_orig_ctx_len": 32} if name == "gpt_oss" else {}),
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    for key, tensor in oracle.state_dict().items():
        parts = key.split(".")
        if key in OUTER:
            writer.add_tensor(OUTER[key], tensor.numpy())
        elif "experts" in parts:
            for where, part in experts_of(name, key, tensor):
                raw, back = stored(kind if where.endswith("weight") else Kind.F32, part)
                part.copy_(back)
                writer.add_tensor(f"blk.{parts[2]}.{where}", raw, raw_dtype=kind if where.endswith("weight") else None)
        else:
            stem = "attn_sinks.weight" if parts[-1] == "sinks" else f"{NAMES.get(parts[-2])}.{parts[-1]}"
            if name == "gpt_oss":
                stem = stem.replace("ffn_norm", "post_attention_norm")
            if name == "mixtral" and parts[-2] in ("q_proj", "k_proj"):
                tensor = interleaved(tensor, 16)
            writer.add_tensor(f"blk.{parts[2]}.{stem}", tensor.squeeze(0).numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def decoder_of(path: Path) -> Decoder:
    """The decoder of a GGUF file or a directory."""
    weights: Weights
    if path.suffix == ".gguf":
        file = GGUF(path)
        config = gguf_config(file)
        weights = GGUFWeights(file, config)
    else:
        raw = json.loads((path / "config.json").read_text())
        config, quantization = from_hf(raw), parse_quantization(raw, "config.json")
        weights = SafetensorsWeights(path) if quantization is None else QuantizedWeights(path, quantization)
    return build_decoder(config, weights, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.MXFP4])
def test_experts_in_gguf_give_the_logits_of_transformers(name: str, kind: Kind, tmp_path: Path) -> None:
    if kind == Kind.MXFP4 and name != "gpt_oss":
        pytest.skip("MXFP4 is for gpt-oss")
    oracle, text = oracle_of(name), random_tokens(40, 64)
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", name, oracle, kind)
        wanted = oracle(torch.tensor([text])).logits[0]
    found = all_logits(decoder_of(tmp_path / "model.gguf"), text)
    torch.testing.assert_close(torch.from_numpy(found), wanted.double(), rtol=0, atol=1e-4)


def hf_mxfp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and scales of gpt-oss's checkpoint for float matrices [experts, outputs, inputs], and what they mean."""
    raw, back = stored(Kind.MXFP4, matrix)
    blocks = torch.from_numpy(raw).view(*raw.shape[:-1], -1, 17)
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    levels = torch.cat((low, high), -1).view(*low.shape[:-1], 16, 2)
    return levels[..., 0] | levels[..., 1] << 4, blocks[..., 0].contiguous(), back


def as_mxfp4(path: Path) -> None:
    """Say in config.json that the experts are quantised."""
    said = json.loads((path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(said))


def test_mxfp4_experts_in_safetensors_give_the_logits_of_transformers(tmp_path: Path) -> None:
    oracle, text = oracle_of("gpt_oss"), random_tokens(40, 64)
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, back = hf_mxfp4(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
        oracle.state_dict()[name].copy_(back.transpose(1, 2))
        library = transformers.integrations.mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        torch.testing.assert_close(library, back.transpose(1, 2), rtol=0, atol=0)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    as_mxfp4(tmp_path)
    with torch.no_grad():
        wanted = oracle(torch.tensor([text])).logits[0]
    found = all_logits(decoder_of(tmp_path), text)
    torch.testing.assert_close(torch.from_numpy(found), wanted.double(), rtol=0, atol=1e-4)


def test_a_layer_without_scales_is_named(tmp_path: Path) -> None:
    oracle_of("gpt_oss").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = hf_mxfp4(tensors.pop(name).transpose(1, 2))[0]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    as_mxfp4(tmp_path)
    with pytest.raises(ValueError, match=r"no model\.layers\.0\.mlp\.experts\.down_proj_scales"):
        decoder_of(tmp_path)


@pytest.mark.parametrize(
    ("kind", "said", "word"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"n_group": 3}, "3 groups"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind: str, said: Mapping[str, Any], word: str) -> None:
    sizes = SIZES | {"n_routed_experts": 16, "topk_group": 1, "n_group": 2}
    from_hf({"model_type": kind, **sizes})
    with pytest.raises(ValueError, match=word):
        from_hf({"model_type": kind, **sizes, **said})


@pytest.mark.parametrize("key", ["swiglu_limit", "swiglu_alpha"])
def test_other_constants_of_gpt_oss_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} .*no other value is supported"):
        from_hf({"model_type": "gpt_oss", **SIZES, key: 3.5})


def down_kind(network: NativeDecoder) -> int:
    """How the first expert's last matrix is packed."""
    experts = structures.Experts.from_address(network.stack.layers[0].experts)
    return int(structures.Weight.from_address(experts.down).kind)


@pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")
@pytest.mark.parametrize(("name", "kind"), [("gpt_oss", Kind.MXFP4), ("qwen2_moe", Kind.Q8_0), ("mixtral", Kind.F32)])
def test_blocks_of_a_file_run_on_the_kernels_with_the_bits_of_the_widened_model(
    name: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", name, oracle_of(name), kind)
    file = GGUF(tmp_path / "model.gguf")
    config, text = gguf_config(file), random_tokens(20, 64)
    widened = NativeDecoder(decoder_of(tmp_path / "model.gguf"), "float32")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    wanted = DecoderRunner(widened).forward([0], chain_tree(text))
    for _ in ("packed from the file", "read from the cache of packed weights"):
        stored = load_native(config, GGUFWeights(file, config), "float32")
        assert down_kind(stored) == PANEL_KINDS.index(kind.name)
        found = DecoderRunner(stored).forward([0], chain_tree(text))
        assert torch.equal(found.logits, wanted.logits) and found.experts == wanted.experts


def test_a_gpt_oss_directory_answers_as_transformers_does(tmp_path: Path) -> None:
    oracle, text = oracle_of("gpt_oss"), random_tokens(10, 64)
    oracle.save_pretrained(tmp_path)
    letter_codec(64).tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt, wanted = list(text), list[int]()
    with torch.no_grad():
        for _ in range(64):
            wanted.append(int(oracle(torch.tensor([prompt + wanted])).logits[0, -1].argmax()))
    for method in ("autoregressive", "prompt_lookup"):
        engine = load(str(tmp_path), "float32").engine(method)
        found = engine.complete([Request(prompt, SamplingParams(temperature=0), max_new_tokens=64)])[0]
        assert list(found.tokens) == wanted
