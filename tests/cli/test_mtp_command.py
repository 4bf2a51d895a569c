"""Target and multi-token prediction layer from one published checkpoint, on the command line.

The checkpoints know the next token by the last one alone, and their prediction layer by the token that it reads, so all
drafts are right, whatever the two add to that by their other parts, which are zero.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from command import expect_error, run_foretell, tiny_tokenizer

VOCAB, WIDTH, LAYERS = 260, 64, 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32, "max_position_embeddings": 256,
    "eos_token_id": VOCAB - 1, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
CONFIGS: dict[str, Any] = {
    "glm4_moe": transformers.Glm4MoeConfig(**COMMON, **MIXTURE, head_dim=16, use_qk_norm=True, attention_bias=True),
    "deepseek_v3": transformers.DeepseekV3Config(**(COMMON | {"num_key_value_heads": 4}), **MIXTURE, **LATENT),
    "qwen3_next": transformers.Qwen3NextConfig(
        **COMMON, head_dim=16, num_experts=8, num_experts_per_tok=2, shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "head_dim": 16, "global_head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False, "eos_token_id": VOCAB - 1, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
QWEN = {
    "mtp.fc": "eh_proj", "mtp.norm": "shared_head.norm", "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
}  # fmt: skip


def publish(folder: Path, kind: str) -> Path:
    """Write a checkpoint with the layer, whose names are the published ones."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.save_pretrained(folder)
    tensors, own = load_file(folder / "model.safetensors"), 0.0 if kind == "qwen3_next" else 1.0
    last, at = f"model.layers.{LAYERS - 1}.", "mtp.layers.0." if kind == "qwen3_next" else f"model.layers.{LAYERS}."
    layer = {name.replace(last, at): t for name, t in tensors.items() if name.startswith(last)}
    parts = {
        "eh_proj": torch.cat((torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)), 1),
        "shared_head.norm": tensors["model.norm.weight"],
        "enorm": torch.full((WIDTH,), own),
        "hnorm": torch.full((WIDTH,), own),
    }
    names = QWEN if kind == "qwen3_next" else {at + part: part for part in parts}
    layer |= {f"{name}.weight": parts[part] for name, part in names.items()}
    if kind != "qwen3_next":
        layer |= {f"{at}embed_tokens.weight": tensors["model.embed_tokens.weight"]}
        layer |= {f"{at}shared_head.head.weight": tensors["lm_head.weight"]}
    written = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
    whole = {
        name: torch.zeros_like(t) if name.endswith(written) else t.clone() for name, t in (tensors | layer).items()
    }
    whole["lm_head.weight"] *= 200
    save_file({name: t.bfloat16() if t.ndim > 1 else t for name, t in whole.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    return folder


def publish_assistant(target: Path, assistant: Path) -> None:
    """Write a model and its assistant, which reads the embedding alone."""
    torch.manual_seed(0)
    text = transformers.Gemma4TextConfig(**GEMMA)
    transformers.Gemma4ForCausalLM(text).save_pretrained(target)
    own = transformers.Gemma4TextConfig(**GEMMA, num_kv_shared_layers=2)
    config = transformers.Gemma4AssistantConfig(
        text_config=own, backbone_hidden_size=WIDTH, use_ordered_embeddings=True, num_centroids=10,
        centroid_intermediate_top_k=10, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Gemma4AssistantForCausalLM(config).save_pretrained(assistant)
    head = torch.randn(VOCAB, WIDTH) * 4
    for folder in (target, assistant):
        tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": head}
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = torch.zeros_like(tensors[name])
        if folder == assistant:
            tensors["pre_projection.weight"] = torch.cat((torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)), 1)
            tensors["masked_embedding.token_ordering"] = torch.randperm(VOCAB)
        save_file(tensors, folder / "model.safetensors")
    tiny_tokenizer(VOCAB).save(str(target / "tokenizer.json"))


def test_an_assistant_drafts_for_its_target(tmp_path: Path) -> None:
    target, assistant = tmp_path / "target", tmp_path / "assistant"
    publish_assistant(target, assistant)
    command = ("generate", "Hi", "--model", target, "--max-new-tokens", "24", "--ignore-eos", "--json", "--method")
    plain = json.loads(run_foretell(*command, "autoregressive").stdout)
    drafted = json.loads(run_foretell(*command, "mtp", "--draft-model", assistant).stdout)
    assert drafted["tokens"] == plain["tokens"] and drafted["tokens_per_pass"] > 2
    said = expect_error("generate", "Hi", "--model", target, "--method", "mtp")
    assert "and gemma4_text has none" in said and "name the directory of Gemma 4's assistant with --draft-model" in said
    said = expect_error("generate", "Hi", "--model", target, "--method", "eagle3", "--draft-model", assistant)
    assert "an assistant of Gemma 4, with which --method mtp drafts alone" in said
    said = expect_error("generate", "Hi", "--model", "smollm2-135m", "--method", "mtp", "--draft-model", assistant)
    assert "an assistant of Gemma 4, and the target is llama" in said
    raw, tensors = json.loads((assistant / "config.json").read_text()), load_file(assistant / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, assistant / "model.safetensors")
    _, report = transformers.Gemma4AssistantForCausalLM.from_pretrained(assistant, output_loading_info=True)
    assert report["missing_keys"] == {"lm_head.weight"}
    said = expect_error("generate", "Hi", "--model", target, "--method", "mtp", "--draft-model", assistant)
    assert "the checkpoint has no lm_head.weight" in said
    (assistant / "config.json").write_text(json.dumps(raw | {"backbone_hidden_size": 32}))
    said = expect_error("generate", "Hi", "--model", target, "--method", "mtp", "--draft-model", assistant)
    assert "an assistant of another model: the width is 32, and 64 is needed" in said


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_layer_of_a_published_checkpoint_drafts_for_it(kind: str, tmp_path: Path) -> None:
    folder = publish(tmp_path, kind)
    command = ("generate", "Hi", "--model", folder, "--max-new-tokens", "24", "--ignore-eos", "--json", "--method")
    plain, drafted = (json.loads(run_foretell(*command, m).stdout) for m in ("autoregressive", "mtp"))
    assert drafted["tokens"] == plain["tokens"] and drafted["tokens_per_pass"] > 2


def add_layers(folder: Path, layer: str, count: int) -> None:
    """Copy a layer under the next numbers."""
    tensors, number = load_file(folder / "model.safetensors"), layer.split(".")[-2]
    for k in range(1, count):
        further = layer.replace(number, str(int(number) + k))
        tensors |= {name.replace(layer, further): t.clone() for name, t in tensors.items() if name.startswith(layer)}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.exhaustive)])
def test_several_layers_draft_one_token_each(kind: str, tmp_path: Path) -> None:
    per_pass = []
    for count in (2, 3):
        folder = publish(tmp_path / str(count), kind)
        add_layers(folder, f"model.layers.{LAYERS}.", count)
        command = ("generate", "Hi", "--model", folder, "--max-new-tokens", "24", "--ignore-eos", "--json", "--method")
        plain, drafted = (json.loads(run_foretell(*command, m).stdout) for m in ("autoregressive", "mtp"))
        assert drafted["tokens"] == plain["tokens"]
        per_pass.append(drafted["tokens_per_pass"])
    assert 2.5 < per_pass[0] <= 3 < per_pass[1] <= 4


def test_several_layers_with_parts_in_common_are_refused(tmp_path: Path) -> None:
    """No source says what a second one of them reads, so that a guess would draft badly without a word."""
    folder = publish(tmp_path, "qwen3_next")
    add_layers(folder, "mtp.layers.0.", 2)
    said = expect_error("generate", "Hi", "--model", folder, "--method", "mtp")
    assert "several layers of multi-token prediction (mtp.layers.0.*, mtp.layers.1.*)" in said
