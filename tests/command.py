"""Runs the command line in this process, and saves tiny random Llama checkpoints: config.json, model.safetensors and
tokenizer.json.
"""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from foretell.cli import app
from foretell.testing import RandomWeights

LAYERS, HIDDEN, HEADS, FFN = 2, 16, 2, 24
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"

ENVIRONMENT: Mapping[str, str] = {"FORETELL_NATIVE": "0", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
"""Tests of the command line run without the compiled kernels."""


def run_foretell(*arguments: str | Path, stdin: str | None = None) -> Result:
    """Run a command line in this process."""
    return CliRunner(env=ENVIRONMENT).invoke(app, [str(a) for a in arguments], input=stdin)


def expect_error(*arguments: str | Path, stdin: str | None = None, status: int = 1) -> str:
    """Run a command line that must fail with one sentence; returns the sentence."""
    result = run_foretell(*arguments, stdin=stdin)
    assert result.exit_code == status, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("foretell: "), lines
    return lines[0]


@cache
def tiny_target() -> Path:
    """Directory of a target model."""
    return save_tiny_model(_folder("target"))


@cache
def tiny_draft() -> Path:
    """Directory of a draft model: the target's first layer."""
    return save_tiny_model(_folder("draft"), layers=1)


@cache
def _models() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _folder(name: str) -> Path:
    return Path(_models().name, name)


def save_tiny_model(
    path: Path,
    seed: int = 0,
    vocab: int = 257,
    context: int = 512,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    ffn: int = FFN,
) -> Path:
    """Save a model; its tokens are the 256 bytes, `<end>`, and fillers up to the size of the vocabulary."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "intermediate_size": ffn, "max_position_embeddings": context, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "eos_token_id": 256,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    save_file(_tensors(vocab, layers, seed, hidden, ffn), path / "model.safetensors")
    tiny_tokenizer(vocab).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
    return path


def _tensors(vocab: int, layers: int, seed: int, hidden: int, ffn: int) -> dict[str, torch.Tensor]:
    weights, head_dim = RandomWeights(seed), hidden // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (head_dim, hidden),
                "self_attn.v_proj": (head_dim, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (ffn, hidden),
                "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    return {name: weights.require(name, *shape).contiguous() for name, shape in shapes.items()}


def tiny_tokenizer(vocab: int) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*letters, "<end>"])}
    words |= {f"<filler {i}>": i for i in range(257, vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer
