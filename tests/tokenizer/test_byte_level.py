"""Checkpoints that hold the files of Qwen2's byte-level BPE instead of a `tokenizer.json`, as Dream's do."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from byte_level import byte_level

from foretell.tokenizer.codec import from_directory
from foretell.tokenizer.directory import require_tokenizer

TEXTS = ("thé ¤ 1234\n\n  the   \tthing's 中文 ", "e\u0301 < > <|im_end|><think>", "", " THE'LL\r\n")


def save(folder: Path, name: str = "DreamTokenizer", listed: bool = True) -> int:
    """Write the files; the number of tokens without the added ones."""
    state = json.loads(byte_level().tokenizer.to_str())["model"]
    count = len(state["vocab"])
    (folder / "vocab.json").write_text(json.dumps(state["vocab"]))
    lines = [" ".join(pair) for pair in state["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n", "utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(count): {"content": "<|endoftext|>", **flags, "special": True},
        str(count + 1): {"content": "<|im_end|>", **flags, "special": True},
        str(count + 2): {"content": "<think>", **flags, "special": False},
    }
    config: dict[str, Any] = {"tokenizer_class": name, "eos_token": "<|im_end|>", "bos_token": None}
    if listed:
        config["added_tokens_decoder"] = added
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages[0].content }}"}))
    (folder / "added_tokens.json").write_text(json.dumps({t["content"]: int(i) for i, t in added.items()}))
    return count


def test_texts_have_the_tokens_that_transformers_gives_them(tmp_path: Path) -> None:
    count = save(tmp_path)
    codec = from_directory(tmp_path)
    theirs = transformers.Qwen2TokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert codec.encode(text) == theirs(text)["input_ids"]
    assert codec.encode("<|im_end|>") == [count + 1] and codec.decode([count + 1]) == ""
    assert codec.eos == "<|im_end|>" and codec.chat_template is not None


def test_older_files_name_added_tokens_beside_the_vocabulary(tmp_path: Path) -> None:
    count = save(tmp_path, "Qwen2Tokenizer", listed=False)
    assert from_directory(tmp_path).encode("<|im_end|>") == [count + 1]


def test_other_tokenizers_without_a_file_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "GPT2Tokenizer")
    with pytest.raises(ValueError, match=r"no tokenizer.json here; convert the tokenizer"):
        require_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("merges.txt", "t h e\n", r"damaged vocab.json or merges.txt \("),
        ("vocab.json", "[", r"damaged vocab.json or merges.txt \("),
        ("tokenizer_config.json", '{"9": {"content": "<x>"}}', "<x> should be token 9, and after vocab.json it is"),
        ("tokenizer_config.json", '{"nine": {"content": "<x>"}}', "should be a number"),
        ("tokenizer_config.json", '{"9": {}}', "content"),
    ],
)
def test_damaged_files_are_one_sentence(file: str, text: str, words: str, tmp_path: Path) -> None:
    save(tmp_path)
    if file == "tokenizer_config.json":
        text = json.dumps({"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": json.loads(text)})
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        from_directory(tmp_path)
    assert "\n" not in str(error.value)
