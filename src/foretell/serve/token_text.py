"""Text and bytes of single tokens, for log-probabilities."""

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

    def of(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of a token; the text of part of a character is U+FFFD."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._decode(token)
        return found

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
