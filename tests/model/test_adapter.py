"""LoRA adapters: the maths is written here on the weights of a model of transformers, whose logits are compared."""

import copy
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import test_experts
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from test_state_models import oracle_of as oracle_of_states
from test_weights import as_stored, one_sentence, oracle_of, write_gguf
from typer.testing import CliRunner

from command import ENVIRONMENT, expect_error, run_foretell, save_tiny_model, tiny_draft, tiny_target
from foretell.api import Model
from foretell.catalogue.speculators import target_card
from foretell.cli import app
from foretell.cli.serve_plan import ServePlan
from foretell.engine.method import AnyMethod
from foretell.load import load, open_checkpoint
from foretell.model.kernels import available
from foretell.model.load import packed_cache
from foretell.model.load.adapter import adapter_name, with_adapter
from foretell.model.load.build import build_decoder
from foretell.model.load.native import finish_writing, load_native
from foretell.model.load.packed_cache import cache_entries
from foretell.model.load.rounding import RoundedWeights
from foretell.model.run.adapting_runner import AdaptingRunner
from foretell.model.run.network import Network
from helpers import all_logits, chain_tree, random_tokens

Tensors = dict[str, torch.Tensor]
TEXT = random_tokens(23, 64)
CPU = torch.device("cpu")
LAYER = {
    "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
}  # fmt: skip
"""Outputs and inputs of the modules of a layer."""
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads that the kernels run, with matrices of the same shapes."""
MODULES = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}


def random(*shape: int) -> torch.Tensor:
    return 0.3 * torch.randn(*shape)


def factors(modules: Mapping[str, tuple[int, int]] = MODULES, rank: int = 4) -> Tensors:
    """Random factors A and B, by their names in an adapter."""
    torch.manual_seed(1)
    tensors = Tensors()
    for name, (outputs, inputs) in modules.items():
        tensors |= {f"{name}.lora_A.weight": random(rank, inputs), f"{name}.lora_B.weight": random(outputs, rank)}
    return tensors


def write_adapter(path: Path, tensors: Tensors, prefix: str = "base_model.model.", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    base = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(base | config))
    save_file({f"{prefix}{name}": t for name, t in tensors.items()}, path / "adapter_model.safetensors")
    return path


def product(tensors: Tensors, module: str) -> torch.Tensor:
    return tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]


def add(oracle: Any, tensors: Tensors, scale: float | Callable[[str], float]) -> None:
    """Merge factors into a model of transformers."""
    weights = dict(oracle.named_parameters())
    with torch.no_grad():
        for module in {name.partition(".lora_")[0] for name in tensors}:
            factor = scale if isinstance(scale, float) else scale(module)
            weights[f"{module}.weight"].add_(factor * product(tensors, module))


def read(model: Path, adapter: Path | str) -> Network:
    opened = open_checkpoint(model) if model.is_file() else open_directory(model)
    config, weights = with_adapter(opened[0], opened[1], str(adapter))
    return build_decoder(config, weights, torch.float32, CPU)


def open_directory(model: Path) -> Any:
    (model / "tokenizer.json").write_text("{}")
    return open_checkpoint(model)


def check(network: Network, oracle: Any, atol: float = 2e-5) -> None:
    with torch.no_grad():
        wanted = oracle(torch.tensor([TEXT])).logits[0].numpy()
    np.testing.assert_allclose(all_logits(network, TEXT), wanted, rtol=0, atol=atol)


def directory(path: Path, oracle: Any) -> Path:
    oracle.save_pretrained(path / "model")
    return path / "model"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return directory(tmp_path, oracle_of("LlamaConfig"))


@pytest.mark.parametrize("gguf_base", [False, True])
def test_every_matrix_of_a_layer_is_adapted(gguf_base: bool, llama: Path) -> None:
    oracle, tensors = oracle_of("LlamaConfig"), factors()
    if gguf_base:
        llama = llama / "m.gguf"
        write_gguf(llama, oracle)
    adapter = write_adapter(llama.parent / "adapter", tensors)
    plain = all_logits(open_and_build(llama), TEXT)
    add(oracle, tensors, 6 / 4)
    check(read(llama, adapter), oracle)
    assert np.abs(all_logits(read(llama, f"mine={adapter}"), TEXT) - plain).max() > 0.1


def open_and_build(path: Path) -> Network:
    opened = open_checkpoint(path) if path.is_file() else open_directory(path)
    return build_decoder(opened[0], opened[1], torch.float32, CPU)


def test_ranks_and_scales_follow_patterns(llama: Path, tmp_path: Path) -> None:
    tensors = factors()
    tensors |= factors({"model.layers.1.self_attn.v_proj": (16, 32)}, rank=2)
    tensors |= factors({f"model.layers.{i}.mlp.down_proj": (32, 64) for i in range(2)}, rank=3)
    adapter = write_adapter(
        tmp_path / "adapter", tensors, use_rslora=True, rank_pattern={"layers.1.self_attn.v_proj": 2, "down_proj": 3},
        alpha_pattern={r".*\.0\..*up_proj": 5, "v_proj": 9}, fan_in_fan_out=True,
    )  # fmt: skip

    def scale(module: str) -> float:
        rank = 2 if module == "model.layers.1.self_attn.v_proj" else 3 if "down_proj" in module else 4
        alpha = 5 if module == "model.layers.0.mlp.up_proj" else 9 if "v_proj" in module else 6
        return alpha / math.sqrt(rank)

    oracle = oracle_of("LlamaConfig")
    add(oracle, tensors, scale)
    check(read(llama, adapter), oracle)
    write_adapter(adapter, tensors)
    with pytest.raises(ValueError) as error:
        read(llama, adapter)
    one_sentence(error, "adapter", "rank 4")


def test_dora_keeps_the_magnitudes_of_rows(llama: Path, tmp_path: Path) -> None:
    oracle, tensors = oracle_of("LlamaConfig"), factors()
    merged = dict(oracle.named_parameters())
    add(oracle, tensors, 6 / 4)
    with torch.no_grad():
        for module, (outputs, _) in MODULES.items():
            magnitude = 0.5 + torch.rand(outputs)
            weight = merged[f"{module}.weight"]
            weight.copy_(magnitude[:, None] * weight / weight.square().sum(1, keepdim=True).sqrt())
            tensors[f"{module}.lora_magnitude_vector"] = magnitude
    check(read(llama, write_adapter(tmp_path / "adapter", tensors, use_dora=True)), oracle)


@pytest.mark.parametrize("stored", ["directory", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_adapted_apart(tied: bool, stored: str, tmp_path: Path) -> None:
    oracle = oracle_of("LlamaConfig", tie_word_embeddings=tied)
    model = directory(tmp_path, oracle)
    if stored == "gguf":
        model = tmp_path / "m.gguf"
        write_gguf(model, oracle) if not tied else write_tied(model, oracle)
    torch.manual_seed(2)
    low, high = random(4, 64), random(32, 4)
    embedding = {"model.embed_tokens.lora_embedding_A": low, "model.embed_tokens.lora_embedding_B": high}
    head = factors({"lm_head": (64, 32)})
    other = oracle_of("LlamaConfig", tie_word_embeddings=False)
    other.load_state_dict(oracle.state_dict())
    add(other, head, 1.5)
    check(read(model, write_adapter(tmp_path / "head", head)), other)
    with torch.no_grad():
        other.model.embed_tokens.weight.add_(1.5 * (high @ low).T)
    check(read(model, write_adapter(tmp_path / "both", head | embedding)), other)
    with torch.no_grad():
        other.lm_head.weight.copy_(oracle.lm_head.weight)
    check(read(model, write_adapter(tmp_path / "embedding", embedding)), other)


def write_tied(path: Path, oracle: Any) -> None:
    state = oracle.state_dict()
    oracle.state_dict = lambda: {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    write_gguf(path, oracle)
    del oracle.state_dict


def test_saved_modules_and_biases_replace_those_of_the_model(tmp_path: Path) -> None:
    oracle = oracle_of("LlamaConfig", attention_bias=True)
    model, bias = directory(tmp_path, oracle), "model.layers.0.self_attn.q_proj"
    tensors = factors({f"{bias}": (32, 32)})
    new = {"lm_head": random(64, 32), "model.layers.1.input_layernorm": random(32), "model.norm": random(32)}
    added = random(32)
    saved = {"lm_head.modules_to_save.weight": new["lm_head"], f"{bias}.base_layer.bias": added}
    saved |= {f"{name}.weight": new[name] for name in ("model.layers.1.input_layernorm", "model.norm")}
    add(oracle, tensors, 1.5)
    with torch.no_grad():
        for name, tensor in new.items():
            oracle.get_submodule(name).weight.copy_(tensor)
        oracle.model.layers[0].self_attn.q_proj.bias.copy_(added)
    modules = ["lm_head", "input_layernorm", "norm"]
    adapter = write_adapter(tmp_path / "adapter", tensors | saved, modules_to_save=modules, bias="all")
    check(read(model, adapter), oracle)


def write_gguf_adapter(
    path: Path,
    tensors: Tensors,
    alpha: float,
    arch: str = "llama",
    kind: str = "adapter",
    heads: tuple[int, int] = (4, 2),
) -> Path:
    """The adapter as llama.cpp's converter writes it: rows of queries and keys in its order."""
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        module, _, end = name.removesuffix(".weight").partition(".lora_")
        own, data = module.split(".")[-1], tensor.numpy()
        if end == "B" and own in ("q_proj", "k_proj"):
            data = as_stored(data, heads[own == "k_proj"])
        if module == "model.embed_tokens":
            place, end, data = "token_embd", end.removeprefix("embedding_"), data.T if end.endswith("A") else data
        else:
            place = "output" if module == "lm_head" else f"blk.{module.split('.')[2]}.{names[own]}"
        writer.add_tensor(f"{place}.weight.lora_{end.lower()}", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alpha", [6.0, 0.0])
@pytest.mark.parametrize("base", ["gguf", "llama", "mistral"])
def test_a_gguf_adapter_gives_the_same(base: str, alpha: float, tmp_path: Path) -> None:
    oracle = oracle_of("MistralConfig" if base == "mistral" else "LlamaConfig")
    model = directory(tmp_path, oracle)
    if base == "gguf":
        model = tmp_path / "m.gguf"
        write_gguf(model, oracle)
    tensors = factors() | factors({"lm_head": (64, 32)})
    embedding = {"model.embed_tokens.lora_embedding_A": random(4, 64)}
    embedding["model.embed_tokens.lora_embedding_B"] = random(32, 4)
    scale = alpha / 4 if alpha else 1.0
    add(oracle, tensors, scale)
    with torch.no_grad():
        low, high = embedding.values()
        oracle.model.embed_tokens.weight.add_(scale * (high @ low).T)
    check(read(model, write_gguf_adapter(tmp_path / "a.gguf", tensors | embedding, alpha)), oracle)


def test_a_gguf_adapter_gives_the_logits_of_llama_cpp(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model, oracle = tmp_path / "m.gguf", oracle_of("LlamaConfig")
    with torch.no_grad():
        write_gguf(model, oracle, scaling={"tokenizer_model": "none"})
    tensors = factors() | factors({"lm_head": (64, 32)})
    tensors["model.embed_tokens.lora_embedding_A"] = random(4, 64)
    tensors["model.embed_tokens.lora_embedding_B"] = random(32, 4)
    adapter = write_gguf_adapter(tmp_path / "a.gguf", tensors, 6.0)
    theirs = llama_cpp.Llama(
        str(model), lora_path=str(adapter), logits_all=True, n_ctx=64, n_threads=1, type_k=0, type_v=0, verbose=False
    )
    theirs.eval(TEXT)
    ours = all_logits(read(model, adapter), TEXT)
    np.testing.assert_allclose(ours, theirs.scores[: len(TEXT)], rtol=0, atol=1e-5 * np.abs(ours).max())


@pytest.mark.skipif(not available(), reason="the kernels are not available here")
def test_other_matrices_of_a_quantised_file_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oracle = oracle_of("LlamaConfig", **WIDE_HEADS)
    tensors = factors({"model.layers.1.self_attn.q_proj": (32, 32)})
    model = tmp_path / "m.gguf"
    with torch.no_grad():
        write_gguf(model, oracle, Kind.Q8_0)
    add(oracle, tensors, 1.5)
    opened = open_checkpoint(model)
    with caplog.at_level(logging.WARNING):
        config, weights = with_adapter(opened.config, opened.weights, str(write_adapter(tmp_path / "a", tensors)))
    assert "1 of the quantised matrices are adapted" in caplog.text and weights.storage == "quantized"
    kinds = {f"{i}.{name}": weights.matrix(f"model.layers.{i}.{name}.weight", *shape).kind
             for i in range(2) for name, shape in LAYER.items()}  # fmt: skip
    assert kinds.pop("1.self_attn.q_proj") == "F32" and set(kinds.values()) == {"Q8_0"}
    check(load_native(config, weights, "float32"), oracle)
    assert np.isfinite(all_logits(load_native(config, weights, "int8-activations"), TEXT)).all()


@pytest.mark.skipif(not available(), reason="the kernels are not available here")
def test_packed_weights_of_the_base_are_not_those_of_the_adapted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "WORTH_CACHING", 0)
    oracle, tensors = oracle_of("LlamaConfig", **WIDE_HEADS), factors()
    config, weights, *_ = open_directory(directory(tmp_path, oracle))
    adapters = [write_adapter(tmp_path / f"{alpha}", tensors, lora_alpha=alpha) for alpha in (6, 9)]
    plain = all_logits(load_native(config, weights, "float32"), TEXT)
    finish_writing()
    for adapter in (*adapters, adapters[0]):
        load_native(*with_adapter(config, weights, str(adapter)), "float32")
        finish_writing()
    assert len(cache_entries()) == 3
    assert np.array_equal(all_logits(load_native(config, weights, "float32"), TEXT), plain)
    add(oracle, tensors, 6 / 4)
    check(load_native(*with_adapter(config, weights, str(adapters[0])), "float32"), oracle)


def test_weights_are_rounded_after_the_adapter(llama: Path, tmp_path: Path) -> None:
    if not available():
        pytest.skip("rounding needs the kernels")
    tensors, name = factors(), "model.layers.0.mlp.up_proj"
    config, weights, *_ = open_directory(llama)
    rounded = RoundedWeights(with_adapter(config, weights, str(write_adapter(tmp_path / "a", tensors)))[1])
    merged = load_file(llama / "model.safetensors")[f"{name}.weight"] + 1.5 * product(tensors, name)
    matrix = rounded.round_matrix(name, rounded.matrix(f"{name}.weight", 64, 32))
    assert matrix.kind == "Q4_1"
    step = (merged.amax(1) - merged.amin(1)) / 15
    assert ((matrix.widen() - merged).abs().amax(1) <= 0.51 * step + 1e-3).all()


def test_an_adapter_of_another_model_or_kind_is_refused(llama: Path, tmp_path: Path) -> None:
    tensors, at = factors(), "model.layers.0.self_attn.q_proj"

    def refused(*words: str, change: Mapping[str, Any] | None = None, **config: Any) -> None:
        merged = {n: t for n, t in (tensors | dict(change or {})).items() if t is not None}
        with pytest.raises(ValueError) as error:
            read(llama, write_adapter(tmp_path / "adapter", merged, **config))
        one_sentence(error, str(tmp_path / "adapter"), *words)

    refused("another model", f"{at}.weight", "(32, 48)", "(32, 32)", change={f"{at}.lora_A.weight": random(4, 48)})
    more = factors({"model.layers.2.mlp.up_proj": (64, 32)})
    refused("model.layers.2.mlp.up_proj", "does not have", change=more)
    refused("vision.q_proj", change=factors({"vision.q_proj": (4, 4)}))
    refused(f"{at}.bias", change={f"{at}.bias": random(32)})
    refused("lora_B.bias", change={f"{at}.lora_B.bias": random(32)}, lora_bias=True)
    refused(at, "lora_A and lora_B", change={f"{at}.lora_A.weight": None})
    refused("model.embed_tokens.weight", "(70, 32)", change={"model.embed_tokens.weight": random(70, 32)})
    refused("ADALORA", peft_type="ADALORA")
    refused("pissa", init_lora_weights="pissa_niter_4")
    refused("target_parameters", target_parameters=["mlp.experts.down_proj"])
    refused("lora_alpha", lora_alpha="many")
    for pattern in (["q_proj"], {"(": 4}, {"q_proj": "many"}):
        refused("alpha_pattern", alpha_pattern=pattern)
    refused("magnitudes", at, change={f"{at}.lora_magnitude_vector": random(31)})
    refused("vision.q_proj", change={"vision.q_proj": torch.zeros(4, dtype=torch.int32)})
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ValueError) as error:
        read(llama, tmp_path / "adapter")
    one_sentence(error, "pickle")
    for place in ("x=nowhere", llama):
        with pytest.raises(ValueError) as error:
            read(llama, place)
        one_sentence(error, "adapter_config.json")


def test_a_gguf_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.gguf", factors()

    def refused(*words: str) -> None:
        with pytest.raises(ValueError) as error:
            read(llama, path)
        one_sentence(error, str(path), *words)

    write_gguf_adapter(path, tensors, 6.0, arch="qwen2")
    refused("qwen2", "llama")
    with pytest.raises(ValueError) as error:
        load(str(path))
    one_sentence(error, str(path), "adapter", "--lora")
    write_gguf_adapter(path, tensors, 6.0, kind="model")
    refused("no LoRA adapter")
    write_gguf_adapter(path, factors({"model.layers.7.mlp.up_proj": (64, 32)}), 6.0)
    refused("blk.7.ffn_up.weight")
    write_gguf_adapter(path, factors({"model.layers.0.mlp.up_proj": (64, 48)}), 6.0)
    refused("(64, 48)", "(64, 32)")
    write_gguf_adapter(path, {n: t for n, t in tensors.items() if "lora_A" in n}, 6.0)
    refused(".lora_b")


def write_expert_adapter(path: Path, name: str, tensors: Tensors) -> None:
    """An adapter of the experts in GGUF: the factors of all experts of a layer in one tensor."""
    places = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
    writer = gguf.GGUFWriter(path, test_experts.GGUF_ARCHITECTURES[name])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 6.0)
    for module, place in places.items():
        for end in "AB":
            own = [tensors[f"model.layers.1.mlp.experts.{j}.{module}.lora_{end}.weight"] for j in range(4)]
            writer.add_tensor(f"blk.1.{place}.weight.lora_{end.lower()}", torch.stack(own).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_adapted_one_by_one(name: str, tmp_path: Path) -> None:
    oracle = test_experts.oracle_of(name)
    directory(tmp_path, oracle)
    with torch.no_grad():
        test_experts.write_gguf(tmp_path / "m.gguf", name, oracle, Kind.F32)
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    tensors = factors({f"model.layers.1.mlp.experts.{j}.{m}": s for j in range(4) for m, s in shapes.items()})
    experts = oracle.model.layers[1].mlp.experts
    with torch.no_grad():
        for j in range(4):
            gate, up, down = (1.5 * product(tensors, f"model.layers.1.mlp.experts.{j}.{m}") for m in shapes)
            experts.gate_up_proj[j].add_(torch.cat([gate, up]))
            experts.down_proj[j].add_(down)
    write_expert_adapter(tmp_path / "a.gguf", name, tensors)
    own = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}
    named = {}
    for key, tensor in tensors.items():
        for module, other in own.items() if name == "mixtral" else ():
            key = key.replace(module, other)
        named[key] = tensor
    for model in (tmp_path / "m.gguf", tmp_path / "model"):
        for adapter in (tmp_path / "a.gguf", write_adapter(tmp_path / "a", named)):
            check(read(model, adapter), oracle, 1e-4)
    beyond = write_adapter(tmp_path / "b", {key.replace("experts.3", "experts.4"): named[key] for key in named})
    with pytest.raises(ValueError) as error:
        read(tmp_path / "model", beyond)
    one_sentence(error, "experts.4", "does not have")
    file = tmp_path / "model" / "model.safetensors"
    block = "block_sparse_moe" if name == "mixtral" else "mlp"
    one = f"model.layers.1.{block}.experts"
    whole = {key: tensor for key, tensor in load_file(file).items() if not key.startswith(one)}
    stacked = {f"{one}.{own}": getattr(experts, own) for own in ("gate_up_proj", "down_proj")}
    save_file(whole | {key: tensor.detach() for key, tensor in stacked.items()}, file)
    for adapter in (tmp_path / "a", tmp_path / "a.gguf"):
        with pytest.raises(ValueError) as error:
            read(tmp_path / "model", adapter)
        one_sentence(error, "single experts of layer 1", "one tensor")


def test_a_name_stands_before_the_place(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert adapter_name(f"{tmp_path}/a=b") == (None, tmp_path / "a=b")
    assert adapter_name("mine=x/y=z") == ("mine", Path("x/y=z"))
    assert adapter_name("x/y") == (None, Path("x/y"))


SMALL = {"self_attn.q_proj": (16, 16), "self_attn.v_proj": (8, 16), "mlp.down_proj": (16, 24)}


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model with a tokenizer, an adapter, and the model with the adapter merged by hand."""
    base, merged = save_tiny_model(tmp_path / "base"), save_tiny_model(tmp_path / "merged")
    tensors = factors({f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in SMALL.items()})
    weights = load_file(merged / "model.safetensors")
    for module in {name.partition(".lora_")[0] for name in tensors}:
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].float() + 1.5 * product(tensors, module)).float()
    save_file(weights, merged / "model.safetensors")
    return base, write_adapter(tmp_path / "adapter", tensors), merged


def test_drafts_of_the_base_are_lossless_for_the_adapted_target(small: tuple[Path, Path, Path]) -> None:
    base, adapter, merged = small
    model, by_hand, plain = (
        load(str(path), "float32", lora=lora) for path, lora in ((base, adapter), (merged, None), (base, None))
    )
    prompts = ["once upon a time", "abc abc abc"]

    def texts(target: Model, method: AnyMethod | str = "autoregressive") -> list[str]:
        return [answer.text for answer in target.generate(prompts, method, max_new_tokens=24)]

    assert texts(model) == texts(by_hand) != texts(plain)
    method = model.method("specinfer", drafts=[plain, load(str(tiny_draft()), "float32")])
    assert texts(model, method) == texts(model, "ngram") == texts(by_hand)
    fingerprints = {m.checkpoint.fingerprint() for m in (model, plain)}
    assert len(fingerprints) == 2 and model.checkpoint.base_fingerprint == plain.checkpoint.fingerprint()
    assert model.name != plain.name  # by which the acceptance of drafts is remembered
    assert plain.checkpoint.base_fingerprint == plain.checkpoint.fingerprint()
    assert target_card(model._build_context()).fingerprint == plain.checkpoint.fingerprint()


def test_the_command_line_adapts_the_model(small: tuple[Path, Path, Path]) -> None:
    base, adapter, merged = small
    arguments = ("generate", "hello", "--dtype", "float32", "--max-new-tokens", "20", "--json", "--model")
    lines = [
        json.loads(run_foretell(*arguments, *more).stdout) for more in ((base, "--lora", f"x={adapter}"), (merged,))
    ]
    assert lines[0]["tokens"] == lines[1]["tokens"]
    assert "no such adapter" in expect_error(*arguments, base, "--lora", "x=nowhere")


def test_the_server_has_the_name_of_the_adapter(small: tuple[Path, Path, Path]) -> None:
    base, adapter, _ = small
    plans = list[ServePlan]()
    arguments = ["serve", "--model", str(base), "--dtype", "float32", "--served-model-name", "y"]
    for more in ([], ["--lora", str(adapter)], ["--lora", f"x={adapter}", "--lora", f"z={adapter}"]):
        result = CliRunner(env=ENVIRONMENT).invoke(app, [*arguments, *more], obj=plans.append)
        assert result.exit_code == 0, result.output
    assert [plan.settings.served_names for plan in plans] == [("y",), ("y",), ("y", "x", "z")]
    loaded = [plan.served.load() for plan in plans]
    assert len({each.fingerprint for each in loaded}) == 3
    assert [each.model.adapters for each in loaded] == [(), (), ("x", "z")]
    for same in (["--lora", f"y={adapter}"], ["--lora", f"x={adapter}", "--lora", f"x={adapter}"]):
        result = CliRunner(env=ENVIRONMENT).invoke(app, [*arguments, *same], obj=plans.append)
        assert result.exit_code != 0


def beside(base: Path, *adapters: str, dtype: str = "float32", **options: Any) -> Model:
    return load(str(base), dtype, adapters=adapters, **options)


WIDE = LAYER | {"mlp.gate_proj": (40, 32), "mlp.up_proj": (40, 32), "mlp.down_proj": (32, 40)}
WIDE_SOME = {name: WIDE[name] for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")}


def save_wide_model(path: Path) -> Path:
    """A tiny model with heads that the kernels run, and a network whose neurons do not fill their vectors."""
    return save_tiny_model(path, hidden=32, ffn=40)


@pytest.fixture
def several(tmp_path: Path) -> tuple[Path, dict[str, Path], dict[str, Path]]:
    """A model with a tokenizer, adapters of PEFT and in GGUF by name, and the models with one merged by hand."""
    base, adapters, merged = save_wide_model(tmp_path / "base"), dict[str, Path](), {"": tmp_path / "base"}
    kinds = {"one": WIDE_SOME, "all": WIDE, "gguf": WIDE}
    for seed, (name, modules) in enumerate(kinds.items()):
        tensors = factors({f"model.layers.{i}.{m}": shape for i in range(2) for m, shape in modules.items()})
        tensors = {key: tensor.roll(seed, 0) for key, tensor in tensors.items()}
        merged[name] = save_wide_model(tmp_path / f"merged_{name}")
        weights = load_file(merged[name] / "model.safetensors")
        for module in {key.partition(".lora_")[0] for key in tensors}:
            weights[f"{module}.weight"] = weights[f"{module}.weight"].float() + 1.5 * product(tensors, module)
        save_file(weights, merged[name] / "model.safetensors")
        if name == "gguf":
            adapters[name] = tmp_path / "a.gguf"
            write_gguf_adapter(adapters[name], tensors, 6.0, heads=(2, 1))
        else:
            adapters[name] = write_adapter(tmp_path / name, tensors)
    return base, adapters, merged


@pytest.mark.parametrize("native", [False, True])
def test_an_adapter_beside_the_weights_gives_the_numbers_of_the_merged_model(
    native: bool, several: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("foretell.model.load.network.native.available", lambda: False)
    base, adapters, merged = several
    model = beside(base, *(f"{name}={place}" for name, place in adapters.items()))
    assert model.runner().backend.name == ("native" if native else "torch")
    prompt = random_tokens(9, 40)
    for name, place in merged.items():
        wanted = all_logits(load(str(place), "float32").network, prompt)
        runner = model.runner()
        assert isinstance(runner, AdaptingRunner)
        runner.adapt(0, name)
        logits = runner.forward([0], chain_tree(prompt)).logits.numpy()
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("modules", [("q_proj",), ("k_proj", "o_proj"), ("q_proj", "v_proj")], ids=" ".join)
def test_gates_of_attention_are_adapted_beside_the_weights(
    modules: tuple[str, ...], native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5's queries and gates are rows of one matrix."""
    if not native:
        monkeypatch.setattr("foretell.model.load.network.native.available", lambda: False)
    oracle = oracle_of_states("qwen3_5")
    shapes = {f"model.layers.2.self_attn.{m}": oracle.model.layers[2].self_attn for m in modules}
    sizes = {name: tuple(at.get_submodule(name.rpartition(".")[2]).weight.shape) for name, at in shapes.items()}
    tensors, folder = factors(sizes), directory(tmp_path, oracle)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target() / name, folder)
    model = beside(folder, f"x={write_adapter(tmp_path / 'adapter', tensors)}")
    changed = copy.deepcopy(oracle)
    add(changed, tensors, 1.5)
    for name, wanted in (("", oracle), ("x", changed)):
        runner = model.runner()
        assert isinstance(runner, AdaptingRunner)
        runner.adapt(0, name)
        logits = runner.forward([0], chain_tree(TEXT)).logits.numpy()
        with torch.no_grad():
            np.testing.assert_allclose(logits, wanted(torch.tensor([TEXT])).logits[0].numpy(), rtol=0, atol=2e-5)


def test_requests_of_one_batch_have_adapters_of_their_own(several: Any) -> None:
    base, adapters, merged = several
    model = beside(base, *(f"{name}={place}" for name, place in adapters.items()))
    drafts = [load(str(base), "float32"), load(str(tiny_draft()), "float32")]
    prompts = ["once upon a time", "abc abc abc", "once upon a hill"]
    wanted = {
        name: [answer.tokens for answer in load(str(place), "float32").generate(prompts, max_new_tokens=24)]
        for name, place in merged.items()
    }
    assert len({str(texts) for texts in wanted.values()}) == len(merged)
    for method in (model.method(), model.method("ngram"), model.method("specinfer", drafts=drafts)):
        for cached in (False, True):
            engine = model.engine(method, rows=5, prefix_caching=cached)
            for _ in range(2):  # the second time rows hold the same prompts of every adapter
                asked = [model.request(p, max_new_tokens=24, adapter=name) for name in merged for p in prompts]
                answers = engine.complete(asked)
                assert [answer.tokens for answer in answers] == [text for own in wanted.values() for text in own]
    hits = [a.statistics.cached_tokens for a in answers]
    assert any(hits)
    with pytest.raises(ValueError, match="unknown adapter 'others'; known: all, gguf, one"):
        engine.submit(model.request("a", adapter="others"))


def test_a_prefix_is_of_one_adapter(several: Any) -> None:
    base, adapters, _ = several
    model = beside(base, f"one={adapters['one']}", f"all={adapters['all']}")
    engine, prompt = model.engine(rows=3, prefix_caching=True), "once upon a time there was"
    for name in ("", "one", "all"):
        for expected in (False, True):
            (answer,) = engine.complete([model.request(prompt, max_new_tokens=2, adapter=name)])
            assert bool(answer.statistics.cached_tokens) is expected


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_weights_have_adapters_and_drafts_keep_the_text(dtype: str, several: Any) -> None:
    base, adapters, merged = several
    model = beside(base, *(f"{name}={place}" for name, place in adapters.items()), dtype=dtype)
    prompt = random_tokens(9, 40)
    for name in ("all", "gguf"):
        runner = model.runner()
        assert isinstance(runner, AdaptingRunner)
        runner.adapt(0, name)
        own = runner.forward([0], chain_tree(prompt)).logits.float().numpy()
        exact = all_logits(load(str(merged[name]), "float32").network, prompt)
        plain = all_logits(load(str(base), "float32").network, prompt)
        assert np.abs(own - exact).max() < 0.15 * np.abs(plain - exact).max()
    asked = [model.request("abc abc abc", max_new_tokens=32, adapter=name) for name in ("", "one", "all", "gguf")]
    texts = [
        [a.tokens for a in model.engine(model.method(m), rows=4).complete(asked)] for m in ("autoregressive", "ngram")
    ]
    alone = [answer.tokens for r in asked for answer in model.engine(model.method(), rows=1).complete([r])]
    assert texts[0] == texts[1] == alone


def test_adapters_that_requests_cannot_choose_are_refused(small: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, _ = small

    def refused(*words: str, **options: Any) -> None:
        with pytest.raises(ValueError) as error:
            load(str(base), "float32", **options)
        one_sentence(error, *words)

    refused("NAME=PATH", adapters=[str(adapter)])
    refused("NAME=PATH", adapters=[f"x={adapter}", f"x={adapter}"])
    refused("--sparsity", adapters=[f"x={adapter}"], memory_limit=1 << 30)
    wrong = write_adapter(tmp_path / "w", factors({"model.layers.0.mlp.up_proj": (24, 20)}))
    refused("another model", "(24, 20)", "(24, 16)", adapters=[f"x={wrong}"])


def test_an_adapter_of_another_kind_is_merged_into_a_copy(several: Any, tmp_path: Path) -> None:
    base, adapters, _ = several
    tensors = factors({"model.layers.0.self_attn.q_proj": (32, 32)})
    tensors["model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = random(32)
    head = {"lm_head.lora_A.weight": random(4, 32), "lm_head.lora_B.weight": random(257, 4)}
    own = {"dora": write_adapter(tmp_path / "d", tensors, use_dora=True), "head": write_adapter(tmp_path / "h", head)}
    model = beside(base, *(f"{name}={place}" for name, place in (own | adapters).items()))
    engine = model.engine(model.method("ngram"), rows=4)
    answers = engine.complete([model.request("abc abc", max_new_tokens=16, adapter=name) for name in own])
    for answer, place in zip(answers, own.values(), strict=True):
        (wanted,) = load(str(base), "float32", lora=place).generate(["abc abc"], max_new_tokens=16)
        assert answer.tokens == wanted.tokens
