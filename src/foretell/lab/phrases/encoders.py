"""The prefix and the phrase encoder, their training, and what is written from phrases and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import nn

from foretell.lab.phrases.index import LENGTHS, Corpus, Related, States, hashes
from foretell.speculator.checkpoint import WEIGHTS
from foretell.train.exits.checkpoints import Checkpoints
from foretell.train.exits.descent import Descent, OnStep

HALF, WIDTH, HEADS = 128, 256, 4
"""Numbers of half a phrase vector, and size of the layer that sees a document in both directions."""
LEAST = 1e-300
"""The probability of what cannot be."""
_RATE, _TEXTS, _RELATED = 1e-3, 3, 10
"""Of the training: the largest learning rate, texts of a batch, and documents of it per text, those most like it."""


class PhraseEncoders(nn.Module):
    """Queries of states before phrases, and start and end vectors of tokens of documents: half a phrase vector each.
    They are made of states of one frozen model; the paper tunes GPT-2 and BERT.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.middle = (nn.BatchNorm1d(hidden, affine=False) for _ in range(2))
        self.query, self.bias, self.start = nn.Linear(hidden, 2 * HALF), nn.Linear(hidden, 1), nn.Linear(hidden, HALF)
        self.read, self.parts = nn.Linear(2 * hidden, WIDTH), nn.Linear(WIDTH, 2 * HALF)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=True)
        # At first phrases are unlikely, those most likely before which states are like the query.
        with torch.no_grad():
            self.start.weight.copy_(self.query.weight[:HALF])
            self.start.bias.copy_(self.query.bias[:HALF])
            self.bias.bias.fill_(-8)

    def encode_prefixes(self, states: Float[torch.Tensor, "q d"]) -> Float[torch.Tensor, "q h"]:
        """Queries, and last what is added to the scores of all phrases."""
        x = self.before(states.float())
        return torch.cat([self.query(x) / HALF**0.5, self.bias(x)], -1)

    def encode_phrases(self, documents: Corpus) -> "PhraseTable":
        """All phrases of documents, in one pass over them."""
        unread = documents.tokens < 0
        before = self.before(documents.before.float().flatten(0, 1)).view(*unread.shape, -1)
        middle = self.middle(documents.middle.float().flatten(0, 1)).view(*unread.shape, -1)
        x = self.layer(self.read(torch.cat([before, middle], -1)), src_key_padding_mask=unread)
        start, end = self.parts(x).chunk(2, -1)
        return PhraseTable(documents.tokens, (start + self.start(before)).float(), end.float())

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


def phrase_log_probabilities(
    table: PhraseTable, query: Float[torch.Tensor, "q h"], text: Int[torch.Tensor, " q"]
) -> tuple[Float[torch.Tensor, "q l"], Float[torch.Tensor, " q"]]:
    """For a query before each token of a text: the log-probability that a phrase of each length is copied that goes on
    as the text does, wherever it stands, and that a token of the model comes.
    """
    scores = table.scores(query)
    total, out = log_total(scores), query.new_zeros(len(query), len(LENGTHS), dtype=torch.float64)
    for i, (length, score) in enumerate(zip(LENGTHS, scores, strict=True)):
        if length <= len(text):
            row, place = table.copies(hashes(text, length), length).nonzero(as_tuple=True)
            out = out.index_put(
                (row, torch.tensor(i)), (score[row, place] - total[row]).double().exp(), accumulate=True
            )
    return out.clamp(min=LEAST).log(), -total


def log_likelihood(phrase: Float[torch.Tensor, "q l"], token: Float[torch.Tensor, " q"]) -> Float[torch.Tensor, ""]:
    """The log-probability of a text over all ways to cut it, from those of a phrase of each of `LENGTHS` and of the
    token itself at its places.
    """
    steps = torch.cat([token[:, None], phrase], -1).double()
    ends = torch.stack(
        [F.pad(column, (i, 0), value=log(LEAST))[: len(token)] for i, column in enumerate(steps.unbind(-1))], -1
    )
    # Log-probabilities of the text up to the last places, the nearest first.
    reached = F.pad(ends.new_zeros(1), (0, ends.shape[1] - 1), value=log(LEAST))
    for last in ends:
        reached = torch.cat([(reached + last).logsumexp(0, keepdim=True), reached[:-1]])
    return reached[0]


def train(
    corpus: Corpus,
    pieces: Sequence[Sequence[int]],
    related: Related,
    steps: int,
    seed: int,
    on_step: OnStep,
    checkpoints: Checkpoints | None = None,
) -> PhraseEncoders:
    """Encoders trained on batches of texts, each with the documents most like it, from which it may be copied."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoders = PhraseEncoders(corpus.before.shape[-1])

        def loss_of(_: int) -> Float[torch.Tensor, ""]:
            texts = torch.randint(len(pieces), (_TEXTS,)).tolist()
            near = {row for i in texts for row in related.nearest(pieces[i], _RELATED + 1)}
            # A text of the batch is no document of it: its phrases would be found in itself.
            return phrase_loss(encoders, corpus[texts], corpus[sorted(near - set(texts))])

        saved = checkpoints and replace(checkpoints, buffers=dict(encoders.named_buffers()))
        Descent.of_blocks(steps, _RATE).run(list(encoders.parameters()), loss_of, on_step, saved)
    return encoders.eval()


def phrase_loss(encoders: PhraseEncoders, texts: Corpus, documents: Corpus) -> Float[torch.Tensor, ""]:
    """The mean negative log-probability of a token of the texts, over all ways to cut them into phrases of the
    documents and tokens of the model.

    A phrase is told from all others of the batch: of unrelated documents, and (the hard ones) of documents like the
    text, among them longer and shorter phrases at the right place. All places where it stands are right.
    """
    read = texts.tokens >= 0
    table, query = encoders.encode_phrases(documents), encoders.encode_prefixes(texts.before[read])
    loss, sizes = query.new_zeros(()).double(), read.sum(1).tolist()
    for before, text, own in zip(
        query.split(sizes), texts.tokens[read].split(sizes), texts.own[read].split(sizes), strict=True
    ):
        phrase, token = phrase_log_probabilities(table, before, text)
        loss = loss - log_likelihood(phrase, token + own)
    return loss / sum(sizes)


class Phrases:
    """The different phrases of a table, after the tokens of the model: what a choice is made from."""

    def __init__(self, encoders: PhraseEncoders, table: PhraseTable) -> None:
        self._encoders, self._table = encoders, table
        runs = (table.tokens.unfold(-1, n, 1).flatten(0, 1).unique(dim=0, return_inverse=True) for n in LENGTHS)
        phrases, self._place = zip(*runs, strict=True)
        self.tokens = [t for p in phrases for t in p.tolist()]

    def extend(self, tokens: Float[torch.Tensor, " v"], state: Float[torch.Tensor, "1 d"]) -> Float[torch.Tensor, " c"]:
        """Log-probabilities of tokens and phrases, from those of tokens alone and the state that gave them."""
        scores = self._table.scores(self._encoders.encode_prefixes(state))
        parts = zip(self._place, scores, strict=True)
        of_phrases = [torch.zeros(int(p.max()) + 1).index_add_(0, p, s[0].exp()).log() for p, s in parts]
        return torch.cat([tokens, *of_phrases]) - log_total(scores)


def generate(
    prompt: Sequence[int], states: States, phrases: Phrases | None, most: int, top_p: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """Go on with a prompt by tokens and phrases until there are `most` tokens. LOSSY: phrases are copied, whatever the
    model itself would write. `top_p` 0: the likeliest choice. Without phrases it is the model alone.
    """
    generator, out = torch.Generator().manual_seed(seed), list[list[int]]()
    states.restart()
    after = states.read(prompt, scored=True)[2][-1]
    while sum(map(len, out)) < most:
        choices, order = (after if phrases is None else phrases.extend(after, states.state)).sort(descending=True)
        falling = choices.exp()
        nucleus = falling * (falling.cumsum(0) - falling < top_p)
        chosen = int(order[torch.multinomial(nucleus, 1, generator=generator) if top_p else 0])
        out.append([chosen] if phrases is None or chosen < len(after) else phrases.tokens[chosen - len(after)])
        after = states.read(out[-1], scored=True)[2][-1]
    return out
