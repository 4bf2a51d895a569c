"""Builds tokenizers from the metadata of GGUF files, and from what else can be told in their words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from foretell.tokenizer.pre_tokenizers import PreTokenizer, split_by

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Token types of GGUF files."""
PREFIX = "tokenizer.ggml."
_BLANK = "▁"


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


class Vocabulary:
    """The tokens of a GGUF file; `rule`: how a BPE cuts texts."""

    def __init__(self, meta: Mapping[str, Any], rule: PreTokenizer | None) -> None:
        self._meta, self._rule = meta, rule
        self._defaults = _DEFAULTS[meta[PREFIX + "model"]]
        tokens = meta[PREFIX + "tokens"]
        self.tokens: list[str] = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self._types: list[int] = list(meta.get(PREFIX + "token_type", [_NORMAL] * len(tokens)))
        self._vocab = {token: i for i, token in enumerate(self.tokens)}

    def tokenizer(self, normalizes: bool) -> Tokenizer:
        """The tokenizer without what it adds to texts. `normalizes`: as SentencePiece: a BPE changes texts as the file
        says, which llama.cpp leaves out, and a unigram writes unknown characters as bytes if it has these.
        """
        kind = self._meta[PREFIX + "model"]
        if kind == "llama":
            tokenizer = self._sentencepiece(normalizes)
        else:
            tokenizer = self._unigram(normalizes) if kind == "t5" else self._bpe()
        before, after = self._stripped()
        for special, kinds in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
            texts = [text for text, kind in zip(self.tokens, self._types, strict=True) if kind in kinds]
            flags = ({"lstrip": text in before, "rstrip": text in after} for text in texts)
            added = [AddedToken(t, normalized=False, special=special, **f) for t, f in zip(texts, flags, strict=True)]
            if special or not normalizes:
                (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
            elif texts:
                # SentencePiece looks for these in the changed text, and cuts it there.
                pieces = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
                tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
        return tokenizer

    def add_ends(self, tokenizer: Tokenizer) -> None:
        """Put BOS and EOS around texts where the file or the defaults say so.

        Raises:
            ValueError: there is no such token.
        """
        bos, eos = self.special("bos"), self.special("eos")
        add_bos = self._flag("add_bos_token", self._defaults.add_bos or (self._rule is not None and self._rule.add_bos))
        first = self._added("bos", bos, add_bos)
        last = self._added("eos", eos, self._flag("add_eos_token", self._defaults.add_eos))
        if first or last:
            names = [self.tokens[i] for i in (*first, *last)]
            sequence = [*(self.tokens[i] + ":0" for i in first), "$A:0", *(self.tokens[i] + ":0" for i in last)]
            tokenizer.post_processor = processors.TemplateProcessing(
                sequence, [*sequence, "$B:0"], list({name: (name, self._vocab[name]) for name in names}.values())
            )

    def special(self, name: str) -> int | None:
        """The id of a special token.

        Raises:
            ValueError: it is beyond the vocabulary.
        """
        number = self._meta.get(f"{PREFIX}{name}_token_id")
        if number is None:
            default: int | None = getattr(self._defaults, name, None)
            return default if default is not None and default < len(self.tokens) else None
        if not 0 <= int(number) < len(self.tokens):
            raise ValueError(f"{name}_token_id is {number}, and there are {len(self.tokens)} tokens")
        return int(number)

    def name(self, name: str) -> str | None:
        """The text of a special token that the file or the kind of tokenizer names."""
        token = self.special(name)
        guessed = self._meta[PREFIX + "model"] == "gpt2" and f"{PREFIX}{name}_token_id" not in self._meta
        return None if token is None or guessed else self.tokens[token]

    def _flag(self, name: str, default: bool) -> bool:
        return bool(self._meta.get(PREFIX + name, default))

    def _added(self, name: str, token: int | None, wanted: bool) -> list[int]:
        """The token that stands at an end of every text, if one does."""
        if wanted and token is None:
            raise ValueError(f"add_{name}_token is true, and there is no {name}_token_id")
        return [token] if wanted and token is not None else []

    def _stripped(self) -> tuple[frozenset[str], frozenset[str]]:
        """Added tokens that take the blanks before them, and those that take the blanks after them: the file does not
        say, so llama.cpp tells by names.
        """
        pre, name = (str(self._meta.get(key, "")).lower() for key in (PREFIX + "pre", "general.name"))
        if any(text in pre for text in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
            return frozenset(("<mask>",)), frozenset()
        if "phi-3" in name or "phi3" in name:
            return frozenset(), frozenset(self.tokens) - {"<unk>", "<s>", "<|endoftext|>"}
        return frozenset(("[MASK]",)) if "modern-bert" in name else frozenset(), frozenset()

    def _bpe(self) -> Tokenizer:
        rule = self._rule
        assert rule is not None
        merges = [_pair(text) for text in self._meta[PREFIX + "merges"]]
        tokenizer = Tokenizer(
            models.BPE(vocab=self._vocab, merges=merges, ignore_merges=rule.ignore_merges, byte_fallback=rule.raw)
        )
        if rule.escape_whitespaces:
            tokenizer.normalizer = normalizers.Replace(" ", _BLANK)
        tokenizer.pre_tokenizer = split_by(rule)
        tokenizer.decoder = _sentencepiece_decoder() if rule.raw else decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self, normalizes: bool) -> Tokenizer:
        """BPE of SentencePiece: every pair that forms a token merges, higher scores first."""
        unknown = self.special("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self._vocab,
                merges=sentencepiece_merges(self.tokens, self._scores),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
                ignore_merges=normalizes and _USER_DEFINED in self._types,
            )
        )
        prefix = self._flag("add_space_prefix", self._defaults.space_prefix)
        tokenizer.normalizer = (
            self._normalizer(prefix, normalizes)
            if normalizes
            else _blanks([normalizers.Prepend(" ")] if prefix else [])
        )
        tokenizer.decoder = _sentencepiece_decoder()
        return tokenizer

    def _unigram(self, as_sentencepiece: bool) -> Tokenizer:
        """The likeliest tokens of a text together (T5)."""
        listed = zip(self.tokens, self._scores, self._types, strict=True)
        vocab = [(text, 0.0 if kind == _USER_DEFINED else float(score)) for text, score, kind in listed]
        with_bytes = as_sentencepiece and _BYTE in self._types
        tokenizer = Tokenizer(models.Unigram(vocab, self.special("unknown"), byte_fallback=with_bytes))
        prefix = self._flag("add_space_prefix", self._defaults.space_prefix)
        # llama.cpp begins a text with a blank wherever it removes blanks.
        merges = self._flag("remove_extra_whitespaces", default=False)
        tokenizer.normalizer = self._normalizer(prefix or (merges and not as_sentencepiece), as_sentencepiece)
        tokenizer.decoder = _sentencepiece_decoder()
        return tokenizer

    @property
    def _scores(self) -> Sequence[float]:
        return self._meta.get(PREFIX + "scores") or [0.0] * len(self.tokens)

    def _normalizer(self, prefix: bool, as_sentencepiece: bool) -> normalizers.Normalizer:
        """How SentencePiece changes a text before it looks for tokens; `prefix`: it begins with a blank."""
        steps: list[normalizers.Normalizer] = []
        if charsmap := self._meta.get(PREFIX + "precompiled_charsmap"):
            steps.append(normalizers.Precompiled(bytes(int(byte) & 0xFF for byte in charsmap)))
        if self._flag("remove_extra_whitespaces", default=False):
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
        if prefix:
            # In llama.cpp a text of blanks alone gets no other.
            alone = [] if as_sentencepiece else [normalizers.Replace(Regex(r"\A (?= *\z)"), "")]
            steps += [normalizers.Prepend(" "), *alone]
        return _blanks(steps)


def _blanks(steps: Sequence[normalizers.Normalizer]) -> normalizers.Normalizer:
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _BLANK)])


def _pair(text: str) -> tuple[str, str]:
    cut = text.index(" ", 1)
    return text[:cut], text[cut + 1 :]


def _sentencepiece_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])


def sentencepiece_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a BPE of SentencePiece: all pairs whose text is a token, those of high scores first.

    Of the pairs of one token the one with the longest left part comes first, as in transformers: SentencePiece merges
    such pairs from left to right.
    """
    vocab = frozenset(tokens)
    merges = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges.sort(key=lambda merge: (*merge[:2], -len(merge[3])))
    return [(left, right) for _, _, left, right in merges]
