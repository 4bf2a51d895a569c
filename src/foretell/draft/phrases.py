"""Phrase retrieval by hidden state: the target's current hidden state is the query, those of documents and of the
sequence itself are the keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.tree import root_tree
from foretell.draft.acceptance import Candidate, EstimatingRetriever
from foretell.model.run.runner import Runner

_PRIOR = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Prior acceptance rate, by similarity level (see `_similarity_level`)."""


@dataclass(frozen=True)
class PhraseIndex:
    """Tokens of documents, each followed by -1, and the normalised hidden state at every token."""

    tokens: Int[np.ndarray, " t"]
    states: Float[torch.Tensor, "t d"]

    def find(self, query: Float[torch.Tensor, " d"], token: int, best: int) -> list[tuple[float, int]]:
        """Cosine and position of the `best` occurrences of `token`, by the state before it."""
        before = np.flatnonzero(self.tokens[1:] == token)
        if not len(before):
            return []
        scores = self.states[torch.from_numpy(before).to(query.device)] @ query
        top = scores.topk(min(best, len(before)))
        return [(s, int(before[i]) + 1) for s, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]

    def copy(self, place: int, most: int) -> tuple[int, ...]:
        """Up to `most` tokens after a position, within its document."""
        tokens = self.tokens[place + 1 : place + 1 + most]
        ends = np.flatnonzero(tokens < 0)
        return tuple(tokens[: ends[0] if len(ends) else most].tolist())


def encode_documents(
    runner: Runner, documents: Sequence[Sequence[int]], hidden_layer: int, chunk: int = 512
) -> PhraseIndex:
    """Index documents by the hidden states at `hidden_layer` (see `Runner.forward`).

    A document longer than the model's context is read in parts. It uses row 0 of the runner and empties it.
    """
    tokens, states = [np.full(1, -1, np.int64)], list[torch.Tensor]()
    for part in (d[at : at + runner.context] for d in documents for at in range(0, len(d), runner.context)):
        runner.truncate(0, 0)
        for at in range(0, len(part), chunk):
            piece = list(part[at : at + chunk])
            tree = root_tree(piece[-1:]).with_prefix([piece])
            output = runner.forward([0], tree, scored=np.zeros_like(tree.valid), hidden_layers=(hidden_layer,))
            runner.commit(0, range(len(piece)))
            states.append(unit(output.hidden_states[0]))
        tokens += [np.asarray(part, np.int64), np.full(1, -1, np.int64)]
        states.append(torch.zeros_like(states[-1][:1]))
    runner.truncate(0, 0)
    if not states:
        return PhraseIndex(tokens[0], torch.zeros(1, 0))
    return PhraseIndex(np.concatenate(tokens), torch.cat([torch.zeros_like(states[-1]), *states]))


def unit(states: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
    """States as float32 vectors of length 1, in new storage."""
    return F.normalize(states.float(), dim=-1)


class _ReadStates:
    """The hidden states of one request, one per token that the target has read."""

    def __init__(self) -> None:
        self._buffer, self.length = torch.zeros(0, 0), 0

    @property
    def states(self) -> Float[torch.Tensor, "t d"]:
        """The hidden states, as a view."""
        return self._buffer[: self.length]

    def append(self, states: Float[torch.Tensor, "n d"]) -> None:
        """Add the states of new tokens."""
        end = self.length + len(states)
        if end > len(self._buffer):
            grown = states.new_zeros(max(2 * end, 256), states.shape[1])
            if self.length:
                grown[: self.length] = self.states
            self._buffer = grown
        self._buffer[self.length : end] = states
        self.length = end


class PhraseRetriever(EstimatingRetriever):
    """Continuations of earlier occurrences of the last token whose hidden states are most similar to the current one.

    The drafting part of "Copy is All You Need" (Lan et al., arXiv 2307.06962), with the target itself as untrained
    phrase encoder; no n-gram of several tokens must repeat. `documents` come from `encode_documents` at the same
    `hidden_layer`; with `search_own` the sequence itself is one more document. The `best` phrases of `copy` tokens are
    proposed; acceptance rates are estimated per similarity level.
    """

    label = "phrases by hidden state, in text and references"

    def __init__(
        self,
        hidden_layer: int,
        documents: PhraseIndex | None = None,
        best: int = 4,
        copy: int = 10,
        search_own: bool = True,
    ) -> None:
        if min(best, copy) < 1:
            raise ValueError(f"at least one phrase of one token must be copied, found {best} of {copy}")
        if documents is None and not search_own:
            raise ValueError("phrase retrieval without documents and without the text itself has nothing to search")
        super().__init__(_PRIOR)
        self.hidden_layers = (hidden_layer,)
        self.documents, self.best, self.copy, self.search_own = documents, best, copy, search_own
        self._rows: dict[int, _ReadStates] = {}

    def _candidates(self, context: Context, i: int, budget: int) -> list[Candidate]:
        """The best phrases for a request, most similar first."""
        sequence, known = context.sequences[i], self._rows.get(context.rows[i])
        if known is None or known.length != sequence.length - 1 or not len(sequence.generated):
            # Before the first new token the states depend on how the prompt was cut into chunks.
            return []
        sources = [] if self.documents is None else [self.documents]
        if self.search_own:
            sources.append(PhraseIndex(sequence.tokens[:-1], known.states))
        most = min(self.copy, int(context.max_depth[i]))
        return self._phrases(sources, known.states[-1], int(sequence.tokens[-1]), most)

    def _phrases(
        self, sources: Sequence[PhraseIndex], query: Float[torch.Tensor, " d"], token: int, most: int
    ) -> list[Candidate]:
        """Similarity level and tokens of the best different phrases of all sources."""
        hits = [(score, source, at) for source in sources for score, at in source.find(query, token, self.best)]
        level_of = dict[tuple[int, ...], int]()
        for score, source, at in sorted(hits, key=lambda h: -h[0])[: self.best]:
            level_of.setdefault(source.copy(at, most), _similarity_level(score))
        return [(kind, tokens) for tokens, kind in level_of.items() if tokens]

    def observe(self, step: StepResult) -> None:
        """Add the states of the accepted tokens, and update the acceptance rates."""
        super().observe(step)
        for i, row in enumerate(step.context.rows):
            at = torch.from_numpy(step.output.hidden_index[i, list(step.paths[i])])
            self._rows.setdefault(row, _ReadStates()).append(unit(step.output.hidden_states[0][at]))

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        super().release(row)
        self._rows.pop(row, None)

    def rewind(self, row: int, length: int) -> int:
        """Keep the states of the shared tokens."""
        known = self._rows.get(row)
        self.release(row)
        return self._copy_states(known, row, length)

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy the states of the shared tokens."""
        self.release(target)
        return self._copy_states(self._rows.get(source), target, length)

    def _copy_states(self, source: _ReadStates | None, target: int, length: int) -> int:
        if source is None or source.length < length:
            return 0
        self._rows[target] = _ReadStates()
        self._rows[target].append(source.states[:length])
        return length


def _similarity_level(cosine: float) -> int:
    """0 for cosines up to 1/2, 1 up to 3/4, 2 up to 7/8, …"""
    return min(int(-np.log2(max(1 - cosine, 2.0 ** -len(_PRIOR)))), len(_PRIOR) - 1) if cosine > 0 else 0
