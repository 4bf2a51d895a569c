"""Prompt lookup: propose the continuation of an earlier occurrence of the last tokens."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from foretell.core.context import Context
from foretell.draft.acceptance import Candidate, EstimatingRetriever

Scope = Literal["references", "prompt", "text"]
Choice = Literal["latest", "first"]
_PRIOR = (0.25, 0.4, 0.6, 0.75, 0.85, 0.9)
"""Prior acceptance rates, by the length of the match."""


class PromptLookup(EstimatingRetriever):
    """Prompt lookup (Saxena 2023) and LLMA (Yang et al., arXiv 2304.04487): the longest n-gram match of `longest ..
    shortest` tokens.

    `scope`: search only the `references`, also the prompt, or also the answer so far. `copy`: maximum tokens of a
    continuation, which ends with its document. `choice` among matches of equal length: the latest, or the first as in
    the published prompt lookup. References are searched after the sequence itself at each match length.
    """

    label = "n-gram match in text and references"
    single = True

    def __init__(
        self,
        longest: int = 3,
        shortest: int = 1,
        copy: int = 10,
        references: Sequence[Sequence[int]] = (),
        scope: Scope = "text",
        choice: Choice = "latest",
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams need 1 <= shortest <= longest, found {shortest} and {longest}")
        if copy < 1:
            raise ValueError(f"at least one token must be copied, found {copy}")
        if scope == "references" and not references:
            raise ValueError("looking up references only needs at least one reference document")
        super().__init__(_PRIOR)
        self.longest, self.shortest, self.copy = longest, shortest, copy
        self.scope, self.choice = scope, choice
        self.references = [np.asarray(r, np.int64) for r in references if len(r)]

    def _candidates(self, context: Context, i: int, budget: int) -> list[Candidate]:
        """The continuation of a request, if its last tokens occurred before."""
        sequence, most = context.sequences[i], min(self.copy, budget, int(context.max_depth[i]))
        searched = {"references": 0, "prompt": sequence.prompt_length, "text": sequence.length}[self.scope]
        size, tokens = self.find(sequence.tokens, searched, most)
        return [(size - 1, tokens)] if tokens else []

    def find(self, sequence: Int[np.ndarray, " t"], searched: int, max_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Length of the longest match of the last tokens of `sequence` in its first `searched` tokens or a reference,
        and the tokens after the match.
        """
        if max_tokens < 1:
            return 0, ()
        levels = [match_ends(sequence[:searched], sequence, self.longest)] if searched else []
        levels += [match_ends(r, sequence, self.longest) for r in self.references]
        documents = ([sequence[:searched]] if searched else []) + self.references
        for size in range(min(self.longest, len(sequence)), self.shortest - 1, -1):
            for document, ends in zip(documents, levels, strict=True):
                if len(ends) >= size and len(ends[size - 1]):
                    end = int(ends[size - 1][-1 if self.choice == "latest" else 0])
                    return size, tuple(document[end + 1 : end + 1 + max_tokens].tolist())
        return 0, ()


def match_ends(
    document: Int[np.ndarray, " s"], sequence: Int[np.ndarray, " t"], longest: int
) -> list[Int[np.ndarray, " m"]]:
    """For n = 1, 2, …: ends of the occurrences in `document` of the last n tokens of `sequence`, except at its end."""
    ends = np.flatnonzero(document[:-1] == sequence[-1])
    out = []
    for n in range(1, longest + 1):
        if n > 1:
            ends = ends[ends >= n - 1]
            ends = ends[document[ends - n + 1] == sequence[-n]] if n <= len(sequence) else ends[:0]
        if not len(ends):
            break
        out.append(ends)
    return out
