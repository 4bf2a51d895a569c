"""Gemma 4, Llama 4, Ministral 3 and families with other norms against transformers: windows, chunks and shared keys
crossed by chunks of a text and by trees.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_decoder import SIZES as SMALL
from test_decoder import YARN, check_logits, random_parents, read

from foretell.accept import Match
from foretell.catalogue import BuildContext, build
from foretell.core.tree import tree_from_lists
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels import available
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.load import packed_cache
from foretell.model.load.build import build_decoder
from foretell.model.load.native import finish_writing, load_native
from foretell.model.load.network import build_network, build_streamed_network
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree
from helpers import all_logits, chain_tree, random_tokens

needs_kernels = pytest.mark.skipif(not available(), reason="the kernels are not available here")

SIZES = SMALL | {"hidden_size": 64}
S, F = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 7, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
    "layer_types": [S, S, F, S, F, S, F], "vocab_size_per_layer_input": 61, "pad_token_id": 0,
}  # fmt: skip
NO_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 3, "layer_types": [S, F, F]}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 40, "num_local_experts": 3, "floor_scale": 4,
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
    "llama4 dense": ("Llama4TextConfig", LLAMA4 | {"moe_layers": [], "attn_temperature_tuning": False,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 16.0, "high_freq_factor": 1.0,
    "low_freq_factor": 1.0, "original_max_position_embeddings": 16}}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "pad_token_id": 0, "rope_parameters": YARN | {
    "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}),
    "ministral3 window": ("Ministral3Config", {"head_dim": 16, "pad_token_id": 0, "sliding_window": 8}),
    "olmo3": ("Olmo3Config", {"pad_token_id": 0, "num_hidden_layers": 4, "sliding_window": 8, "layer_types": [S, S, S,
    F], "rope_parameters": {F: YARN | {"original_max_position_embeddings": 16}, S: {"rope_type": "default",
    "rope_theta": 10000.0}}}),
    "exaone4": ("Exaone4Config", {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": [S, S, S, F]}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0,
    "factor": 1.0, "rope_theta": 10000.0}}),
    "cohere2": ("Cohere2Config", {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.25}),
    "glm4": ("Glm4Config", {"head_dim": 32, "pad_token_id": 0}),
    "minicpm3": ("MiniCPM3Config", {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "num_key_value_heads": 4, "max_position_embeddings": 256, "rope_parameters": {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)], "original_max_position_embeddings": 256}}),
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
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):  # Gemma 4 does not divide scores by the width of a head.
                parameter.mul_(0.3)
    return model


@cache
def folder_of(name: str) -> Path:
    folder = Path(mkdtemp(prefix="foretell-family-"))
    oracle_of(name).save_pretrained(folder)
    return folder


@cache
def decoder_of(name: str) -> Decoder:
    return read(folder_of(name))


@cache
def native_of(name: str, precision: Precision) -> NativeDecoder:
    config = from_hf(json.loads((folder_of(name) / "config.json").read_text()))
    return load_native(config, SafetensorsWeights(folder_of(name)), precision)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    check_logits(decoder_of(name), oracle_of(name), (7, 1, 1, 19, 12))


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_give_the_logits_of_transformers(name: str) -> None:
    check_logits(native_of(name, "float32"), oracle_of(name), (7, 1, 1, 19, 12))


@pytest.mark.parametrize("name", ["gemma4 shared", "llama4", "olmo3", "cohere2"])
def test_static_passes_give_the_same_logits(name: str) -> None:
    text = random_tokens(30, SIZES["vocab_size"])
    found, wanted = (all_logits(network, text) for network in (GraphedDecoder(decoder_of(name)), decoder_of(name)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("name", ["gemma4 shared", "llama4", "ministral3 window", "olmo3", "cohere2"])
def test_lossless_methods_give_the_tokens_of_plain_decoding(name: str) -> None:
    network, vocab = native_of(name, "bfloat16"), SIZES["vocab_size"]
    draft = DraftModel(DecoderRunner(network.first_layers(2)))
    methods: list[AnyMethod] = [
        build("plain", BuildContext(vocab, network)),
        build("prompt_lookup", BuildContext(vocab, network)),
        Method(draft, BranchingTree((3, 2, 1), draw=False), Match()),
    ]
    requests = [Request(random_tokens(n, vocab, seed=n), max_new_tokens=20) for n in (5, 19)]
    found = [[c.tokens for c in Engine(DecoderRunner(network), m, rows=2, chunk=8).complete(requests)] for m in methods]
    assert found[0] == found[1] == found[2]


@needs_kernels
@pytest.mark.parametrize("name", ["gemma4 shared", "gemma4 experts", "llama4", "olmo3", "cohere2"])
def test_packed_layers_are_read_from_the_cache_of_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "WORTH_CACHING", 0)
    config = from_hf(json.loads((folder_of(name) / "config.json").read_text()))
    weights, text, cpu = (
        SafetensorsWeights(folder_of(name)),
        random_tokens(20, SIZES["vocab_size"]),
        torch.device("cpu"),
    )
    wanted = all_logits(native_of(name, "bfloat16"), text)
    for network in (
        build_network(config, weights, "bfloat16", cpu),
        build_network(config, weights, "bfloat16", cpu),
        build_streamed_network(config, weights, "bfloat16", cpu, 10**9),
    ):
        assert (all_logits(network, text) == wanted).all()
        finish_writing()
    assert list((tmp_path / "cache").rglob("*"))


@pytest.mark.covering(1)
@needs_kernels
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "name", ["gemma4 shared", "gemma4 experts", "llama4 two experts", "ministral3", "olmo3", "cohere2", "hunyuan"]
)
def test_the_kernels_give_every_token_the_same_bits_in_trees_chunks_and_batches(
    name: str, precision: Precision
) -> None:
    network, text = native_of(name, precision), random_tokens(30, SIZES["vocab_size"])
    runner, alone, ends = DecoderRunner(network), DecoderRunner(network), list[torch.Tensor]()
    for row, chunk in ((0, 30), (2, 1), (1, 7)):
        for at in range(0, len(text), chunk):
            logits = runner.forward([row], chain_tree(text[at : at + chunk])).logits
            runner.commit(row, range(len(logits)))
        ends.append(logits[-1])
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    tokens, parents = random_tokens(12, SIZES["vocab_size"], seed=3), random_parents(12, seed=1)
    tree = tree_from_lists([tokens] * 3, [parents] * 3)
    found = runner.forward([2, 0, 1], tree).logits.view(3, 12, -1)
    alone.forward([0], chain_tree(text))
    alone.commit(0, range(30))
    for node in range(12):
        alone.truncate(0, 30)
        for step in tree.ancestors(0, node):
            logits = alone.forward([0], chain_tree([tokens[step]])).logits
            alone.commit(0, [0])
        assert all(torch.equal(found[row, node], logits[0]) for row in range(3))
    runner.commit(1, tree.ancestors(0, 11))
    after = runner.forward([1], chain_tree([5])).logits
    assert torch.equal(after, alone.forward([0], chain_tree([5])).logits)


def raw_of(name: str, **changes: object) -> dict[str, Any]:
    """The configuration of a model with other values; null leaves a key out."""
    return {**json.loads((folder_of(name) / "config.json").read_text()), **changes}


def test_sizes_of_full_layers_as_published_files_name_them() -> None:
    raw = raw_of("gemma4 k is v", per_layer_config=None, global_head_dim=32, num_global_key_value_heads=1)
    assert from_hf(raw) == from_hf(raw_of("gemma4 k is v"))
    whole = {"model_type": "gemma4", "text_config": raw, "vision_config": {}}
    assert from_hf(whole) == from_hf(raw)
    text = raw_of("ministral3")
    assert from_hf({"model_type": "mistral3", "text_config": text}) == from_hf(text)


YARN_16 = {"rope_type": "yarn", "factor": YARN["factor"], "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("olmo3", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": YARN_16}),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": 4}),
        ("cohere2", {"layer_types": None, "sliding_window_pattern": 4}),
        ("hunyuan", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 50.0,
        "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("glm4", {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        ("minicpm3", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "longrope",
        "short_factor": [1 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 256}}),
    ],
)  # fmt: skip
def test_published_configurations_mean_the_same(name: str, changes: dict[str, Any]) -> None:
    assert from_hf(raw_of(name, **changes)) == from_hf(raw_of(name))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4 shared", {"num_kv_shared_layers": 6}, "num_kv_shared_layers should be less, so that full_attention"),
        ("gemma4 shared", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention should be vision"),
        ("gemma4 shared", {"per_layer_config": {"2": {"head_dim": 32}}}, "per_layer_config should be head_dim"),
        ("gemma4 shared", {"layer_types": ["chunked_attention"] * 7}, "layer_types should be 7 of sliding_attention"),
        ("gemma4 shared", {"rope_parameters": {"full_attention": {}}}, "no 'rope_parameters.sliding_attention'"),
        ("gemma4 experts", {"top_k_experts": 9}, "top_k_experts should be at most 5"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers should be 4 of 0"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types should be 4 of chunked_attention"),
        ("llama4", {"hidden_act": "tanh"}, "unknown activation 'tanh'"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "beta": 1.0}}, "rope_parameters.beta should be left"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(raw_of(name, **changes))


def test_trained_prompt_tokens_are_refused_where_layers_have_inputs() -> None:
    decoder = decoder_of("gemma4 shared")
    probes = chain_tree([1]).with_probes([[decoder.config.vocab]], [[0]])
    with pytest.raises(ValueError, match=r"layers of this one \(gemma4_text\) read inputs of their own"):
        DecoderRunner(decoder).forward([0], replace(probes, probe_embeddings=torch.ones(1, decoder.config.hidden)))


def test_missing_tensors_are_named() -> None:
    config = from_hf(raw_of("gemma4 shared"))
    for missing in ("layers.1.layer_scalar", "embed_tokens_per_layer.weight", "layers.0.per_layer_projection.weight"):
        weights = SafetensorsWeights(folder_of("gemma4 shared"))
        del weights._file_of[f"model.{missing}"]
        with pytest.raises(ValueError, match=f"has no model.{missing}"):
            build_decoder(config, weights, torch.float32, torch.device("cpu"))
