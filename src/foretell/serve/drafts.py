"""The drafts of an answer with their origins, as the API reports them (`return_drafts`)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foretell.engine.provenance import TARGET, DraftedToken, PassDrafts
from foretell.serve.choices import Piece
from foretell.serve.token_text import TokenTexts

MILLISECONDS = 1000.0
PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""Stands in the text of a token that holds part of a character; its bytes are reported then."""


@dataclass
class DraftWriter:
    """Writes the passes of pieces, and counts the origins of all tokens."""

    texts: TokenTexts
    origins: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def passes(self, piece: Piece) -> list[dict[str, Any]]:
        """The passes of a piece."""
        for one in piece.passes:
            self.origins.update(one.origins)
            self.refused.update(d.origin for d in one.drafted if not d.accepted)
        return [self._pass(piece.index, one) for one in piece.passes]

    @property
    def summary(self) -> dict[str, Mapping[str, int]]:
        """Number of tokens, and of refused drafts, by origin."""
        return {"origins": {TARGET: 0} | self.origins, "refused": dict(self.refused)}

    def _pass(self, index: int, one: PassDrafts) -> dict[str, Any]:
        tokens: Iterable[tuple[int, str]] = zip(one.tokens, one.origins, strict=True)
        return {
            "index": index,
            "tokens": [self._token(token) | {"origin": origin} for token, origin in tokens],
            "drafted": [self._draft(draft) for draft in one.drafted],
            "draft_ms": MILLISECONDS * one.time.draft,
            "verify_ms": MILLISECONDS * one.time.verify,
            "step_ms": MILLISECONDS * one.time.total,
        }

    def _draft(self, draft: DraftedToken) -> dict[str, Any]:
        score = {} if draft.score is None else {"score": round(draft.score, 6)}
        shown = {"parent": draft.parent, "origin": draft.origin, "accepted": draft.accepted}
        return self._token(draft.token) | shown | score

    def _token(self, token: int) -> dict[str, Any]:
        text, data = self.texts.of(token)
        return {"id": token, "token": text} | ({"bytes": list(data)} if PARTIAL in text else {})
