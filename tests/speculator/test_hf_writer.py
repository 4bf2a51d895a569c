"""A written directory is the same model for our own loader and for transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell import load
from foretell.model.block.linear import Linear
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.speculator.hf_writer import write_hf
from foretell.testing import TINY, letter_codec, tiny_decoder
from helpers import all_logits, oracle_logits, random_tokens

WIDE = replace(TINY, vocab=23, hidden=32, head_dim=8, tied=True, bos=1, eos=(2,))
TEXT = random_tokens(40, 23)


@pytest.mark.parametrize(
    "config",
    [
        WIDE,
        replace(WIDE, qkv_bias=True, output_bias=True, mlp_bias=True, activation="gelu_tanh"),
        replace(WIDE, rope=RopeConfig(kind="llama3", factor=8.0, original_context=32)),
        replace(WIDE, rope=RopeConfig(theta=500.0, kind="linear", factor=2.0), eos=(2, 3)),
    ],
    ids=["plain", "biases", "llama3", "linear"],
)
def test_a_written_decoder_is_read_back_as_it_was(config: ModelConfig, tmp_path: Path) -> None:
    decoder = tiny_decoder(config, dtype=torch.float32)
    write_hf(tmp_path, decoder, letter_codec(23), torch.float32)
    model = load(str(tmp_path), dtype="float32")
    assert replace(model.config, rope=None) == replace(config, rope=None)
    assert model.eos == config.eos
    assert model.codec.encode("abc") == letter_codec(23).encode("abc")
    wanted = all_logits(decoder, TEXT)
    torch.testing.assert_close(all_logits(model.network, TEXT), wanted, rtol=1e-4, atol=1e-4)
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32)
    torch.testing.assert_close(oracle_logits(oracle, TEXT), torch.from_numpy(wanted).float(), rtol=1e-3, atol=1e-3)


def test_an_own_head_is_written(tmp_path: Path) -> None:
    decoder = tiny_decoder(replace(WIDE, tied=False), dtype=torch.float32)
    decoder.head = Linear(torch.randn(23, 32))
    write_hf(tmp_path, decoder, letter_codec(23), torch.float32)
    read_back = load(str(tmp_path), dtype="float32").network
    torch.testing.assert_close(all_logits(read_back, TEXT), all_logits(decoder, TEXT), rtol=1e-4, atol=1e-4)


def test_template_and_special_tokens_are_written(tmp_path: Path) -> None:
    codec = replace(letter_codec(23), chat_template="{{ messages[0].content }}", bos="v", eos="w")
    write_hf(tmp_path, tiny_decoder(WIDE), codec)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (said["bos_token"], said["eos_token"]) == ("v", "w")
    assert load(str(tmp_path)).codec.chat([{"role": "user", "content": "abc"}]) == codec.encode("abc")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (replace(WIDE, qk_norm=True), "norms of queries"),
        (replace(WIDE, window=8, window_layers=(0,)), "sliding window"),
        (replace(WIDE, rope=RopeConfig(divisors=(1.0, 1.0, 2.0, 2.0))), "rotary"),
    ],
)
def test_other_architectures_are_refused_before_anything_is_written(
    config: ModelConfig, what: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=what):
        write_hf(tmp_path / "new", tiny_decoder(config))
    assert not (tmp_path / "new").exists()
