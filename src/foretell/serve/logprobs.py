"""Log-probabilities in the shapes of OpenAI's two APIs."""

from collections.abc import Sequence
from typing import Any

from foretell.serve.choices import Piece
from foretell.serve.token_text import TokenTexts

LEAST_LOGPROB = -9999.0
"""OpenAI's value for a token of probability 0."""


class LogprobWriter:
    """Writes log-probabilities with the texts of tokens, or with `token_id:N` in their place."""

    def __init__(self, texts: TokenTexts, token_ids: bool) -> None:
        self._texts, self._token_ids = texts, token_ids

    def chat(self, piece: Piece) -> dict[str, Any] | None:
        """`choices[].logprobs` of a chat completion."""
        if not piece.logprobs:
            return None
        tops = piece.top_logprobs or ((),) * len(piece.tokens)
        return {
            "content": [
                self._entry(token, logprob) | {"top_logprobs": [self._entry(t, p) for t, p in top]}
                for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True)
            ]
        }

    def completion(self, piece: Piece, offset: int) -> dict[str, Any] | None:
        """`choices[].logprobs` of a completion whose piece begins at character `offset` of the choice."""
        if not piece.logprobs:
            return None
        names = [self._name(token) for token in piece.tokens]
        tops = piece.top_logprobs or ((),) * len(piece.tokens)
        return {
            "tokens": names,
            "token_logprobs": [max(p, LEAST_LOGPROB) for p in piece.logprobs],
            "top_logprobs": [
                {self._name(t): max(p, LEAST_LOGPROB) for t, p in ((token, logprob), *top)}
                for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True)
            ],
            "text_offset": self._offsets(piece.tokens, offset),
        }

    def _offsets(self, tokens: Sequence[int], offset: int) -> list[int]:
        found = list[int]()
        for token in tokens:
            found.append(offset)
            offset += len(self._texts.of(token)[0])
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._texts.of(token)[1]),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._token_ids else self._texts.of(token)[0]
