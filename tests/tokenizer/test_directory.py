"""Tokenizers of directories: the tokens and templates that their files add, as AutoTokenizer reads them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level

from foretell.tokenizer.codec import TextCodec, from_directory
from foretell.tokenizer.directory import require_tokenizer

TEXTS = ["a<|im_end|>b", "a <|t|> b<|im_end|><|u|>", "<s>hi</s>", "hi <mask> there", "plain"]
END = {
    "content": "<|im_end|>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}
T = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
FILES: dict[str, dict[str, Any]] = {
    "nothing more": {},
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"300": END}}},
    "properties of added tokens": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "300": END | {"content": "<|t|>", "lstrip": True, "rstrip": True, "special": False},
                "301": END | {"content": "<mask>", "lstrip": True},
            }
        }
    },
    "added_tokens.json": {"added_tokens.json": {"<|im_end|>": 300, "<|t|>": 301}},
    "added_tokens.json with a special token": {
        "added_tokens.json": {"<|im_end|>": 300},
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
    },
    "special_tokens_map.json": {"special_tokens_map.json": {"eos_token": "<|im_end|>", "mask_token": "<mask>"}},
    "special_tokens_map.json with properties": {
        "special_tokens_map.json": {"mask_token": END | {"content": "<mask>", "lstrip": True}}
    },
    "additional_special_tokens": {
        "tokenizer_config.json": {"additional_special_tokens": ["<|t|>", {"__type": "AddedToken"} | END]}
    },
    "extra_special_tokens by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|t|>"}}},
    "a named token of the model": {"tokenizer_config.json": {"image_token": "<|u|>"}},
    "BOS and EOS asked for": {
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    },
    "BOS not wanted": {"tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": False}},
}  # fmt: skip


def write(path: Path, files: Mapping[str, Any]) -> None:
    """A tokenizer of 300 tokens, and these files."""
    tokenizer = byte_level().tokenizer
    tokenizer.add_tokens([f"<filler {i}>" for i in range(tokenizer.get_vocab_size(), 298)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    assert tokenizer.get_vocab_size() == 300
    tokenizer.save(str(path / "tokenizer.json"))
    given = {"tokenizer_config.json": {}} | dict(files)
    given["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": T} | given[
        "tokenizer_config.json"
    ]
    for name, content in given.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))


def both(path: Path, files: Mapping[str, Any]) -> tuple[TextCodec, Any]:
    transformers = pytest.importorskip("transformers")
    write(path, files)
    return from_directory(path), transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("name", FILES)
def test_tokens_that_other_files_add_are_read(name: str, tmp_path: Path) -> None:
    codec, theirs = both(tmp_path, FILES[name])
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert (text, codec.encode(text)) == (text, ids)
        assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert codec.decode(ids, False) == theirs.decode(ids)


TEMPLATES: dict[str, dict[str, Any]] = {
    "one": {},
    "a file goes before the configuration": {"chat_template.jinja": T + "FILE"},
    "a list": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "default", "template": T}, {"name": "tool_use", "template": T + "TOOLS"}]
        }
    },
    "more files": {"chat_template.jinja": T, "additional_chat_templates/tool_use.jinja": T + "TOOLS"},
    "special tokens in a template": {
        "tokenizer_config.json": {"chat_template": T + "{{ pad_token }}{{ unk_token }}", "pad_token": "<pad>"}
    },
    "bos_token is told by another file": {"special_tokens_map.json": {"bos_token": "<s>"}},
}  # fmt: skip


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_is_the_one_that_transformers_takes(name: str, tools: Any, tmp_path: Path) -> None:
    codec, theirs = both(tmp_path, TEMPLATES[name])
    messages = [{"role": "user", "content": "Hello"}]
    want = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert codec.chat(messages, True, variables={"tools": tools} if tools else None) == want


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": T}]}})
    with pytest.raises(ValueError, match=r"has no chat template.*it has templates named rag"):
        from_directory(tmp_path).chat([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": {"900": END}}}, "should be token 900, and it is 300"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": END}}}, "damaged added tokens"),
        ({"added_tokens.json": {"<x>": "y"}}, "damaged added tokens"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default"}]}}, "chat_template must be a string"),
    ],
)
def test_damaged_files_are_one_sentence(files: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, files)
    with pytest.raises(ValueError, match=words) as error:
        from_directory(tmp_path)
    assert "\n" not in str(error.value)


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tekken\.json is Mistral's own format; convert the tokenizer"):
        require_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="convert the tokenizer"):
        require_tokenizer(tmp_path)


def message(*fields: tuple[int, object]) -> bytes:
    """A message of protocol buffers."""
    data = b""
    for number, value in fields:
        if isinstance(value, bytes):
            data += bytes([*varint(number << 3 | 2), *varint(len(value))]) + value
        elif isinstance(value, float):
            data += bytes(varint(number << 3 | 5)) + struct.pack("<f", value)
        else:
            assert isinstance(value, int)
            data += bytes([*varint(number << 3), *varint(value)])
    return data


def varint(value: int) -> list[int]:
    return [value] if value < 128 else [value & 127 | 128, *varint(value >> 7)]


def sentencepiece_model(kind: int, prefix: bool, extra: bool) -> bytes:
    """A model of three control tokens, all bytes, pieces of "the cat sat" by a chain of merges, and as in Mistral's
    runs of blanks of one score.
    """
    single = [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
    words = ["th", "the", "▁the", "at", "cat", "▁cat", "sat", "▁sat", *"▁thecas"]
    runs = [("▁" * n, -9.0 if n + kind == 3 else -1e9, 1) for n in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)]
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<u>", 0.0, 4), *single, *runs]
    pieces += [(word, -float(i + 1), 1) for i, word in enumerate(words)]
    written = [(1, message((1, text.encode()), (2, score), (3, number))) for text, score, number in pieces]
    return message(
        *written, (2, message((3, kind), (35, 1), (40, 0))), (3, message((3, int(prefix)), (4, int(extra)), (5, 1)))
    )


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize(("prefix", "extra"), [(True, False), (False, False), (True, True), (False, True)])
def test_a_model_of_sentencepiece_is_read(kind: int, prefix: bool, extra: bool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(kind, prefix, extra))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}')
    codec = from_directory(tmp_path)
    tokens = [codec.tokenizer.id_to_token(i) for i in codec.encode("the  cat sé")]
    # A unigram takes the likelier pair, and a BPE the likelier merge.
    blanks = ["▁cat"] if extra else ["▁", "▁cat"] if kind == 2 else ["▁▁", "cat"]
    assert tokens == ["<s>", "▁the" if prefix else "the", *blanks, "▁", "s", "<0xC3>", "<0xA9>"]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(kind, prefix, extra)[:-3])
    with pytest.raises(ValueError, match="damaged SentencePiece model"):
        from_directory(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize(("prefix", "extra"), [(True, False), (False, False), (True, True), (False, True)])
def test_a_model_of_sentencepiece_gives_its_own_ids(kind: int, prefix: bool, extra: bool, tmp_path: Path) -> None:
    own = pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(kind, prefix, extra))
    codec, processor = from_directory(tmp_path), own.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    for text in (
        "the cat",
        " the  cat   sat ",
        *(f"the{' ' * n}cat" for n in range(3, 40)),
        "thecat",
        "",
        " ",
        "cat\n the",
        "é日本 the",
        "▁the",
        "the <u>cat",
        "<u>",
        "a" * 40,
    ):
        assert (text, codec.encode(text)) == (text, processor.encode(text))
