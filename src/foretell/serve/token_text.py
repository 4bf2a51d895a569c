"""Text and bytes of single tokens, for log-probabilities."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property

from foretell.tokenizer.codec import TextCodec

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
"""Bytes that byte-level tokenizers write as themselves; the others follow from code point 256 on (GPT-2)."""
_BYTE_OF = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}


class TokenTexts:
    """Text and bytes of the tokens of a codec."""

    def __init__(self, codec: TextCodec) -> None:
        self._tokenizer = codec.tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    @cached_property
    def _byte_level(self) -> bool:
        decoder = self._tokenizer.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @cached_property
    def _special(self) -> dict[int, str]:
        return {i: token.content for i, token in self._tokenizer.get_added_tokens_decoder().items()}

    def offsets(self, skip_special_tokens: bool) -> "TextOffsets":
        """Counts characters of one choice."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return TextOffsets(self, {i for i, token in added if token.special} if skip_special_tokens else frozenset())

    def of(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of a token; the text of part of a character is U+FFFD."""
        text_and_bytes = self._known.get(token)
        if text_and_bytes is None:
            text_and_bytes = self._known[token] = self._decode(token)
        return text_and_bytes

    def _decode(self, token: int) -> tuple[str, bytes]:
        name = self._special.get(token)
        if name is not None:
            return name, name.encode()
        name = self._tokenizer.id_to_token(token) or ""
        if self._byte_level and all(c in _BYTE_OF for c in name):
            data = bytes(_BYTE_OF[c] for c in name)
            return data.decode("utf-8", "replace"), data
        if len(name) == len("<0x00>") and name.startswith("<0x"):
            data = bytes.fromhex(name[3:5])
            return data.decode("utf-8", "replace"), data
        text = name.replace("▁", " ")
        return text, text.encode()


class TextOffsets:
    """At which character of the visible text of a choice each token begins; all bytes of a character begin with it.

    `hidden`: tokens without visible text.
    """

    def __init__(self, texts: TokenTexts, hidden: AbstractSet[int]) -> None:
        self._texts, self._hidden, self._length = texts, hidden, 0
        self._decoder = _utf8()

    def of_prompt(self, tokens: Sequence[int], length: int) -> list[int]:
        """The places of the tokens of a prompt whose text of `length` characters goes before the answer."""
        places = self.of(tokens)
        # Tokenizers that write a blank before a text leave it out of the text.
        extra = self._length - length
        self._length, self._decoder = length, _utf8()
        return [min(max(place - extra, 0), length) for place in places]

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The places of further tokens."""
        places = []
        for token in tokens:
            data = b"" if token in self._hidden else self._texts.of(token)[1]
            places.append(self._length + self._ends_character(data[:1]))
            self._length += len(self._decoder.decode(data))
        return places

    def _ends_character(self, byte: bytes) -> int:
        """1 if the bytes that wait for the rest of a character are a character of their own, since this one is no
        continuation of them.
        """
        pending = self._decoder.getstate()[0]
        return int(bool(pending and byte) and _utf8().decode(pending + byte).startswith("\ufffd"))


def _utf8() -> IncrementalDecoder:
    return getincrementaldecoder("utf-8")("replace")
