"""The tokenizer that a GGUF file describes; where the file is silent, with the defaults of llama.cpp."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from foretell.tokenizer.codec import TextCodec
from foretell.tokenizer.pre_tokenizers import PreTokenizer, pre_tokenizer, split_by

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Token types of GGUF files."""
_PREFIX = "tokenizer.ggml."
_BLANK = "▁"
_KINDS = {
    "gpt2": "byte-level BPE",
    "gemma4": "BPE of characters",
    "llama": "SentencePiece",
    "t5": "unigram of SentencePiece",
}
_NOT_READ = {
    "bert": "WordPiece, of models that embed texts",
    "rwkv": "the tokenizer of RWKV",
    "plamo2": "the tokenizer of PLaMo 2",
    "whitespace": "words, of models that embed texts",
    "hybriddna": "a tokenizer of DNA",
    "none": "a file without a tokenizer",
    "no_vocab": "a file without a tokenizer",
}
_OTHER_SPECIAL = {"unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask", "cls": "cls"}
"""Names of further special tokens in GGUF files (the format spells so), by those in templates."""


class _Defaults(NamedTuple):
    """Special tokens and flags of a kind of tokenizer, where the file is silent."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False


_DEFAULTS = {
    "gpt2": _Defaults(bos=11, eos=11),
    "gemma4": _Defaults(),
    "llama": _Defaults(1, 2, 0, add_bos=True, space_prefix=True),
    "t5": _Defaults(None, 1, 2, add_eos=True),
}


def codec_from_gguf(meta: Mapping[str, Any], pre: str | None = None) -> TextCodec:
    """The tokenizer that the metadata of a GGUF file describes. `pre`: the pre-tokenizer of a byte-level BPE, in place
    of the one that the file names.

    Raises:
        ValueError: another kind of tokenizer, an unknown pre-tokenizer, or a damaged one.
    """
    kind = meta.get(_PREFIX + "model")
    if kind not in _KINDS:
        what = f" ({_NOT_READ[kind]})" if kind in _NOT_READ else ""
        known = ", ".join(f"{name} ({text})" for name, text in _KINDS.items())
        raise ValueError(f"GGUF tokenizer {kind!r}{what} is not supported; known: {known}")
    rule = _rule(meta, pre)
    try:
        return _GGUFTokenizer(meta, rule).codec()
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer in this GGUF file is damaged ({type(error).__name__}: {reason}); download the file again"
        ) from error


def _rule(meta: Mapping[str, Any], pre: str | None) -> PreTokenizer | None:
    """The pre-tokenizer of a BPE; None: another kind of tokenizer has none.

    Raises:
        ValueError: it is not known, or one was named for a tokenizer that has none.
    """
    if meta[_PREFIX + "model"] in ("llama", "t5"):
        if pre is not None:
            raise ValueError(
                f"--pre-tokenizer {pre}: this GGUF file has a SentencePiece tokenizer, which cuts no texts"
            )
        return None
    named = "gemma4" if meta[_PREFIX + "model"] == "gemma4" else str(meta.get(_PREFIX + "pre") or "default")
    return pre_tokenizer(pre or named)


class _GGUFTokenizer:
    """Builds the tokenizer of a file."""

    def __init__(self, meta: Mapping[str, Any], rule: PreTokenizer | None) -> None:
        self._meta, self._rule = meta, rule
        self._defaults = _DEFAULTS[meta[_PREFIX + "model"]]
        tokens = meta[_PREFIX + "tokens"]
        self._tokens: list[str] = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self._types: list[int] = list(meta.get(_PREFIX + "token_type", [_NORMAL] * len(tokens)))
        self._vocab = {token: i for i, token in enumerate(self._tokens)}

    def codec(self) -> TextCodec:
        """The tokenizer with its templates."""
        kind = self._meta[_PREFIX + "model"]
        tokenizer = {"llama": self._sentencepiece, "t5": self._unigram}.get(kind, self._bpe)()
        stripped = self._stripped()
        pairs = list(zip(self._tokens, self._types, strict=True))
        for special, kinds in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
            added = [
                AddedToken(
                    text, normalized=False, special=special, lstrip=text in stripped[0], rstrip=text in stripped[1]
                )
                for text, kind in pairs
                if kind in kinds
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        bos, eos = self._special("bos"), self._special("eos")
        add_bos = self._flag("add_bos_token", self._defaults.add_bos or (self._rule is not None and self._rule.add_bos))
        first = self._added("bos", bos, add_bos)
        last = self._added("eos", eos, self._flag("add_eos_token", self._defaults.add_eos))
        if first or last:
            names = [self._tokens[i] for i in (*first, *last)]
            sequence = [*(self._tokens[i] + ":0" for i in first), "$A:0", *(self._tokens[i] + ":0" for i in last)]
            tokenizer.post_processor = processors.TemplateProcessing(
                sequence, [*sequence, "$B:0"], list({name: (name, self._vocab[name]) for name in names}.values())
            )
        prefix = "tokenizer.chat_template."
        return TextCodec(
            tokenizer,
            self._meta.get("tokenizer.chat_template"),
            self._name("bos"),
            self._name("eos"),
            {k.removeprefix(prefix): v for k, v in self._meta.items() if k.startswith(prefix)},
            {
                f"{name}_token": self._tokens[number]
                for name, key in _OTHER_SPECIAL.items()
                if 0 <= (number := int(self._meta.get(f"{_PREFIX}{key}_token_id", -1))) < len(self._tokens)
            },
        )

    def _special(self, name: str) -> int | None:
        """The id of a special token.

        Raises:
            ValueError: it is beyond the vocabulary.
        """
        number = self._meta.get(f"{_PREFIX}{name}_token_id")
        if number is None:
            default: int | None = getattr(self._defaults, name, None)
            return default if default is not None and default < len(self._tokens) else None
        if not 0 <= int(number) < len(self._tokens):
            raise ValueError(f"{name}_token_id is {number}, and there are {len(self._tokens)} tokens")
        return int(number)

    def _name(self, name: str) -> str | None:
        """The text of a special token that the file or the kind of tokenizer names."""
        token = self._special(name)
        guessed = self._meta[_PREFIX + "model"] == "gpt2" and f"{_PREFIX}{name}_token_id" not in self._meta
        return None if token is None or guessed else self._tokens[token]

    def _flag(self, name: str, default: bool) -> bool:
        return bool(self._meta.get(_PREFIX + name, default))

    def _added(self, name: str, token: int | None, wanted: bool) -> list[int]:
        """The token that stands at an end of every text, if one does."""
        if wanted and token is None:
            raise ValueError(f"add_{name}_token is true, and there is no {name}_token_id")
        return [token] if wanted and token is not None else []

    def _stripped(self) -> tuple[frozenset[str], frozenset[str]]:
        """Added tokens that take the blanks before them, and those that take the blanks after them: the file does not
        say, so llama.cpp tells by names.
        """
        pre, name = (str(self._meta.get(key, "")).lower() for key in (_PREFIX + "pre", "general.name"))
        if any(text in pre for text in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
            return frozenset(("<mask>",)), frozenset()
        if "phi-3" in name or "phi3" in name:
            return frozenset(), frozenset(self._tokens) - {"<unk>", "<s>", "<|endoftext|>"}
        return frozenset(("[MASK]",)) if "modern-bert" in name else frozenset(), frozenset()

    def _bpe(self) -> Tokenizer:
        rule = self._rule
        assert rule is not None
        merges = [_pair(text) for text in self._meta[_PREFIX + "merges"]]
        tokenizer = Tokenizer(
            models.BPE(vocab=self._vocab, merges=merges, ignore_merges=rule.ignore_merges, byte_fallback=rule.raw)
        )
        if rule.escape_whitespaces:
            tokenizer.normalizer = normalizers.Replace(" ", _BLANK)
        tokenizer.pre_tokenizer = split_by(rule)
        tokenizer.decoder = _sentencepiece_decoder() if rule.raw else decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        """BPE of SentencePiece: every pair that forms a token merges, higher scores first."""
        scores = self._meta.get(_PREFIX + "scores", [0.0] * len(self._tokens))
        unknown = self._special("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self._vocab,
                merges=sentencepiece_merges(self._tokens, scores),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        steps = [normalizers.Replace(" ", _BLANK)]
        if self._flag("add_space_prefix", self._defaults.space_prefix):
            steps = [normalizers.Prepend(_BLANK), *steps]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = _sentencepiece_decoder()
        return tokenizer

    def _unigram(self) -> Tokenizer:
        """The likeliest tokens of a text together (T5)."""
        scores = self._meta.get(_PREFIX + "scores", [0.0] * len(self._tokens))
        listed = zip(self._tokens, scores, self._types, strict=True)
        vocab = [(text, 0.0 if kind == _USER_DEFINED else float(score)) for text, score, kind in listed]
        tokenizer = Tokenizer(models.Unigram(vocab, self._special("unknown"), byte_fallback=False))
        steps: list[normalizers.Normalizer] = []
        if charsmap := self._meta.get(_PREFIX + "precompiled_charsmap"):
            steps.append(normalizers.Precompiled(bytes(int(byte) & 0xFF for byte in charsmap)))
        if self._flag("remove_extra_whitespaces", default=False):
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
            steps += [normalizers.Prepend(" ")]
        elif self._flag("add_space_prefix", default=False):
            # A text of blanks alone gets no other.
            steps += [normalizers.Prepend(" "), normalizers.Replace(Regex(r"\A (?= *\z)"), "")]
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _BLANK)])
        tokenizer.decoder = _sentencepiece_decoder()
        return tokenizer


def _pair(text: str) -> tuple[str, str]:
    cut = text.index(" ", 1)
    return text[:cut], text[cut + 1 :]


def _sentencepiece_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])


def sentencepiece_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a BPE of SentencePiece: all pairs whose text is a token, those of high scores first."""
    vocab = {text: i for i, text in enumerate(tokens)}
    merges = [
        (-score, vocab[left], left, right)
        for piece, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]
