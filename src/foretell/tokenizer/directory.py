"""Reads the tokenizer and the chat templates of a Hugging Face model directory, as transformers does."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, processors

from foretell.tokenizer.byte_level import is_qwen2, read_qwen2
from foretell.tokenizer.sentencepiece import is_sentencepiece, read_sentencepiece
from foretell.utils.validation import read_json

_TOKENIZER, _SENTENCEPIECE, _CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
_AGAIN = "download it again"
_OTHER_FORMATS = {
    "tekken.json": "Mistral's own format",
    "tiktoken.model": "the format of tiktoken",
    _SENTENCEPIECE: "no model of SentencePiece",
}


def require_tokenizer(path: Path) -> None:
    """Check that a model directory has a tokenizer that `read_directory` reads.

    Raises:
        ValueError: it has none.
    """
    if (path / _TOKENIZER).is_file() or is_qwen2(path, _read(path / _CONFIG)):
        return
    if (path / _SENTENCEPIECE).is_file() and is_sentencepiece(path / _SENTENCEPIECE):
        return
    other = next((f"; {name} is {what}" for name, what in _OTHER_FORMATS.items() if (path / name).is_file()), "")
    raise ValueError(
        f"{path}: no {_TOKENIZER} here{other}; convert the tokenizer with transformers' `save_pretrained` first"
    )


class DirectoryTokenizer(NamedTuple):
    """The tokenizer of a directory."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """Texts of the named special tokens, as `bos_token`."""
    templates: dict[str, str]
    """Chat templates by name; `default` is the usual one."""


def read_directory(path: Path) -> DirectoryTokenizer:
    """Read the tokenizer of a directory (`tokenizer.json`, the files of Qwen2's byte-level BPE, or `tokenizer.model` of
    SentencePiece), the tokens that other files add to it, and its chat templates.

    Raises:
        ValueError: there is no tokenizer, or a file is damaged.
    """
    require_tokenizer(path)
    config = _read(path / _CONFIG)
    if "added_tokens_decoder" not in config:
        config |= _read(path / "special_tokens_map.json")
    if (path / _TOKENIZER).is_file():
        tokenizer = _read_tokenizer(path / _TOKENIZER)
    else:
        tokenizer = read_qwen2(path, config) if is_qwen2(path, config) else read_sentencepiece(path / _SENTENCEPIECE)
    named = {key: token for key, value in config.items() if (token := _named_token(path, key, value)) is not None}
    _add_tokens(tokenizer, path, config, named)
    texts = {key: token.content for key, token in named.items()}
    if not (path / _TOKENIZER).is_file():
        _add_ends(tokenizer, config, texts.get("bos_token"), texts.get("eos_token"))
    return DirectoryTokenizer(tokenizer, texts, _templates(path, config))


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, _AGAIN) if file.is_file() else {}


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file}: damaged tokenizer ({error}); {_AGAIN}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _named_token(path: Path, key: str, value: Any) -> AddedToken | None:
    """The special token that this key of the configuration names; None: it names none."""
    if not key.endswith("_token") or value is None or isinstance(value, bool):
        return None
    content = value.get("content") if isinstance(value, dict) else value
    if isinstance(content, str):
        return _added(value, special=True)
    if key in ("bos_token", "eos_token"):
        raise ValueError(f"{path / _CONFIG}: {key} must be a string, found {value!r:.80}")
    return None


def _added(value: Any, **flags: bool) -> AddedToken:
    """A token from its text, or an object with its text and properties, which may be set by `flags`."""
    if isinstance(value, str):
        return AddedToken(value, **flags)
    known = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(value["content"], **{name: bool(value[name]) for name in known if name in value} | flags)


def _add_tokens(tokenizer: Tokenizer, path: Path, config: Mapping[str, Any], named: Mapping[str, AddedToken]) -> None:
    """Add the tokens that other files name and the tokenizer does not have."""
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or ()
    special = [
        *named.values(),
        *(_added(t, special=True) for t in (extra.values() if isinstance(extra, dict) else extra)),
    ]
    present = tokenizer.get_added_tokens_decoder()
    for number, token in sorted(_numbered_tokens(path, config, {t.content for t in special})):
        if number not in present or present[number].content != token.content:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise ValueError(
                f"{path}: {token.content} should be token {number}, and it is {tokenizer.token_to_id(token.content)}; "
                f"{_AGAIN}"
            )
    tokenizer.add_special_tokens(special)


def _numbered_tokens(path: Path, config: Mapping[str, Any], special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    """Numbers and tokens of `added_tokens_decoder`, or, in older directories, of `added_tokens.json`."""
    source = path / _CONFIG if "added_tokens_decoder" in config else path / "added_tokens.json"
    try:
        if "added_tokens_decoder" in config:
            for key, value in config["added_tokens_decoder"].items():
                yield int(key), _added(value)
        else:
            for text, number in _read(source).items():
                is_special = text in special
                yield int(number), AddedToken(text, normalized=not is_special, special=is_special)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"{source}: damaged added tokens ({type(error).__name__}: {error}); {_AGAIN}") from error


def _add_ends(tokenizer: Tokenizer, config: Mapping[str, Any], bos: str | None, eos: str | None) -> None:
    """Put BOS and EOS around texts where the configuration says so; a `tokenizer.json` says that itself."""
    first = [bos] if bos is not None and config.get("add_bos_token") else []
    last = [eos] if eos is not None and config.get("add_eos_token") else []
    sequence = [*(f"{token}:0" for token in first), "$A:0", *(f"{token}:0" for token in last)]
    ids = {token: (token, tokenizer.token_to_id(token)) for token in (*first, *last)}
    tokenizer.post_processor = processors.TemplateProcessing(sequence, [*sequence, "$B:0"], list(ids.values()))


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, `default` the usual one: those of files, or else those of the configuration."""
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    if files:
        return {name: file.read_text("utf-8") for name, file in files.items()}
    source, given = path / _CONFIG, config.get("chat_template")
    if given is None:
        source = path / "chat_template.json"
        given = _read(source).get("chat_template")
    if isinstance(given, list):
        pairs = [(t.get("name"), t.get("template")) for t in given if isinstance(t, dict)]
    else:
        pairs = [] if given is None else [("default", given)]
    templates = dict[str, str]()
    for name, template in pairs:
        if not isinstance(name, str) or not isinstance(template, str):
            raise ValueError(f"{source}: chat_template must be a string, found {template!r:.80}")
        templates[name] = template
    return templates
