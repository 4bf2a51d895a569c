"""The prefix and the phrase encoder, and the distribution over phrases and tokens that they give."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import nn

from foretell.lab.phrases.index import LENGTHS, Corpus, hashes
from foretell.speculator.checkpoint import WEIGHTS, write_weights

HALF, WIDTH, HEADS = 128, 256, 4
"""Numbers of half a phrase vector, and size of the layer that sees a document in both directions."""
_FIRST_BIAS = -8.0
"""Of the scores of phrases, so that an untrained encoder copies little."""


class PhraseEncoders(nn.Module):
    """Queries of states before phrases, and start and end vectors of tokens of documents: half a phrase vector each.

    The paper tunes GPT-2 and BERT; here both read states of one frozen model, the phrases through a layer that sees
    their document in both directions.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.middle = (nn.BatchNorm1d(hidden, affine=False) for _ in range(2))
        self.query, self.bias, self.start = nn.Linear(hidden, 2 * HALF), nn.Linear(hidden, 1), nn.Linear(hidden, HALF)
        self.read, self.parts = nn.Linear(2 * hidden, WIDTH), nn.Linear(WIDTH, 2 * HALF)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=True)
        with torch.no_grad():  # At first a phrase is likely where the state before it is like the query.
            self.start.weight.copy_(self.query.weight[:HALF])
            self.start.bias.copy_(self.query.bias[:HALF])
            self.bias.bias.fill_(_FIRST_BIAS)

    def encode_prefixes(self, states: Float[torch.Tensor, "q d"]) -> Float[torch.Tensor, "q h"]:
        """Queries, and last what is added to the scores of all phrases."""
        x = self.before(states.float())
        return torch.cat([self.query(x) / HALF**0.5, self.bias(x)], -1)

    def encode_phrases(self, documents: Corpus) -> "PhraseTable":
        """All phrases of documents, in one pass over them."""
        unread = documents.tokens < 0
        states = (
            norm(s.float().flatten(0, 1))
            for norm, s in ((self.before, documents.before), (self.middle, documents.middle))
        )
        before, middle = (s.view(*unread.shape, -1) for s in states)
        x = self.layer(self.read(torch.cat([before, middle], -1)), src_key_padding_mask=unread)
        start, end = self.parts(x).chunk(2, -1)
        return PhraseTable(documents.tokens, (start + self.start(before)).float(), end.float())

    def save(self, folder: Path) -> None:
        """Write the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(folder, {name: t.detach().contiguous().clone() for name, t in self.state_dict().items()})

    @staticmethod
    def open(folder: Path, hidden: int) -> "PhraseEncoders":
        """The encoders of a folder.

        Raises:
            ValueError: it has none for a model of this width.
        """
        out = PhraseEncoders(hidden)
        try:
            out.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, RuntimeError) as error:
            reason = f"{folder}: no phrase encoders for states of {hidden} numbers; foretell phrases train makes them"
            raise ValueError(reason) from error
        return out.eval().requires_grad_(False)


@dataclass(frozen=True)
class PhraseTable:
    """The phrases of documents. The score of a phrase is that of its start and that of its end."""

    tokens: Int[torch.Tensor, "n t"]
    start: Float[torch.Tensor, "n t h"]
    end: Float[torch.Tensor, "n t h"]

    def scores(self, query: Float[torch.Tensor, "q h"]) -> list[Float[torch.Tensor, "q s"]]:
        """Scores of all phrases, by length; -inf for what reaches beyond a document.

        They are beside the log-probabilities of the model's tokens, whose probabilities sum to 1: a phrase has the
        probability `exp(score) / (1 + sum of exp(scores))`, a token its own divided by the same.
        """
        first, last, bias = query.split((HALF, HALF, 1), -1)
        starts = (first @ self.start.flatten(0, 1).T + bias).unflatten(-1, self.tokens.shape)
        ends = (last @ self.end.flatten(0, 1).T).unflatten(-1, self.tokens.shape)
        ends = ends.masked_fill(self.tokens < 0, float("-inf"))
        return [(starts[..., : 1 - n] + ends[..., n - 1 :]).flatten(1) for n in LENGTHS]

    def copies(self, phrase: Int[torch.Tensor, " p"], length: int) -> Int[torch.Tensor, "p s"]:
        """Where phrases of a length, given by their hashes, stand among those of `scores`."""
        return phrase[:, None] == hashes(self.tokens, length).flatten()


def log_total(scores: Sequence[Float[torch.Tensor, "q s"]]) -> Float[torch.Tensor, " q"]:
    """Logarithm of what the phrases and the model's tokens sum to."""
    return F.softplus(torch.stack([s.logsumexp(-1) for s in scores]).logsumexp(0))


def longest_phrases(text: Int[torch.Tensor, " t"], documents: Int[torch.Tensor, "n s"]) -> list[tuple[int, int]]:
    """A text cut from left to right into the longest phrases of documents and single tokens: begins and lengths."""
    known = {n: torch.isin(hashes(text, n), hashes(documents, n)) for n in LENGTHS if n <= len(text)}
    out, at = list[tuple[int, int]](), 0
    while at < len(text):
        fits = [n for n, stands in known.items() if at + n <= len(text) and stands[at]]
        out.append((at, max(fits, default=1)))
        at += out[-1][1]
    return out
