"""Log-probabilities in the shapes of OpenAI's two APIs."""

from collections.abc import Sequence
from typing import Any

from foretell.engine.logprobs import TopLogprobs
from foretell.serve.choices import Piece
from foretell.serve.token_text import TextOffsets, TokenTexts

LEAST_LOGPROB = -9999.0
"""OpenAI's value for a token of probability 0."""


class LogprobWriter:
    """Writes log-probabilities with the texts of tokens, or with `token_id:N` in their place."""

    def __init__(self, texts: TokenTexts, token_ids: bool) -> None:
        self._texts, self._token_ids = texts, token_ids

    def offsets(self, skip_special_tokens: bool) -> TextOffsets:
        """Counts characters of one choice."""
        return self._texts.offsets(skip_special_tokens)

    def chat(self, piece: Piece) -> dict[str, Any] | None:
        """`choices[].logprobs` of a chat completion."""
        return {"content": self.entries(piece)} if piece.logprobs else None

    def entries(self, piece: Piece) -> list[dict[str, Any]]:
        """The tokens of a piece with their log-probabilities; none where none were asked for."""
        if not piece.logprobs:
            return []
        tops = _fill(piece.top_logprobs, len(piece.tokens))
        return [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(t, p) for t, p in top]}
            for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True)
        ]

    def completion(self, piece: Piece, offsets: Sequence[int], prompt: Sequence[int] = ()) -> dict[str, Any] | None:
        """`choices[].logprobs` of a completion, whose tokens begin at the characters `offsets` of the choice.

        `prompt`: tokens of a prompt that is echoed before the piece.
        """
        if not piece.logprobs:
            return None
        tokens = [*prompt, *piece.tokens]
        echoed = (None, *piece.prompt_logprobs) if prompt else ()
        chosen = [*echoed, *piece.logprobs]
        tops = [*_fill(piece.prompt_top_logprobs, len(echoed) - 1), *_fill(piece.top_logprobs, len(piece.tokens))]
        tops = [(), *tops] if prompt else tops
        return {
            "tokens": [self._key(token) for token in tokens],
            "token_logprobs": [None if p is None else max(p, LEAST_LOGPROB) for p in chosen],
            "top_logprobs": [
                None if p is None else {self._key(t): max(q, LEAST_LOGPROB) for t, q in ((token, p), *top)}
                for token, p, top in zip(tokens, chosen, tops, strict=True)
            ],
            "text_offset": list(offsets),
        }

    def prompt(self, piece: Piece, tokens: Sequence[int]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: of every token of the prompt but the first, with the likeliest ones, by token."""
        tops = _fill(piece.prompt_top_logprobs, len(piece.prompt_logprobs))
        entries: list[dict[str, Any] | None] = [None]
        for token, logprob, top in zip(tokens[1:], piece.prompt_logprobs, tops, strict=True):
            ranks = {t: rank for rank, (t, _) in enumerate(top, 1)}
            entries.append(
                {
                    str(t): {
                        "logprob": max(p, LEAST_LOGPROB),
                        "rank": ranks.get(t),
                        "decoded_token": self._texts.of(t)[0],
                    }
                    for t, p in ((token, logprob), *top)
                }
            )
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._texts.of(token)[1]),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._token_ids else self._texts.of(token)[0]

    def _key(self, token: int) -> str:
        """The name of a token in a completion; part of a character is named by its bytes, as tokens are keys there."""
        text, data = self._texts.of(token)
        if self._token_ids or text.encode() == data:
            return self._name(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _fill(tops: Sequence[TopLogprobs], count: int) -> Sequence[TopLogprobs]:
    """The likeliest tokens of `count` positions; none for each if none were asked for."""
    return tops or ((),) * count
