"""Training of the encoders: which phrase, or a single token, comes next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float

from foretell.lab.phrases.encoders import PhraseEncoders, log_total, longest_phrases
from foretell.lab.phrases.index import LENGTHS, Corpus, Related, hashes
from foretell.train.exits.descent import Descent, OnStep
from foretell.utils.options import Option


@dataclass(frozen=True)
class PhraseSettings:
    """Settings of a training."""

    steps: Annotated[int, Option("Gradient steps.", "N", least=1)] = 400
    rate: Annotated[float, Option("Largest learning rate.", "X", "--lr", 0)] = 1e-3
    texts: Annotated[int, Option("Texts of a batch.", "N", least=1)] = 3
    related: Annotated[int, Option("Documents of a batch per text, those most like it.", "N", least=1)] = 10
    seed: Annotated[int, Option("Seed of weights and batches.", "N", least=0)] = 0


def train(
    corpus: Corpus, pieces: Sequence[Sequence[int]], related: Related, settings: PhraseSettings, on_step: OnStep
) -> PhraseEncoders:
    """Encoders trained on batches of texts, each with the documents most like it, from which it may be copied."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        encoders = PhraseEncoders(corpus.before.shape[-1])

        def loss_of() -> Float[torch.Tensor, ""]:
            texts = torch.randint(len(pieces), (settings.texts,)).tolist()
            near = {row for i in texts for row in related.nearest(pieces[i], settings.related + 1)}
            # A text of the batch is no document of it: its phrases would be found in itself.
            return phrase_loss(encoders, corpus[texts], corpus[sorted(near - set(texts))])

        Descent.of_blocks(settings.steps, settings.rate).run(list(encoders.parameters()), loss_of, on_step)
    return encoders.eval()


def phrase_loss(encoders: PhraseEncoders, texts: Corpus, documents: Corpus) -> Float[torch.Tensor, ""]:
    """The mean cross-entropy of what comes next, where a text is cut into the longest phrases of the documents.

    A phrase is told from all others of the batch: of unrelated documents, and (the hard ones) of documents like the
    text, among them longer and shorter phrases at the right place. All places where it stands are right.
    """
    states, own, sizes = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    for tokens, before in zip(texts.tokens, texts.before, strict=True):
        text = tokens[tokens >= 0]
        for at, length in longest_phrases(text, documents.tokens):
            states.append(before[at].float())
            own.append(hashes(text[at : at + length], length)[0])
            sizes.append(length)
    table, query = encoders.encode_phrases(documents), encoders.encode_prefixes(torch.stack(states)).float()
    with torch.autocast("cpu", enabled=False):  # which would round scores to three digits
        scores = table.scores(query)
        loss = log_total(scores).sum()
    phrase, size = torch.stack(own), torch.tensor(sizes)
    for length, score in zip(LENGTHS, scores, strict=True):
        rows = size == length
        right = score[rows].masked_fill(~table.copies(phrase[rows], length), float("-inf"))
        loss = loss - right.logsumexp(-1).sum()
    return loss / len(sizes)
