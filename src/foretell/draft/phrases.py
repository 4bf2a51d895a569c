"""Phrases found by meaning: the target's present state is the query, its states over documents and over the text are
the keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.tree import root_tree
from foretell.draft.acceptance import AcceptanceEstimator
from foretell.draft.base import Continuation, Retriever
from foretell.model.runner import Runner

_PRIOR = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Chance that a phrase's token is right, by how often one minus the cosine can be doubled before it exceeds 1."""


@dataclass(frozen=True)
class PhraseIndex:
    """Tokens of documents, -1 after each, and the unit vector of the state that had been reached after each token."""

    tokens: Int[np.ndarray, " t"]
    states: Float[torch.Tensor, "t d"]

    def find(self, query: Float[torch.Tensor, " d"], token: int, best: int) -> list[tuple[float, int]]:
        """Cosine and place of the `best` occurrences of `token`, ranked by the state before it."""
        before = np.flatnonzero(self.tokens[1:] == token)
        if not len(before):
            return []
        scores = self.states[torch.from_numpy(before).to(query.device)] @ query
        top = scores.topk(min(best, len(before)))
        return [(s, int(before[i]) + 1) for s, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]

    def copy(self, place: int, most: int) -> tuple[int, ...]:
        """Up to `most` tokens after a place, to the end of their document."""
        tokens = self.tokens[place + 1 : place + 1 + most]
        ends = np.flatnonzero(tokens < 0)
        return tuple(tokens[: ends[0] if len(ends) else most].tolist())


def encode_documents(
    runner: Runner, documents: Sequence[Sequence[int]], hidden_layer: int, chunk: int = 512
) -> PhraseIndex:
    """Read documents, each from its beginning and on its own, and keep the states at `hidden_layer` (see
    `Runner.forward`).

    A document longer than the model's context is read in parts. The runner's row 0 is used, and empty afterwards.
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
    """States as float32 vectors of length 1, with storage of their own."""
    return F.normalize(states.float(), dim=-1)


class _Row:
    """A text's own states, one per token that was read."""

    def __init__(self) -> None:
        self._buffer, self.length = torch.zeros(0, 0), 0
        self.estimator = AcceptanceEstimator(_PRIOR)
        self.offered: list[tuple[int, tuple[int, ...]]] = []

    @property
    def states(self) -> Float[torch.Tensor, "t d"]:
        """As a view."""
        return self._buffer[: self.length]

    def append(self, states: Float[torch.Tensor, "n d"]) -> None:
        """Add states of tokens just read."""
        end = self.length + len(states)
        if end > len(self._buffer):
            grown = states.new_zeros(max(2 * end, 256), states.shape[1])
            if self.length:
                grown[: self.length] = self.states
            self._buffer = grown
        self._buffer[self.length : end] = states
        self.length = end


class PhraseRetriever(Retriever):
    """What followed the last token where the target's state before it was most like the present one.

    The drafting part of "Copy is All You Need" (Lan et al., arXiv 2307.06962), with the target itself as phrase
    encoder, so that nothing is trained and no token boundary moves: literal n-grams need not repeat for a place to be
    found. `documents` come from `encode` at the same `hidden_layer`; with `own` the text so far is one more document,
    at no cost. `best` phrases of `copy` tokens are merged; a phrase's chance is learned from its cosine.
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
        self.hidden_layers = (hidden_layer,)
        self.documents, self.best, self.copy, self.search_own = documents, best, copy, search_own
        self._rows: dict[int, _Row] = {}

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The best phrases per text, most similar first."""
        out = []
        for row, text, max_depth in zip(context.rows, context.sequences, context.max_depth.tolist(), strict=True):
            mine = self._rows.get(row)
            if mine is None or mine.length != text.length - 1 or not len(text.generated):
                # Before the first new token, whether the states are there depends on how the prompt was cut.
                out.append(list[Continuation]())
                continue
            sources = [] if self.documents is None else [self.documents]
            if self.search_own:
                sources.append(PhraseIndex(text.tokens[:-1], mine.states))
            found = self._phrases(sources, mine.states[-1], int(text.tokens[-1]), min(self.copy, max_depth))
            mine.offered = found
            out.append([Continuation(t, mine.estimator.cumulative(kind, len(t))) for kind, t in found])
        return out

    def _phrases(
        self, sources: Sequence[PhraseIndex], query: Float[torch.Tensor, " d"], token: int, most: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Kind and tokens of the best different phrases of all sources."""
        hits = [(score, source, at) for source in sources for score, at in source.find(query, token, self.best)]
        found = dict[tuple[int, ...], int]()
        for score, source, at in sorted(hits, key=lambda h: -h[0])[: self.best]:
            found.setdefault(source.copy(at, most), _kind(score))
        return [(kind, tokens) for tokens, kind in found.items() if tokens]

    def observe(self, step: StepResult) -> None:
        """Remember the states of what was kept, and learn how good phrases of each similarity were."""
        for i, row in enumerate(step.context.rows):
            mine = self._rows.setdefault(row, _Row())
            mine.append(
                unit(step.output.hidden_states[0][torch.from_numpy(step.output.hidden_index[i, list(step.paths[i])])])
            )
            for kind, tokens in mine.offered:
                mine.estimator.update_run(kind, tokens, step.new_tokens[i])
            mine.offered = []

    def release(self, row: int) -> None:
        """Forget a row; the documents stay."""
        self._rows.pop(row, None)

    def rewind(self, row: int, length: int) -> int:
        """Keep the states of the common tokens."""
        before = self._rows.pop(row, None)
        if before is None or before.length < length:
            return 0
        self._rows[row] = _Row()
        self._rows[row].append(before.states[:length])
        return length


def _kind(cosine: float) -> int:
    """0 for cosines up to a half, one more each time what is missing to 1 is halved."""
    return min(int(-np.log2(max(1 - cosine, 2.0 ** -len(_PRIOR)))), len(_PRIOR) - 1) if cosine > 0 else 0
