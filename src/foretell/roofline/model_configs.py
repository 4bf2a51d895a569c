"""Model configurations from the built-in table, a config.json, or GGUF metadata.

The decoder runs the architectures of `foretell.model.config.readers`. The analyzer also knows a few that the decoder
does not run (OPT, GPT-J, Falcon, GLM-4); they are read here, so that the loader rejects them.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from foretell.model.config.families import KINDS
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.model.config.readers.compressed import base_config
from foretell.model.config.readers.hf import from_hf
from foretell.model.config.states import DeltaNetConfig
from foretell.model.load.gguf_header import GGUFHeader, gguf_config
from foretell.roofline.formats import NumberFormat
from foretell.roofline.names import look_up
from foretell.utils.validation import Fields, read_json

ANALYSIS_ONLY = ("opt", "gptj", "falcon", "glm", "chatglm")
"""Architectures that are analysed and not run."""


@cache
def builtin_models() -> Mapping[str, Mapping[str, Any]]:
    """Built-in models by name: the keys of their config.json, and `source`."""
    return tomllib.loads(resources.files("foretell.roofline").joinpath("models.toml").read_text("utf-8"))


def find_model(name: str) -> tuple[str, ModelConfig]:
    """Short name and configuration of a model: a built-in name, its hub id, a config.json, a directory holding one, or
    a GGUF file.

    Raises:
        ValueError: an unknown name (with a hint), or a file that describes no model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    is_gguf = _is_gguf(path)
    if is_gguf or path.suffix == ".json":
        if not path.is_file():
            raise ValueError(
                f"there is no file {path}; give a config.json, a GGUF file, or a built-in name such as llama-3-8b"
            )
        return (path.stem if is_gguf else path.parent.name or path.stem), _from_file(path)
    table = builtin_models()
    hub = {str(entry["source"]).lower(): key for key, entry in table.items()}
    key = hub.get(name.lower()) or _without_suffixes(name, table)
    raw = look_up(table, key, "built-in model")
    return key.strip().lower().replace("_", "-"), read_config(raw, key)


def _is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name, or by its first bytes as Ollama's blobs."""
    if path.suffix.lower() == ".gguf" or not path.is_file():
        return path.suffix.lower() == ".gguf"
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def own_formats(name: str) -> tuple[NumberFormat, NumberFormat] | None:
    """The formats of the weights of a GGUF file: of its blocks, and of embedding and LM head, by their mean bits; None:
    another source, which does not say.
    """
    path = Path(name).expanduser()
    if not path.is_file() or not _is_gguf(path):
        return None
    file, means = GGUFHeader(path), list[NumberFormat]()
    for in_blocks in (True, False):
        stored = [e for n, e in file.tensors.items() if n.startswith("blk.") is in_blocks and len(e.shape) > 1]
        bits = 8 * sum(map(file.byte_count, stored)) / max(1, sum(prod(e.shape) for e in stored))
        means.append(NumberFormat(f"{bits:.2f}", bits, is_float=bits >= 16))
    return means[0], means[1]


_SUFFIXES = re.compile(r"(-(instruct|chat|it|hf|base|pt|v\d[\d.]*|\d{4}))*")
"""Endings of hub ids of the same architecture: instruction-tuned and dated editions."""


def _without_suffixes(name: str, table: Mapping[str, Any]) -> str:
    """The built-in model that a hub id or an edition of it has the architecture of; else the name as it is."""
    last = name.strip().lower().rpartition("/")[2].removeprefix("meta-").replace("_", "-")
    same = [key for key in table if last.startswith(key) and _SUFFIXES.fullmatch(last[len(key) :])]
    return max(same, key=len) if same else name


def _from_file(path: Path) -> ModelConfig:
    if _is_gguf(path):
        return _counted(gguf_config(GGUFHeader(path)), str(path))
    return read_config(read_json(path, "a config.json holds one object"), str(path))


def read_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read the keys of a Hugging Face config.json, of architectures that run and of those that are only analysed.

    Raises:
        ValueError: a key is missing (named), a value is no number, or the architecture is unknown.
    """
    read = Fields(raw, source)
    kind = Fields(base_config(raw, source), source).text("model_type", default="")
    if kind == "opt":
        return _opt(read)
    if kind == "gptj":
        return _gptj(read)
    if kind == "falcon":
        return _falcon(read)
    if kind == "glm":
        return _glm(read, raw)
    if kind == "chatglm":
        return _glm(read, _glm_keys(read))
    if kind and kind not in KINDS and kind != "gemma3":
        table = {k: k for k in (*KINDS, *ANALYSIS_ONLY)}
        look_up(table, kind, f"architecture (model_type in {source})")
    return _counted(from_hf(raw, source), source)


def _counted(config: ModelConfig, source: str) -> ModelConfig:
    """The configuration, if the operation graph counts all of its layers.

    Raises:
        ValueError: it does not.
    """
    kinds = {
        "recurrent layers other than gated delta nets": not isinstance(config.state, DeltaNetConfig | None),
        "layers without attention or without a feed-forward": bool(
            config.attention_free_layers or config.mlp_free_layers
        ),
        "layers that read the keys and values of others": bool(config.kv_layers),
        "inputs to every layer": config.layer_inputs is not None,
        "other heads in sliding-window layers": bool(config.local_head_dim or config.local_kv_heads),
    }
    if uncounted := [kind for kind, present in kinds.items() if present]:
        raise ValueError(f"{source} has {' and '.join(uncounted)}, which the roofline does not count")
    return config


def _required(read: Fields, *keys: str) -> tuple[int, ...]:
    read.require(*keys)
    return tuple(read.integer(key, least=1) for key in keys)


def _opt(read: Fields) -> ModelConfig:
    h, layers, heads, ffn, vocab = _required(
        read, "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size"
    )
    return ModelConfig(
        "opt", vocab, h, layers, heads, heads, h // heads, ffn, read.integer("max_position_embeddings", default=2048),
        rope=None, activation="relu", gated=False, tied=read.flag("tie_word_embeddings", default=True), qkv_bias=True,
        output_bias=True, mlp_bias=True, learned_positions=True,
    )  # fmt: skip


def _gptj(read: Fields) -> ModelConfig:
    h, layers, heads, vocab = _required(read, "n_embd", "n_layer", "n_head", "vocab_size")
    d = h // heads
    if d < 1:
        raise read.wrong("n_head", f"at most n_embd, {h}", heads)
    return ModelConfig(
        "gptj", vocab, h, layers, heads, heads, d, read.integer("n_inner", default=0) or 4 * h,
        read.integer("n_positions", default=2048),
        rope=RopeConfig(fraction=(read.integer("rotary_dim", default=0) or d) / d),
        activation="gelu_tanh", gated=False, mlp_bias=True, tied=read.flag("tie_word_embeddings", default=False),
        parallel_blocks=True,
    )  # fmt: skip


def _glm(read: Fields, raw: Mapping[str, Any]) -> ModelConfig:
    """GLM-4: Llama with biases of queries, keys and values, and half of each head rotated."""
    bias = read.flag("attention_bias", default=read.flag("add_qkv_bias", default=True))
    config = from_hf({**raw, "model_type": "qwen2" if bias else "llama"}, read.source)
    fraction = read.number("partial_rotary_factor", default=0.5, least=0.0)
    if config.rope is None or not 0 < fraction <= 1:
        raise read.wrong("partial_rotary_factor", "a share above 0 and at most 1", fraction)
    return replace(config, rope=replace(config.rope, fraction=fraction))


def _glm_keys(read: Fields) -> dict[str, Any]:
    """The keys of a GLM-4 checkpoint with code of its own (`chatglm`), under the names of `glm`."""
    heads = read.integer("num_attention_heads", least=1)
    groups = (
        read.integer("multi_query_group_num", least=1) if read.flag("multi_query_attention", default=False) else heads
    )
    sizes = {
        "hidden_size": "hidden_size", "num_hidden_layers": "num_layers", "head_dim": "kv_channels",
        "intermediate_size": "ffn_hidden_size", "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "seq_length",
    }  # fmt: skip
    read.require(*sizes.values())
    counts = {name: read.integer(key, least=1) for name, key in sizes.items()}
    rotation = {"rope_theta": _GLM_THETA * read.number("rope_ratio", default=1.0, least=0.0), "hidden_act": "silu"}
    return counts | rotation | {"num_attention_heads": heads, "num_key_value_heads": groups}


_GLM_THETA = 10000.0
"""Base of the rotation that `rope_ratio` multiplies."""


def _falcon(read: Fields) -> ModelConfig:
    h, layers, heads, vocab = _required(read, "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not read.flag("parallel_attn", default=True) or read.flag("new_decoder_architecture", default=False):
        raise ValueError(f"{read.source}: of Falcon only the architecture of falcon-7b is counted")
    return ModelConfig(
        "falcon", vocab, h, layers, heads, 1 if read.flag("multi_query", default=True) else heads, h // heads,
        read.integer("ffn_hidden_size", default=4 * h), read.integer("max_position_embeddings", default=2048),
        activation="gelu", gated=False, tied=read.flag("tie_word_embeddings", default=True), parallel_blocks=True,
    )  # fmt: skip
