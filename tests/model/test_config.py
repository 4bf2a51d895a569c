"""Configurations: defaults of transformers for missing keys, GGUF metadata as llama.cpp reads it, invalid values."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretell.model.block.rope import rope_tables
from foretell.model.config.families import KINDS
from foretell.model.config.model import ModelConfig, MoEConfig, with_context, with_rope_scaling
from foretell.model.config.readers.gguf import from_gguf
from foretell.model.config.readers.hf import from_hf
from foretell.model.config.states import ShortConvConfig
from foretell.testing import TINY

SIZES: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 32,
}  # fmt: skip
GEMMA3_4B: Mapping[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}  # fmt: skip
"""As google/gemma-3-4b-it was published, keys of the vision part apart."""


def oracle_of(raw: Mapping[str, Any]) -> Any:
    values = json.loads(json.dumps(raw))
    return AutoConfig.for_model(values.pop("model_type"), **values).get_text_config()


def windowed(theirs: Any) -> tuple[int, ...]:
    """Layers that have a window in transformers: by type where the class says types, else all."""
    window, layers = getattr(theirs, "sliding_window", None), theirs.num_hidden_layers
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * layers
    window = window or getattr(theirs, "attention_chunk_size", None)
    return tuple(i for i in range(layers) if window and types[i] in ("sliding_attention", "chunked_attention"))


def agree(ours: ModelConfig, theirs: Any) -> None:
    """Every size and number of both is the same."""
    said = theirs.to_dict()
    head_dim = said.get("qk_head_dim") or said.get("head_dim") or theirs.hidden_size // theirs.num_attention_heads
    kv_heads, our_dim = ours.local_kv_heads or ours.kv_heads, ours.local_head_dim or ours.head_dim
    assert (ours.vocab, ours.hidden, ours.layers, ours.heads, kv_heads, our_dim, ours.context) == (
        theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers, theirs.num_attention_heads,
        theirs.num_attention_heads if ours.latent else theirs.num_key_value_heads, head_dim,
        min(theirs.max_position_embeddings, said.get("index_topk", theirs.max_position_embeddings)),
    )  # fmt: skip
    hybrid = said.get("shared_intermediate_size") if ours.architecture == "granitemoehybrid" else None
    assert (ours.ffn, ours.norm_eps, ours.tied) == (
        said.get("intermediate_size_mlp", hybrid or theirs.intermediate_size),
        said.get("rms_norm_eps", said.get("norm_eps", said.get("layer_norm_epsilon", said.get("layer_norm_eps")))),
        theirs.tie_word_embeddings,
    )
    granite = said.get("attention_multiplier") or (1.0 if ours.layer_scales else None)
    assert ours.scale == pytest.approx(granite or (said.get("query_pre_attn_scalar") or head_dim) ** -0.5)
    assert (ours.attention_softcap, ours.logit_softcap) == (
        said.get("attn_logit_softcapping") or 0,
        said.get("final_logit_softcapping") or 0,
    )
    assert ours.window_layers == windowed(theirs)
    assert not ours.window_layers or ours.window == (said.get("attention_chunk_size") or theirs.sliding_window)
    if ours.layer_scales:
        full = theirs.per_layer_config[ours.layers - 1]
        assert (ours.head_dim, ours.kv_heads) == (full.head_dim, full.num_key_value_heads)
        assert (ours.layer_inputs.width if ours.layer_inputs else 0) == said.get("hidden_size_per_layer_input", 0)
    ropes = theirs.rope_parameters if len(ours.unrotated_layers) < ours.layers else {}
    for rope, name in ((ours.rope, "full_attention"), (ours.local_rope, "sliding_attention")) if ropes else ():
        wanted = ropes.get(name, ropes)
        assert rope is None or (rope.theta, rope.kind, rope.factor) == (
            wanted["rope_theta"], wanted["rope_type"], wanted.get("factor", 1.0),
        )  # fmt: skip
    if ours.experts is not None and not ours.chunked:
        e, count = ours.experts, said.get("num_local_experts") or said.get("n_routed_experts") or said["num_experts"]
        assert (e.count, e.active) == (count, theirs.num_experts_per_tok)
        assert e.ffn == said.get("moe_intermediate_size", theirs.intermediate_size)
        assert e.shared_ffn == said.get("shared_expert_intermediate_size", e.ffn * said.get("n_shared_experts", 0))
        assert e.scale == said.get("routed_scaling_factor", 1.0)
        dense = said.get("first_k_dense_replace", said.get("num_dense_layers"))
        assert e.layers[0] == (said.get("mlp_layer_types", [])[:1].count("dense") if dense is None else dense)
    if ours.latent is not None:
        m = ours.latent
        assert (m.q_rank, m.kv_rank, m.nope_dim, m.rope_dim, m.value_dim) == (
            theirs.q_lora_rank, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim,
            theirs.v_head_dim,
        )  # fmt: skip


MORE_VALUES: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {"num_local_experts": 0},
    "nemotron_h": {"hybrid_override_pattern": "EM-M*-ME"},
}
"""More values of the configuration under test, by architecture."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"use_sliding_window": True, "max_window_layers": 3}], ids=["plain", "windowed"])
def test_what_a_file_leaves_out_is_as_transformers_takes_it(kind: str, more: Mapping[str, Any]) -> None:
    raw = {"model_type": kind, **SIZES, **(more if kind.startswith("qwen") else {})}
    if kind.startswith(("deepseek", "glm4_moe", "glm_moe")):
        raw |= {"n_routed_experts": 16, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    raw |= MORE_VALUES.get(kind, {})
    known = "qwen2" if kind == "mimo" else kind  # transformers has no MiMo, whose model is that of Qwen2
    agree(replace(from_hf(raw), architecture=known), oracle_of(raw | {"model_type": known}))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_gemma_leaves_out_even_sizes(kind: str) -> None:
    agree(from_hf({"model_type": kind}), oracle_of({"model_type": kind}))


def test_gemma_3_as_published() -> None:
    ours = from_hf(GEMMA3_4B)
    agree(ours, oracle_of(GEMMA3_4B))
    assert (ours.head_dim, ours.context, ours.vocab, ours.eos) == (256, 131072, 262208, (1, 106))
    assert ours.rope is not None and (ours.rope.theta, ours.rope.factor) == (1e6, 8.0)
    assert ours.local_rope is not None and (ours.local_rope.theta, ours.local_rope.kind) == (1e4, "default")
    assert len(ours.window_layers) == 29 and ours.window == 1024


def test_gemma_3_27b_has_its_own_attention_scale() -> None:
    text = {**GEMMA3_4B["text_config"], "num_attention_heads": 32, "head_dim": 128, "query_pre_attn_scalar": 168}
    assert from_hf({**GEMMA3_4B, "text_config": text}).scale == 168**-0.5


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 32,
    "short_factor": [1.0 + i / 100 for i in range(32)], "long_factor": [1.0 + i for i in range(32)],
}  # fmt: skip
ROPES: Mapping[str, Mapping[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "legacy": {"type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn two mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn one mscale": {**YARN, "mscale": 0.707},
    "yarn attention": {**YARN, "attention_factor": 0.8, "mscale": 2.0, "mscale_all_dim": 1.0},
    "yarn empty range": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn without a factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    "yarn of this context": {"rope_type": "yarn", "factor": 2.0},
    "half of a head": {**YARN, "partial_rotary_factor": 0.5},
    "linear quarter of a head": {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.25},
    "llama3 half of a head": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
    },
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
    "proportional whole": {"rope_type": "proportional"},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic half of a head": {"rope_type": "dynamic", "factor": 3.0, "partial_rotary_factor": 0.5},
    "longrope": LONGROPE,
    "longrope attention": {**LONGROPE, "attention_factor": 0.9},
    "longrope factor": {**LONGROPE, "factor": 3.0},
    "longrope half of a head": {
        **LONGROPE, "partial_rotary_factor": 0.5, "short_factor": [1.5] * 16, "long_factor": [9.0] * 16,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"moe_latent_size": 16}, "moe_latent_size should be null"),
        ({"hybrid_override_pattern": "MX*"}, r"hybrid_override_pattern should be layers of M, \*, -, E, found 'X'"),
        ({"hybrid_override_pattern": "-*"}, "a pattern with Mamba-2 layers"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act should be relu2"),
        ({"time_step_limit": [0.1, 1.0]}, "time_step_limit should be 0 to infinity"),
    ],
)
def test_what_is_not_supported_of_nemotron_is_refused_by_name(values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_hf({"model_type": "nemotron_h", **SIZES, **values}, "c.json")


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("context", [None, 33, 512])
def test_rotary_tables_are_those_of_transformers(name: str, key: str, context: int | None) -> None:
    """Of the context that the model is opened with; 512 is twice what it was trained for."""
    sizes = {"head_dim": 64, "rope_theta": 5e4, "max_position_embeddings": 256}
    raw = {"model_type": "llama", **SIZES, **sizes, key: ROPES[name]}
    config = from_hf(raw)
    if context is not None and context > (config.longest_context or 256):
        with pytest.raises(ValueError, match=r"512 tokens was asked for, but .* made for 1 to 256; scale them"):
            with_context(config, context)
        return
    config = with_context(config, context)
    assert config.rope is not None
    theirs = oracle_of(raw)
    kind = theirs.rope_parameters["rope_type"]
    frequency, factor = 5e4 ** -(torch.arange(0, 64, 2).double() / 64), 1.0
    if kind != "default":
        longer = {"seq_len": config.context} if kind in ("dynamic", "longrope") else {}
        frequency, factor = ROPE_INIT_FUNCTIONS[kind](theirs, **longer)
    angle = torch.arange(config.context).double()[:40, None] * frequency.double()
    cos, sin = rope_tables(config.rope, 64, config.context)
    torch.testing.assert_close(cos[:40], (angle.cos() * factor).float(), rtol=0, atol=2e-5)
    torch.testing.assert_close(sin[:40], (angle.sin() * factor).float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn two mscales", "dynamic", "proportional whole"])
def test_a_factor_of_one_scales_nothing(name: str) -> None:
    sizes = {"model_type": "llama", **SIZES, "head_dim": 64, "rope_theta": 5e4, "max_position_embeddings": 256}
    ropes = [from_hf({**sizes, "rope_scaling": r}).rope for r in ({**ROPES[name], "factor": 1.0}, ROPES["default"])]
    scaled, plain = (rope_tables(rope, 64, 256) for rope in ropes if rope is not None)
    for one, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_positions_of_images_change_nothing_for_text(kind: str) -> None:
    """Published Qwen3.5 checkpoints share the rotary dimensions out among time, height and width."""
    scaled = {"factor": 4.0, "original_max_position_embeddings": 64} if kind == "yarn" else {}
    parameters = {"rope_type": kind, "rope_theta": 1e7, "partial_rotary_factor": 0.25, **scaled}
    images = {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    raw = {"model_type": "qwen3", **SIZES, "head_dim": 64}
    assert from_hf({**raw, "rope_parameters": parameters | images}) == from_hf({**raw, "rope_parameters": parameters})


def test_longrope_opens_with_the_context_before_scaling() -> None:
    config = from_hf({"model_type": "llama", **SIZES, "head_dim": 64, "rope_scaling": LONGROPE})
    assert (config.context, config.longest_context) == (32, 2048)


def test_other_rotary_scaling_replaces_that_of_the_file() -> None:
    raw = {"model_type": "llama", **SIZES, "max_position_embeddings": 64, "head_dim": 64}
    plain = from_hf({**raw, "rope_theta": 5e4})
    scalings: list[dict[str, Any]] = [YARN, *({"rope_type": t, "factor": 2.0} for t in ("linear", "dynamic"))]
    for parameters in scalings:
        original = parameters.get("original_max_position_embeddings", 64)
        longer = with_rope_scaling(plain, parameters)
        assert longer.rope == from_hf({**raw, "rope_theta": 5e4, "rope_scaling": parameters}).rope
        assert longer.context == max(64, original * int(parameters["factor"]))
        assert with_rope_scaling(longer, {"rope_type": "linear", "factor": 4.0}).context == 4 * original
    assert with_rope_scaling(plain, None) is plain
    with pytest.raises(ValueError, match="rope_scaling: rotary scaling 'ntk' is not supported; known: default, linear"):
        with_rope_scaling(plain, {"rope_type": "ntk", "factor": 2.0})
    with pytest.raises(ValueError, match="rope_scaling: factr should be left out: the yarn rotary embedding has no"):
        with_rope_scaling(plain, {"rope_type": "yarn", "factr": 2.0})


def test_every_type_of_layer_has_its_own_rotary_embedding() -> None:
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = from_hf({"model_type": "gemma3_text", **SIZES, "head_dim": 64, "rope_parameters": ropes})
    assert config.rope is not None and config.local_rope is not None
    assert (config.rope.kind, config.rope.theta, config.rope.fraction) == ("proportional", 1e6, 0.25)
    assert (config.local_rope.kind, config.local_rope.theta, config.local_rope.fraction) == ("default", 1e4, 1.0)


def test_an_original_context_beside_the_scaling_goes_first() -> None:
    raw = {"model_type": "llama", **SIZES, "original_max_position_embeddings": 64, "rope_scaling": dict(YARN)}
    rope, theirs = from_hf(raw).rope, oracle_of(raw)
    ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert rope is not None
    assert rope.original_context == theirs.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}},
        {"rope_scaling": {**LONGROPE, "short_mscale": 1.2}},
        {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {**YARN, "partial_rotary_factor": 1.5}},
        {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}},
        {"partial_rotary_factor": 0.3, "head_dim": 10},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
    ids=str,
)
def test_rotary_embeddings_that_are_not_computed_are_refused_by_name(values: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'ntk'|longrope|mrope|factor|full_attention|short_mscale|_beta") as error:
        from_hf({"model_type": "llama", **SIZES, **values})
    assert "\n" not in str(error.value)


HOSTILE: tuple[Any, ...] = ([], {}, "x", math.inf, math.nan, -1, 0, True, 0.5, 10**30, 10**400, {"a": 1}, [None], None)


def keys_of(raw: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in raw.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*at, key))


def replaced(raw: Mapping[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    out = dict(raw)
    out[path[0]] = value if len(path) == 1 else replaced(raw[path[0]], path[1:], value)
    return out


WHOLE: Mapping[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu", "hidden_activation": "gelu", "attention_bias": False, "mlp_bias": False, "qkv_bias": True,
    "sliding_window": 8,
    "use_sliding_window": True, "max_window_layers": 2, "layer_types": ["full_attention"] * 8, "bos_token_id": 1,
    "eos_token_id": [1, 2],
    "tie_word_embeddings": True, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True, "sliding_window_pattern": 6,
    "rope_local_base_freq": 1e4,
    "use_bidirectional_attention": False, "partial_rotary_factor": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", "gemma3"])
def test_hostile_values_are_read_or_refused_by_file_and_key(kind: str) -> None:
    scaling = {
        **YARN,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
        "attention_factor": 1.0,
    }
    raw: dict[str, Any] = {"model_type": kind, **WHOLE, "rope_scaling": scaling}
    if kind == "gemma3":
        raw = {
            "model_type": kind,
            "text_config": {**WHOLE, "rope_scaling": scaling},
            "eos_token_id": 1,
            "tie_word_embeddings": True,
        }
    from_hf(raw)
    for path in keys_of(raw):
        for value in HOSTILE:
            try:
                from_hf(replaced(raw, path, value), "dir/config.json")
            except ValueError as error:
                assert str(error).startswith("dir/config.json: ") and "\n" not in str(error) and len(str(error)) < 400


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": []}, r"c.json: hidden_size should be an integer, found \[\]"),
        ({"hidden_size": 0}, "c.json: hidden_size should be at least 1, found 0"),
        ({"vocab_size": 1.5}, "c.json: vocab_size should be an integer, found 1.5"),
        ({"num_hidden_layers": 10**12}, "c.json: num_hidden_layers should be at most 10000"),
        ({"rms_norm_eps": math.inf}, "c.json: rms_norm_eps should be a finite number, found inf"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "c.json: rope_scaling.factor should be a finite "
                                                                   "number, found '2'"),
        ({"eos_token_id": ["</s>"]}, "c.json: eos_token_id should be an integer or a list of integers"),
        ({"tie_word_embeddings": "yes"}, "c.json: tie_word_embeddings should be true or false, found 'yes'"),
        ({"head_dim": 5}, "c.json: head_dim should be even"),
        ({"num_key_value_heads": 5}, "c.json: .*32 query heads cannot share 5"),
        ({"model_type": ["llama"]}, "c.json: model_type should be a string"),
    ],
    ids=str,
)  # fmt: skip
def test_the_sentence_names_file_key_and_what_was_found(values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_hf({"model_type": "llama", **SIZES, **values}, "c.json")


def gguf_meta(more: Mapping[str, Any], name: str = "llama") -> dict[str, Any]:
    sizes = {
        "embedding_length": 128, "block_count": 4, "attention.head_count": 4, "context_length": 64,
        "feed_forward_length": 32,
    }  # fmt: skip
    return {
        "general.architecture": name,
        **{f"{name}.{k}": v for k, v in sizes.items()},
        "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "b", "<end_of_turn>"],
        **more,
    }


def test_gguf_end_tokens_are_those_of_llama_cpp() -> None:
    at = "tokenizer.ggml."
    assert from_gguf(gguf_meta({})).eos == ()
    assert from_gguf(gguf_meta({at + "eos_token_id": 2})).eos == (2,)
    both = {at + "eos_token_id": 1, at + "eot_token_id": 106, at + "eom_token_id": 3, at + "eos_token_ids": [1, 5]}
    assert from_gguf(gguf_meta(both)).eos == (1, 106, 3, 5)
    # Control tokens of these names end an answer; others of these names do not.
    types = {at + "eos_token_id": 2, at + "token_type": [1, 3, 1, 1]}
    assert from_gguf(gguf_meta(types)).eos == (2, 1)
    assert from_gguf(gguf_meta({**types, at + "eot_token_id": 2})).eos == (2, 1)


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "head_dim", "divisor"),
    [
        ("gemma2", 46, 4608, 32, 128, 144), ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168), ("gemma3", 48, 3840, 16, 256, 256),
    ],
)  # fmt: skip
def test_gemma_27b_in_gguf_divides_by_width_per_head(
    name: str, layers: int, width: int, heads: int, head_dim: int, divisor: int
) -> None:
    values = {
        "block_count": layers,
        "embedding_length": width,
        "attention.head_count": heads,
        "attention.key_length": head_dim,
    }
    config = from_gguf(gguf_meta({f"{name}.{k}": v for k, v in values.items()}, name))
    assert config.scale == divisor**-0.5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_hostile_gguf_metadata_is_read_or_refused(name: str) -> None:
    more = {f"{name}.rope.scaling.type": "yarn", f"{name}.rope.scaling.factor": 2.0, f"{name}.rope.dimension_count": 32}
    raw = gguf_meta({**more, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.token_type": [1] * 4}, name)
    from_gguf(raw)
    for key in raw:
        for value in HOSTILE:
            try:
                from_gguf({**raw, key: value}, "m.gguf")
            except ValueError as error:
                assert str(error).startswith("m.gguf: ") and "\n" not in str(error)


def test_gguf_rotary_keys_are_read_as_llama_cpp_reads_them() -> None:
    at = "qwen2.rope."
    meta = gguf_meta({at + "dimension_count": 16, at + "scaling.type": "yarn", at + "scaling.factor": 4.0,
                      at + "scaling.original_context_length": 32, at + "scaling.attn_factor": 0.5,
                      at + "scaling.yarn_beta_fast": 16.0}, "qwen2")  # fmt: skip
    rope = from_gguf(meta).rope
    assert rope is not None and rope.rotary_dim(32) == 16 and rope.beta_fast == 16
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    long = {at + "scaling.original_context_length": 32, at + "scaling.attn_factor": 1.1}
    factors = {"rope_factors_short": [1.0] * 16, "rope_factors_long": [4.0] * 16}
    config = from_gguf(gguf_meta(long, "qwen2"), rope_factors=factors)
    assert config.rope is not None and (config.context, config.longest_context) == (32, 64)
    assert (config.rope.kind, config.rope.attention_factor) == ("longrope", 1.1)
    for rest, said in (({at + "scaling.yarn_log_multiplier": 0.1}, "0: no other value"), ({at + "scaling.x": 1}, "x")):
        with pytest.raises(ValueError, match=said):
            from_gguf(gguf_meta(rest, "qwen2"))


def test_configurations_are_read_without_torch() -> None:
    code = "import sys; import foretell.model.config.readers.hf; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_cut_of_a_model_marks_the_layers_that_are_left() -> None:
    """Every field that marks layers, those of experts and of recurrent states included."""
    names = [f.name for f in fields(ModelConfig) if f.name.endswith("_layers") and f.name != "kv_layers"]
    marked = {name: (i % 3, i % 3 + 3) for i, name in enumerate(names)}
    whole = replace(TINY, layers=6, state=ShortConvConfig((1, 4), 16), experts=MoEConfig(4, 2, 8, layers=(2, 5)))
    whole = replace(whole, **marked)  # type: ignore[arg-type]
    for layers in ((0, 1), (5,), (4, 0, 3), (2, 3, 4, 5), range(6)):
        cut = whole.of_layers(layers)
        assert cut.layers == len(layers)
        for i, layer in enumerate(layers):
            assert all((i in getattr(cut, name)) is (layer in marked[name]) for name in names)
            assert (i in cut.state_layers) is (layer in (1, 4))
            assert (cut.experts is not None and i in cut.experts.layers) is (layer in (2, 5))
        assert (cut.state is None) is not bool({1, 4} & {*layers})
        assert (cut.experts is None) is not bool({2, 5} & {*layers})
    assert whole.of_layers(range(6)) == whole


def test_a_cut_reads_the_keys_that_the_whole_model_reads() -> None:
    whole = replace(TINY, layers=5, kv_layers=(0, 1, 2, 1, 2))
    assert whole.of_layers(range(5)) == whole and whole.of_layers(range(3)).kv_layers == ()
    assert whole.of_layers((1, 2, 4)).kv_layers == (0, 1, 1)
    with pytest.raises(ValueError, match=r"layers \[0, 4\] read keys and values of layer 2, which is not among them"):
        whole.of_layers((0, 4))
    with pytest.raises(ValueError, match="at least one layer"):
        whole.of_layers(())
