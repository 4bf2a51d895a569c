"""Measures text that is copied phrase by phrase (`foretell phrases`) beside what the model writes alone.

    python tools/measure_phrases.py phrases --text articles

Pieces of the texts that were held out begin the texts. Repetition is that of Su et al. (arXiv 2202.06417), as in "Copy
is All You Need"; the perplexity of what is written is the model's own. The perplexity of the pieces held out is exact:
over all ways to cut them into phrases and tokens.
"""

from collections import Counter
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Annotated

import torch
import typer

from foretell.cli.setup import load_model
from foretell.lab.phrases.encoders import (
    PhraseEncoders,
    Phrases,
    PhraseTable,
    generate,
    log_likelihood,
    phrase_log_probabilities,
)
from foretell.lab.phrases.index import Related, States, encode, read_pieces

PROMPT = 32
"""Tokens that begin a text."""


def repetition(text: str, n: int) -> float:
    """rep-n: the share of the n-grams of words that repeat an earlier one."""
    words = text.split()
    grams = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    return 1 - len(grams) / grams.total() if grams else 0.0


def diversity(text: str) -> float:
    """The product of `1 - rep-n` for n from 2 to 4."""
    return (1 - repetition(text, 2)) * (1 - repetition(text, 3)) * (1 - repetition(text, 4))


def held_out(
    pieces: Sequence[Sequence[int]], tables: Sequence[PhraseTable], encoders: PhraseEncoders, states: States
) -> str:
    """The perplexity of pieces after their prompts: the model's, with phrases, and with the same phrases that have the
    vectors of others.
    """
    names = "the model", "with phrases", "with phrases whose vectors are those of others"
    sums, ratios, count = dict.fromkeys(names, 0.0), list[float](), 0
    for piece, table in zip(pieces, tables, strict=True):
        states.restart()
        before, _, logs = states.read(piece, scored=True)
        rest = torch.tensor(piece[PROMPT:])
        own = logs[PROMPT - 1 : -1].gather(1, rest[:, None])[:, 0]
        order = torch.randperm(len(table.tokens), generator=torch.Generator().manual_seed(0))
        other = PhraseTable(table.tokens, table.start[order], table.end[order])
        query = encoders.encode_prefixes(before[PROMPT:])
        values = [float(own.sum())]
        for one in (table, other):
            phrase, token = phrase_log_probabilities(one, query, rest)
            values.append(float(log_likelihood(phrase, token + own)))
        sums = {name: sums[name] + value for name, value in zip(names, values, strict=True)}
        ratios.append((values[0] - values[1]) / len(rest))
        count += len(rest)
    low, high = (exp(x) for x in interval(ratios))
    shown = ", ".join(f"{name} {exp(-log / count):.2f}" for name, log in sums.items())
    return f"perplexity of {count:,} tokens held out: {shown}; with phrases / the model {low:.3f} to {high:.3f}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean, by bootstrap over the values (95 %)."""
    of = torch.tensor(values)
    drawn = of[torch.randint(len(of), (2000, len(of)), generator=torch.Generator().manual_seed(0))].mean(1)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def log_probability(prompt: Sequence[int], text: Sequence[int], states: States) -> float:
    """Of a text after a prompt, by the model."""
    states.restart()
    logs = states.read([*prompt, *text], scored=True)[2][len(prompt) - 1 : -1]
    return float(logs[range(len(text)), list(text)].sum())


def row(name: str, written: Sequence[Sequence[Sequence[int]]], texts: Sequence[str], logs: Sequence[float]) -> str:
    """A line of the table, of the choices that were made for every text."""
    rates = [f"{100 * sum(repetition(t, n) for t in texts) / len(texts):.1f}" for n in (2, 3, 4)]
    sizes, spread = [len(choice) for w in written for choice in w], [100 * diversity(t) for t in texts]
    low, high = interval(spread)
    cells = [name, *rates, f"{sum(spread) / len(spread):.1f} ({low:.1f} to {high:.1f})"]
    cells += [f"{exp(-sum(logs) / sum(sizes)):.2f}", f"{sum(n for n in sizes if n > 1) / sum(sizes):.0%}"]
    return "| " + " | ".join([*cells, f"{sum(sizes) / len(sizes):.2f}"]) + " |"


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of `foretell phrases train`.")],
    text: Annotated[list[Path], typer.Option(help="The texts that it was trained on, or others to copy from.")],
    model: str = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Tokens of the texts that are read.")] = 64_000,
    documents: Annotated[int, typer.Option(help="Pieces to copy from, the most like a prompt.")] = 30,
    prompts: Annotated[int, typer.Option(help="Most pieces held out.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 96,
) -> None:
    """Print the perplexity of pieces held out, and a table of what is written."""
    target = load_model(model)
    states, encoders = States(target), PhraseEncoders.open(folder, target.config.hidden)
    learned, held = read_pieces(text, target, tokens)
    held, related = held[:prompts], Related(learned, target.config.vocab)
    corpus = encode(learned, states)
    tables = [encoders.encode_phrases(corpus[related.nearest(piece[:PROMPT], documents)]) for piece in held]
    print(held_out(held, tables, encoders, states), flush=True)
    print("| | rep-2 | rep-3 | rep-4 | diversity | perplexity | copied | tokens per choice |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for kind, top_p in (("greedy", 0.0), ("nucleus 0.95", 0.95)):
        for name, copies in (("the model", False), ("phrases", True)):
            written = [
                generate(p[:PROMPT], states, Phrases(encoders, t) if copies else None, max_new_tokens, top_p, i)
                for i, (p, t) in enumerate(zip(held, tables, strict=True))
            ]
            whole = [[token for choice in w for token in choice] for w in written]
            logs = [log_probability(p[:PROMPT], w, states) for p, w in zip(held, whole, strict=True)]
            print(row(f"{name}, {kind}", written, [target.codec.decode(w) for w in whole], logs), flush=True)


if __name__ == "__main__":
    typer.run(main)
