"""Between characters and tokens: the tokenizer, the chat template, and text that streams without splitting a character."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Message = Mapping[str, str]
"""A turn of a conversation: `role` (system, user, assistant) and `content`."""

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer with its model's chat template."""

    tokenizer: Tokenizer
    chat_template: str | None = None
    bos: str | None = None
    eos: str | None = None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of raw text; `special`: add what the tokenizer puts around a prompt."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the assistant answers.

        Raises:
            ValueError: the model has no chat template, or the template refuses the conversation.
        """
        return self.encode(self._rendered(messages), special=False)

    def users_turn(self) -> list[int]:
        """Token ids of a conversation up to where the user speaks: what a model continues that writes its own questions.

        Raises:
            ValueError: the model has no chat template.
        """
        return self.encode(self._rendered([{"role": "user", "content": _MARK}]).split(_MARK)[0], special=False)

    def _rendered(self, messages: Sequence[Message]) -> str:
        if self.chat_template is None:
            raise ValueError("this model has no chat template: use raw text (--raw)")
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, bos_token=self.bos or "", eos_token=self.eos or ""
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        return environment.from_string(self.chat_template or "")

    def detokenizer(self) -> "Detokenizer":
        """A fresh incremental decoder."""
        return Detokenizer(self.decode)


class Detokenizer:
    """Turns a growing list of tokens into text that never takes back a character and never splits one.

    Decodes a short window of tokens around the edge; a tail that is not yet a whole character is held until it is.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = 0
        self._done = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens complete."""
        self._tokens.extend(tokens)
        known = self._decode(self._tokens[self._start : self._done])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._start, self._done = self._done, len(self._tokens)
        return text[len(known) :]

    def finish(self) -> str:
        """What was held back, as it stands."""
        text = self._decode(self._tokens[self._start :])[len(self._decode(self._tokens[self._start : self._done])) :]
        self._start = self._done = len(self._tokens)
        return text


class StopStrings:
    """Cuts streamed text at the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was met."""
        if not self._stops:
            return text, False
        self._held += text
        hits = [i for i in (self._held.find(s) for s in self._stops) if i >= 0]
        if hits:
            shown, self._held = self._held[: min(hits)], ""
            return shown, True
        longest = max(
            (k for s in self._stops for k in range(1, len(s)) if self._held.endswith(s[:k])),
            default=0,
        )
        shown, self._held = self._held[: len(self._held) - longest], self._held[len(self._held) - longest :]
        return shown, False

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text


def from_directory(path: Path) -> TextCodec:
    """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of a Hugging Face model directory.

    Raises:
        ValueError: there is no `tokenizer.json`, or a file is damaged.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{path}: no tokenizer.json here; convert the tokenizer with transformers' `save_pretrained` first"
        )
    raw = _settings(path / "tokenizer_config.json")
    template = raw.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text()

    def token(name: str) -> str | None:
        value = raw.get(name)
        return value["content"] if isinstance(value, dict) else value

    return TextCodec(_tokenizer(file), template, token("bos_token"), token("eos_token"))


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: not a JSON object ({error}); download it again") from error


def _tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file}: damaged tokenizer ({error}); download it again") from error


def from_gguf(meta: Mapping[str, Any]) -> TextCodec:
    """Build the tokenizer that a GGUF file describes: byte-level BPE (`gpt2`) or SentencePiece (`llama`).

    Raises:
        ValueError: another kind of tokenizer.
    """
    kind = meta.get("tokenizer.ggml.model")
    tokens: list[str] = list(meta["tokenizer.ggml.tokens"])
    types: list[int] = list(meta.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    vocab = {t: i for i, t in enumerate(tokens)}
    if kind == "gpt2":
        merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=meta.get("tokenizer.ggml.pre") == "llama-bpe")
        )
        tokenizer.pre_tokenizer = _pre_tokenizer(str(meta.get("tokenizer.ggml.pre", "default")))
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "llama":
        tokenizer = _sentencepiece(
            tokens, list(meta["tokenizer.ggml.scores"]), int(meta.get("tokenizer.ggml.unknown_token_id", 0))
        )
    else:
        raise ValueError(
            f"GGUF tokenizer {kind!r} is not supported; known: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    control, user_defined = 3, 4
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types, strict=True) if k == control]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == user_defined]
    )

    def token(name: str) -> str | None:
        index = meta.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[int(index)]

    bos = token("bos")
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token", False):
        first = (bos, int(meta["tokenizer.ggml.bos_token_id"]))
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos}:0 $A:0", f"{bos}:0 $A:0 $B:0", [first])
    return TextCodec(tokenizer, meta.get("tokenizer.chat_template"), bos, token("eos"))


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind in ("default", "gpt-2"):
        return byte_level
    from tokenizers import Regex

    numbers = r"\p{N}{1,3}" if kind == "llama-bpe" else r"\p{N}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(tokens: list[str], scores: list[float], unknown: int) -> Tokenizer:
    """SentencePiece BPE: a pair merges into a known piece, better scores first."""
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], left, right))
    merges.sort(key=lambda m: (m[0], m[1]))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(m[2], m[3]) for m in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
