"""Documents whose phrases can be copied, and the states of a frozen model that their vectors are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.core.tree import root_tree
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.retrieval.corpus import find_files, read_documents, tokenize_documents

LENGTHS = range(2, 9)
"""Tokens of a phrase, as in the paper's generation."""
PIECE = 128
"""Tokens of a document."""


def hashes(tokens: Int[torch.Tensor, "*n t"], length: int) -> Int[torch.Tensor, "*n s"]:
    """A 64-bit number of every run of so many tokens, the same for equal runs."""
    out = torch.zeros(())
    for run in tokens.long().unfold(-1, length, 1).unbind(-1):
        out = out.long() * 6364136223846793005 + run + 1
        out = out ^ (out >> 29)
    return out


class States:
    """Reads tokens with a frozen model, an end of text before them."""

    def __init__(self, model: Model) -> None:
        self._runner, layers = DecoderRunner(model.network), model.config.layers
        self._layers, self._first = (layers + 1, layers // 2), model.config.eos[0]
        self.state = torch.zeros(1, model.config.hidden)
        """After the last token, after the final norm."""

    def restart(self) -> Float[torch.Tensor, "1 v"]:
        """Forget what was read; log-probabilities of a first token."""
        self._runner.truncate(0, 0)
        return self.read([self._first], scored=True)[2]

    def read(self, tokens: Sequence[int], scored: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States before tokens, those of the middle layer at them, and where `scored` log-probabilities after them."""
        tree = root_tree([tokens[-1]]).with_prefix([list(tokens)])
        marked = np.full_like(tree.valid, scored)
        out = self._runner.forward([0], tree, scored=marked, hidden_layers=self._layers)
        self._runner.commit(0, range(len(tokens)))
        after, middle = (h[torch.from_numpy(out.hidden_index[0])].float() for h in out.hidden_states)
        before, self.state = torch.cat([self.state, after[:-1]]), after[-1:]
        logits = out.logits[torch.from_numpy(out.logit_index[0])] if scored else out.logits
        return before, middle, logits.float().log_softmax(-1)


@dataclass(frozen=True)
class Corpus:
    """Documents of `PIECE` tokens, padded with -1, and the states before and at their tokens; `own`: the model's
    log-probabilities of the tokens.
    """

    tokens: Int[torch.Tensor, "n t"]
    before: Float[torch.Tensor, "n t d"]
    middle: Float[torch.Tensor, "n t d"]
    own: Float[torch.Tensor, "n t"]

    def __getitem__(self, rows: list[int]) -> "Corpus":
        """Some of the documents."""
        return Corpus(self.tokens[rows], self.before[rows], self.middle[rows], self.own[rows])


def encode(pieces: Sequence[Sequence[int]], states: States) -> Corpus:
    """Documents, each read by the model alone."""
    tokens, own = torch.full((len(pieces), PIECE), -1), torch.zeros(len(pieces), PIECE)
    before, middle = torch.zeros(2, len(pieces), PIECE, states.state.shape[-1], dtype=torch.float16)
    for i, piece in enumerate(pieces):
        first, size = states.restart(), len(piece)
        tokens[i, :size] = torch.tensor(piece)
        before[i, :size], middle[i, :size], after = states.read(piece, scored=True)
        own[i, :size] = torch.cat([first, after[:-1]])[range(size), piece]
    return Corpus(tokens, before, middle, own)


def read_pieces(paths: Sequence[Path], model: Model, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """Texts cut into pieces, `most` tokens in all and as many of every text: those to learn and to copy from, and every
    tenth, which is held out.

    Raises:
        ValueError: there are fewer than 20 pieces.
    """
    documents = (text for file in find_files(paths) for text in read_documents(file))
    texts = [d.tolist() for d in tokenize_documents(documents, model.codec)]
    each = max(PIECE, most // max(1, len(texts)) // PIECE * PIECE)
    cut = [t[i : min(i + PIECE, each)] for t in texts for i in range(0, min(len(t), each), PIECE)]
    pieces = [p for p in cut if len(p) > PIECE // 2][: max(1, most // PIECE)]
    if len(pieces) < 20:
        raise ValueError(f"the texts have {len(pieces)} pieces of {PIECE} tokens, and 20 at least are needed")
    return [p for i, p in enumerate(pieces) if i % 10 != 9], pieces[9::10]


class Related:
    """Finds documents by the cosine of their tokens, weighted by rarity (tf-idf)."""

    def __init__(self, pieces: Sequence[Sequence[int]], vocab: int) -> None:
        counts = torch.stack([torch.bincount(torch.tensor(p), minlength=vocab) for p in pieces]).float()
        self._weight = (len(pieces) / (counts > 0).sum(0).clamp(min=1)).log()
        self._rows = F.normalize(counts.sqrt() * self._weight, dim=-1)

    def nearest(self, tokens: Sequence[int], most: int) -> list[int]:
        """The documents that are most like these tokens, the most like first."""
        query = torch.bincount(torch.tensor(tokens), minlength=len(self._weight)).float().sqrt() * self._weight
        return [int(row) for row in (self._rows @ query).topk(min(most, len(self._rows))).indices]
