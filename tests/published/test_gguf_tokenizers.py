"""Tokenizers of GGUF files give llama.cpp's ids.

`llama_cpp_ids.json` holds what llama.cpp (llama-cpp-python 0.3.36) gave: for every case a digest of the ids of each
text. Where xllamacpp is installed, the tests marked as exhaustive ask llama.cpp itself, on more texts; run as a script,
this module writes the file anew.
"""

import ctypes
import json
import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from gguf_vocabularies import merged, sentencepiece, with_special, write_vocabulary
from hostile_texts import CONTROL_TEXTS, hostile_texts

from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.tokenizer.gguf import codec_from_gguf
from foretell.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

RECORDED = Path(__file__).parent / "llama_cpp_ids.json"
TEXTS = hostile_texts()
LEARNED = [text for text in TEXTS if text not in CONTROL_TEXTS and "\0" not in text]


@cache
def _bpe(raw: bool) -> dict[str, Any]:
    tokens, merges = merged(LEARNED, raw)
    names, types = with_special(tokens, raw)
    return {
        "model": "gpt2", "tokens": names, "token_type": types, "merges": merges, "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0,
    }  # fmt: skip


def bpe(name: str) -> dict[str, Any]:
    """A vocabulary whose texts are cut by the pre-tokenizer of this name."""
    return _bpe(PRE_TOKENIZERS[name].raw) | {"pre": name}


@cache
def cases() -> dict[str, dict[str, Any]]:
    """Keys below `tokenizer.ggml.` by case: every rule for cutting texts once, and every flag."""
    first: dict[PreTokenizer, str] = {}
    for name, rule in PRE_TOKENIZERS.items():
        first.setdefault(rule, name)
    named: dict[str, dict[str, Any]] = {name: bpe(name) for name in first.values()}
    named["no name"] = {k: v for k, v in bpe("default").items() if k != "pre"}
    named["gemma4, by its model"] = {k: v for k, v in (bpe("gemma4") | {"model": "gemma4"}).items() if k != "pre"}
    named["added BOS and EOS"] = bpe("qwen2") | {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    named["no BOS"] = bpe("llama-bpe") | {"add_bos_token": False}
    named["Phi 3 by its name"] = bpe("gpt-2") | {"general.name": "Phi-3 mini"}
    for kind, unigram in (("llama", False), ("t5", True)):
        plain = sentencepiece(LEARNED, unigram) | {"model": kind}
        named[kind] = plain
        for flag in ("add_space_prefix", "add_bos_token", "add_eos_token", "remove_extra_whitespaces"):
            named |= {f"{kind}, {flag} {value}": plain | {flag: value} for value in (True, False)}
        both = {"add_space_prefix": True, "remove_extra_whitespaces": True}
        named[f"{kind}, both flags"] = plain | both
    return named


def ours(meta: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]]:
    """Foretell's ids."""
    codec = codec_from_gguf({k if "." in k else f"tokenizer.ggml.{k}": v for k, v in meta.items()})
    return [codec.encode(text) for text in texts]


def digest(ids: Sequence[int]) -> str:
    """Eight digits for ids."""
    return f"{crc32(repr(list(ids)).encode()):08x}"


@pytest.mark.parametrize("name", cases())
def test_ids_are_those_that_llama_cpp_gave(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())[name]
    want = [recorded[i : i + 8] for i in range(0, len(recorded), 8)]
    assert len(want) == len(TEXTS)
    wrong = [
        (t, ids) for t, ids, right in zip(TEXTS, ours(cases()[name], TEXTS), want, strict=True) if digest(ids) != right
    ]
    assert wrong == []


def test_every_name_cuts_as_a_recorded_rule_does() -> None:
    recorded = json.loads(RECORDED.read_text()).keys()
    rules = {PRE_TOKENIZERS[name] for name in recorded if name in PRE_TOKENIZERS}
    assert set(PRE_TOKENIZERS.values()) == rules and len(PRE_TOKENIZERS) > 80


class _Parameters(ctypes.Structure):
    """What llama.cpp takes to load a model, as it gives it: at most so many bytes."""

    _fields_ = (("_", ctypes.c_byte * 1024),)


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
"""Takes what llama.cpp logs; it must live as long as the library."""


@cache
def llama() -> Any:
    """The library of xllamacpp, silent."""
    library = ctypes.CDLL(pytest.importorskip("xllamacpp.xllamacpp").__file__)
    library.llama_model_default_params.restype = _Parameters
    library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = ctypes.c_char_p, _Parameters
    library.llama_model_get_vocab.argtypes = library.llama_model_free.argtypes = (ctypes.c_void_p,)
    library.llama_vocab_is_eog.argtypes, library.llama_vocab_is_eog.restype = (
        (ctypes.c_void_p, ctypes.c_int32),
        ctypes.c_bool,
    )
    library.llama_tokenize.argtypes = (
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool,
    )  # fmt: skip
    library.llama_log_set(_SILENT, None)
    return library


@contextmanager
def vocabulary(path: Path) -> Iterator[Any]:
    """The vocabulary of a file in llama.cpp."""
    model = llama().llama_model_load_from_file(str(path).encode(), llama().llama_model_default_params())
    assert model, "llama.cpp does not load the file"
    yield llama().llama_model_get_vocab(model)
    llama().llama_model_free(model)


def theirs(folder: Path, meta: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]]:
    """The ids of llama.cpp."""
    write_vocabulary(folder / "m.gguf", meta)
    ids = list[list[int]]()
    with vocabulary(folder / "m.gguf") as vocab:
        for text in texts:
            data = text.encode()
            buffer = (ctypes.c_int32 * (len(data) + 64))()
            count = llama().llama_tokenize(vocab, data, len(data), buffer, len(buffer), True, True)
            ids.append(list(buffer[:count]))
    return ids


def random_texts(count: int) -> list[str]:
    """Texts of any characters, and of those on which rules differ."""
    draw = random.Random(5)
    often = [
        *" \n\r\t'sStBa1é²①३ªʰкЯ漢か가اกಕ。、！…-/$+~_😀<|>▁",
        "ll",
        "RE",
        "\u0301",
        "\u064e",
        "\u00a0",
        "\u3000",
        "\u200d",
        "ǅ",
        "12",
        "4567",
    ]
    every = [chr(c) for c in range(1, 0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]
    mixed = ["".join(draw.choice(often) for _ in range(draw.randint(2, 14))) for _ in range(count)]
    return mixed + [
        "".join(draw.choice(every if draw.random() < 0.6 else often) for _ in range(8)) for _ in range(count)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*cases(), *sorted(set(PRE_TOKENIZERS) - cases().keys())])
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    meta, texts = cases().get(name) or bpe(name), TEXTS + random_texts(150)
    pairs = zip(texts, ours(meta, texts), theirs(tmp_path, meta, texts), strict=True)
    assert [(text, got, want) for text, got, want in pairs if got != want] == []


ENDS = [
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eom_id|>",
    "[EOS]",
    "<turn|>",
    "<|x|>",
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("present", [ENDS, ENDS[:2], ENDS[1:4], ENDS[1:3], ENDS[4:6], ENDS[6:], []])
@pytest.mark.parametrize("told", [{}, {"eot_token_id": 2}])
def test_answers_end_where_llama_cpp_ends_them(present: list[str], told: dict[str, int], tmp_path: Path) -> None:
    old = bpe("qwen2")
    more = {"tokens": old["tokens"] + present, "token_type": old["token_type"] + [3] * len(present)}
    meta = old | more | told
    write_vocabulary(tmp_path / "m.gguf", meta)
    file = GGUF(tmp_path / "m.gguf")
    with vocabulary(file.path) as vocab:
        ends = {i for i in range(len(meta["tokens"])) if llama().llama_vocab_is_eog(vocab, i)}
    assert set(gguf_config(file).eos) == ends


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "no-such"}, r"unknown pre-tokenizer 'no-such'.*llama-bpe.*--pre-tokenizer NAME"),
        ({"pre": "qwen3"}, "did you mean 'qwen35'"),
        ({"model": "bert"}, r"'bert' \(WordPiece.*known: gpt2"),
        ({"model": "rwkv"}, r"'rwkv' \(the tokenizer of RWKV\)"),
        (
            {"add_bos_token": True, "bos_token_id": None, "tokens": ["a"] * 3, "merges": [], "token_type": [1] * 3},
            "bos_token_id",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        ours({k: v for k, v in (bpe("qwen2") | change).items() if v is not None}, [])
    assert "\n" not in str(error.value)


def test_another_pre_tokenizer_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = {f"tokenizer.ggml.{k}": v for k, v in (bpe("qwen2") | {"pre": "no-such"}).items()}
    wanted = ours(bpe("llama-bpe"), ["12345"])[0][1:]
    assert codec_from_gguf(meta, "llama-bpe").encode("12345")[1:] == wanted
    monkeypatch.setenv("FORETELL_PRE_TOKENIZER", "llama-bpe")
    assert codec_from_gguf(meta).encode("12345")[1:] == wanted
    spm = {f"tokenizer.ggml.{k}": v for k, v in cases()["llama"].items()}
    with pytest.raises(ValueError, match="has a SentencePiece tokenizer, which cuts no texts"):
        codec_from_gguf(spm, "llama-bpe")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ids = {name: theirs(Path(folder), meta, TEXTS) for name, meta in cases().items()}
    lines = [f"{json.dumps(name)}: {json.dumps(''.join(map(digest, given)))}" for name, given in ids.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
