"""Tokenizers of GGUF files."""

import pytest

from foretell.tokenizer.gguf import codec_from_gguf


@pytest.mark.parametrize(
    "change", [{"merges": ["a nosuch"]}, {"merges": ["a"]}, {"merges": None}, {"tokens": [1]}, {"bos_token_id": 9}]
)
def test_a_damaged_tokenizer_of_a_gguf_file_is_one_sentence(change: dict[str, object]) -> None:
    good = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1]}
    assert codec_from_gguf({f"tokenizer.ggml.{k}": v for k, v in good.items()}).encode("ab") == [2]
    bad = {f"tokenizer.ggml.{k}": v for k, v in (good | change).items() if v is not None}
    with pytest.raises(ValueError, match="the tokenizer in this GGUF file is damaged") as error:
        codec_from_gguf(bad)
    assert "\n" not in str(error.value)
