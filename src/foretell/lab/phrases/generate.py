"""Generation from phrases and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.lab.phrases.encoders import PhraseEncoders, PhraseTable, log_total
from foretell.lab.phrases.index import LENGTHS, States


@dataclass(frozen=True)
class Written:
    """A text: its tokens, how many of them were copied, how many choices were made, and the log-probability that the
    frozen model gives to it.
    """

    tokens: list[int]
    copied: int
    choices: int
    log_probability: float


class Phrases:
    """The different phrases of a table, after the tokens of the model: what a choice is made from."""

    def __init__(self, encoders: PhraseEncoders, table: PhraseTable) -> None:
        self._encoders, self._table = encoders, table
        runs = (table.tokens.unfold(-1, n, 1).flatten(0, 1).unique(dim=0, return_inverse=True) for n in LENGTHS)
        phrases, self._place = zip(*runs, strict=True)
        self._counts, self.tokens = [len(p) for p in phrases], [t for p in phrases for t in p.tolist()]

    def extend(self, tokens: Float[torch.Tensor, " v"], state: Float[torch.Tensor, "1 d"]) -> Float[torch.Tensor, " c"]:
        """Log-probabilities of tokens and phrases, from those of tokens alone and the state that gave them."""
        scores = self._table.scores(self._encoders.encode_prefixes(state))
        parts = zip(self._counts, self._place, scores, strict=True)
        of_phrases = [torch.zeros(n).index_add_(0, place, s[0].exp()).log() for n, place, s in parts]
        return torch.cat([tokens, *of_phrases]) - log_total(scores)


def generate(
    prompt: Sequence[int], states: States, phrases: Phrases | None, most: int, top_p: float = 0.0, seed: int = 0
) -> Written:
    """Go on with a prompt by `most` tokens. LOSSY: phrases are copied, whatever the model itself would write.

    `top_p` 0: the likeliest phrase or token, else nucleus sampling. Without phrases it is the model alone.
    """
    generator = torch.Generator().manual_seed(seed)
    states.restart()
    after = states.read(prompt, scored=True)[2][-1]
    written = Written([], 0, 0, 0.0)
    while len(written.tokens) < most:
        choices = after if phrases is None else phrases.extend(after, states.state)
        chosen = int(choices.argmax()) if not top_p else _draw(choices.exp(), top_p, generator)
        copies = phrases is not None and chosen >= len(after)
        new = phrases.tokens[chosen - len(after)] if phrases is not None and copies else [chosen]
        new = new[: most - len(written.tokens)]
        logs = torch.cat([after[None], states.read(new, scored=True)[2]])
        after, own = logs[-1], logs[range(len(new)), new].sum()
        written = Written(
            written.tokens + new, written.copied + copies * len(new), written.choices + 1,
            written.log_probability + float(own),
        )  # fmt: skip
    return written


def _draw(probabilities: Float[torch.Tensor, " c"], top_p: float, generator: torch.Generator) -> int:
    falling, order = probabilities.sort(descending=True)
    nucleus = falling * (falling.cumsum(0) - falling < top_p)
    return int(order[torch.multinomial(nucleus, 1, generator=generator)])
