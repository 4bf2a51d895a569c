"""Quality, passes and speed of a model on held-out pairs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.lab.nat.decode import DecodeOptions, translate
from foretell.lab.nat.lossless import translate_verified
from foretell.lab.nat.network import NatModel
from foretell.lab.nat.pairs import Pair

TranslateBatch = Callable[[Sequence[Sequence[int]]], tuple[Sequence[Sequence[int]], int, int]]
"""From sources to targets, decoder passes, and passes of a drafter."""


@dataclass(frozen=True)
class NatReport:
    """Means over pairs."""

    pairs: int
    exact_match: float
    """Share of outputs that equal a reference."""
    bleu: float | None
    """Of the corpus, in per cent, by sacrebleu over words; None: it is not installed."""
    edit_distance: float
    """Insertions, deletions and substitutions of words to the nearest reference, over its length."""
    passes: float
    """Decoder passes of the model (of the verifier, where there is a drafter) per batch of sources."""
    draft_passes: float
    """Decoder passes of the drafter per batch of sources."""
    tokens_per_pass: float
    """Of one source: a pass over a batch counts once for each of its sources."""
    tokens_per_second: float
    milliseconds: float
    """Of a batch of sources: wall time, encoder included."""
    cpu_milliseconds: float
    """Processor time of a source, of all threads, encoder included."""
    same_as_verifier: float | None = None
    """Share of outputs that equal greedy decoding of the verifier, where there is a drafter."""


def bleu(texts: Sequence[str], pairs: Sequence[Pair]) -> float | None:
    """BLEU of texts against all references of their pairs; None: sacrebleu is not installed."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError:
        return None
    most = max(len(p.references) for p in pairs)
    references = [[p.references[i] if i < len(p.references) else None for p in pairs] for i in range(most)]
    return float(corpus_bleu(texts, references, tokenize="none", force=True).score)


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Levenshtein distance of two sequences."""
    row = np.arange(len(other) + 1)
    for i, word in enumerate(one, 1):
        changed = np.minimum(row[1:] + 1, row[:-1] + np.array([word != o for o in other], int))
        row = np.concatenate(([i], changed))
        # Insertions: the least of what stands before, plus one per step.
        row = np.minimum.accumulate(row - np.arange(len(row))) + np.arange(len(row))
    return int(row[-1])


def evaluate(
    model: NatModel,
    pairs: Sequence[Pair],
    options: DecodeOptions,
    batch: int = 1,
    teacher: NatModel | None = None,
    drafter: NatModel | None = None,
) -> NatReport:
    """Translate the sources of pairs, `batch` at a time. With a drafter, which needs a batch of 1, the model verifies.

    Raises:
        ValueError: a source is too long, or a drafter was given with batches.
    """
    if drafter is not None and batch != 1:
        raise ValueError(f"--batch {batch}: drafts are verified one source at a time; leave --batch out")
    sources = [model.config.source.encode(p.source) for p in pairs]
    run = _plain(model, options, teacher) if drafter is None else _verified(model, drafter, options)
    run(sources[:1])
    outputs, passes, draft_passes, source_passes = list[Sequence[int]](), 0, 0, 0
    started, begun = time.perf_counter(), time.process_time()
    for begin in range(0, len(sources), batch):
        tokens, count, drafts = run(sources[begin : begin + batch])
        outputs += tokens
        passes, draft_passes = passes + count, draft_passes + drafts
        source_passes += count * len(tokens)
    seconds, cpu, batches = time.perf_counter() - started, time.process_time() - begun, -(-len(sources) // batch)
    texts = [model.config.target.decode(tokens) for tokens in outputs]
    # The end token counts: an autoregressive model takes a pass for it.
    tokens_out = sum(len(o) + 1 for o in outputs)
    return NatReport(
        pairs=len(pairs),
        exact_match=float(np.mean([t in p.references for t, p in zip(texts, pairs, strict=True)])),
        bleu=bleu(texts, pairs),
        edit_distance=float(np.mean([_relative_distance(t, p) for t, p in zip(texts, pairs, strict=True)])),
        passes=passes / batches,
        draft_passes=draft_passes / batches,
        tokens_per_pass=tokens_out / source_passes,
        tokens_per_second=tokens_out / seconds,
        milliseconds=1000 * seconds / batches,
        cpu_milliseconds=1000 * cpu / len(sources),
        same_as_verifier=None if drafter is None else _same_share(model, sources, outputs),
    )


def _relative_distance(text: str, pair: Pair) -> float:
    words = text.split()
    return min(edit_distance(words, r.split()) / len(r.split()) for r in pair.references)


def _plain(model: NatModel, options: DecodeOptions, teacher: NatModel | None) -> TranslateBatch:
    def run(sources: Sequence[Sequence[int]]) -> tuple[Sequence[Sequence[int]], int, int]:
        translated = translate(model, sources, options, teacher)
        return translated.tokens, translated.passes, 0

    return run


def _verified(verifier: NatModel, drafter: NatModel, options: DecodeOptions) -> TranslateBatch:
    def run(sources: Sequence[Sequence[int]]) -> tuple[Sequence[Sequence[int]], int, int]:
        translated = translate_verified(verifier, drafter, sources[0], options)
        return [translated.tokens], translated.passes, translated.draft_passes

    return run


def _same_share(model: NatModel, sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> float:
    plain = [translate(model, [s], DecodeOptions()).tokens[0] for s in sources]
    return float(np.mean([list(a) == list(b) for a, b in zip(plain, outputs, strict=True)]))
