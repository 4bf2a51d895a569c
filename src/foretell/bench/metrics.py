"""From records to figures. Every figure is defined in `DEFINITIONS`, which is printed with the results."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from foretell.bench.schema import (
    Answer,
    CategoryMeans,
    MeanFidelityLoss,
    Metrics,
    QuestionMetrics,
    QuestionResult,
    SpecBenchMetrics,
)

DEFINITIONS: Mapping[str, str] = {
    "tokens per pass": "new tokens over passes of the target that decided tokens, the one that ends the reading of the "
    "prompt included; the target's own token of each pass (the bonus token) counts, so plain decoding has"
    " 1.",
    "without bonus": "accepted drafts over the same passes: plain decoding has 0. Drafts accepted past the wanted "
    "length "
    "count here, not above.",
    "conditional acceptance": "at depth d: passes that accepted a draft there, over passes that tested one there, that "
    "is, all "
    "drafts before it stood and the tree went on.",
    "cumulative acceptance": "at depth d: passes that accepted a draft there, over all passes.",
    "tokens/s": "tokens that arrived after the first arrival, over the time since it: prefill apart. End to end "
    "counts all tokens and all time.",
    "speed-up": "tokens/s over that of our own plain decoding of the same precision, same questions, same run.",
    "over a peer": "tokens/s over the peer's, which read the same prompts and wrote as many tokens as our plain "
    "decoding"
    " of the first precision.",
    "mean": "arithmetic mean over the categories; everything else is pooled over questions. Times of a question "
    "are medians over the repeats.",
    "draft, verify, other": "shares of the time of decoding steps spent in the drafter, in the target's pass, and in "
    "everything "
    "else.",
    "inter-token time": "time between arrivals shared evenly by the tokens that arrived together; the gap is the time "
    "between"
    " arrivals itself.",
    "prefill": "time to the first arrival, mean over the answers.",
    "identical": "questions answered with the very tokens of plain decoding of the same precision, of those compared. "
    "The margin of a divergence is how many logits apart the two tokens are when the target reads the "
    "common text in one go: near zero means a tie that rounding decided.",
    "peak memory": "resident memory of a process that does nothing else, at its highest while it answers the longest "
    "question.",
    "Spec-Bench": "#MAT is the mean of accepted tokens and bonus over all passes; the speed-up is the mean over "
    "questions of tokens/s with the prefill inside, over the same of plain decoding, whose tokens are "
    "those of the stripped answer tokenized again, as in its speed.py.",
    "price": "of lossy methods, per token: divergence (KL, nats) and total variation of the law that decided from "
    "the target's, and the share of changed tokens.",
}


def decode_tokens(turn: Answer) -> int:
    """Tokens after the first arrival."""
    return len(turn.tokens) - turn.arrival_counts[0] if turn.arrival_counts else 0


def decode_seconds(turn: Answer) -> float:
    """From the first to the last arrival."""
    return turn.arrival_seconds[-1] - turn.arrival_seconds[0] if turn.arrival_seconds else 0.0


def total_seconds(turn: Answer) -> float:
    """From the request to the last arrival."""
    return turn.arrival_seconds[-1] if turn.arrival_seconds else 0.0


def question_metrics(records: Iterable[QuestionResult]) -> list[QuestionMetrics]:
    """One competitor's answered questions, repeats merged: counts of the first repeat, medians of the times."""
    found: dict[str, list[QuestionResult]] = defaultdict(list)
    for r in sorted(records, key=lambda r: r.repeat):
        if r.error is None:
            found[r.question].append(r)

    def middle(repeats: Sequence[QuestionResult], seconds: Callable[[Answer], float]) -> float:
        return median(sum(seconds(t) for t in r.answers) for r in repeats)

    return [
        QuestionMetrics(
            question=name,
            category=repeats[0].category,
            tokens=sum(len(t.tokens) for t in repeats[0].answers),
            passes=sum(t.passes for t in repeats[0].answers),
            decode_tokens=sum(decode_tokens(t) for t in repeats[0].answers),
            decode_seconds=middle(repeats, decode_seconds),
            total_seconds=middle(repeats, total_seconds),
        )
        for name, repeats in found.items()
    ]


def tokens_per_second(questions: Sequence[QuestionMetrics], end_to_end: bool = False) -> float:
    """Tokens per second of decoding, or of everything."""
    tokens = sum(q.tokens if end_to_end else q.decode_tokens for q in questions)
    seconds = sum(q.total_seconds if end_to_end else q.decode_seconds for q in questions)
    return tokens / seconds if seconds else 0.0


def speed_ratio(
    mine: Sequence[QuestionMetrics], theirs: Sequence[QuestionMetrics], end_to_end: bool = False
) -> float | None:
    """Of two rates over the questions that both answered; None where there is none."""
    common = {q.question for q in mine} & {q.question for q in theirs}
    above = tokens_per_second([q for q in mine if q.question in common], end_to_end)
    below = tokens_per_second([q for q in theirs if q.question in common], end_to_end)
    return above / below if above and below else None


def compute_metrics(
    records: Sequence[QuestionResult], plain: Sequence[QuestionResult], peers: Mapping[str, Sequence[QuestionResult]]
) -> Metrics:
    """Pooled figures of one competitor over some questions, against plain decoding's and the peers' records of the
    same.
    """
    answered = [r for r in records if r.error is None]
    first = [t for r in answered if r.repeat == 0 for t in r.answers]
    every = [t for r in answered for t in r.answers]
    mine, base = question_metrics(answered), question_metrics(plain)
    passes, tokens = sum(t.passes for t in first), sum(len(t.tokens) for t in first)
    tested, accepted = _sum([t.tested_per_position for t in first]), _sum([t.accepted_per_position for t in first])
    steps = sum(t.step_seconds for t in every)
    shares = [
        sum(x) / steps if steps else None for x in ([t.draft_seconds for t in every], [t.verify_seconds for t in every])
    ]
    gaps, even = _waits(every)
    over = {name: speed_ratio(mine, question_metrics(rs)) for name, rs in peers.items()}
    return Metrics(
        questions=len(mine),
        tokens=tokens,
        passes=passes,
        tokens_per_pass=tokens / passes if passes else None,
        accepted_per_pass=sum(accepted) / passes if passes else None,
        drafted_per_pass=sum(t.drafted for t in first) / passes if passes else None,
        acceptance_conditional=tuple(
            a / n for a, n in zip([*accepted, *[0] * (len(tested) - len(accepted))], tested, strict=True)
        ),
        acceptance_cumulative=tuple(a / passes for a in accepted),
        tokens_per_second=tokens_per_second(mine),
        end_to_end_tokens_per_second=tokens_per_second(mine, end_to_end=True),
        speedup=speed_ratio(mine, base),
        end_to_end_speedup=speed_ratio(mine, base, end_to_end=True),
        over_peers={name: value for name, value in over.items() if value is not None},
        draft_share=shares[0],
        verify_share=shares[1],
        other_share=None if shares[0] is None or shares[1] is None else max(0.0, 1 - shares[0] - shares[1]),
        prefill_seconds=fmean(t.arrival_seconds[0] if t.arrival_seconds else 0.0 for t in every) if every else 0.0,
        inter_token_p50_ms=_percentile(even, 50),
        inter_token_p95_ms=_percentile(even, 95),
        gap_p95_ms=_percentile(gaps, 95),
    )


def _sum(counts: Sequence[Sequence[int]]) -> list[int]:
    longest = max((len(c) for c in counts), default=0)
    return [sum(c[d] for c in counts if d < len(c)) for d in range(longest)]


def _waits(turns: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Seconds between arrivals, and the same shared by the tokens of each."""
    gaps, even = list[float](), list[float]()
    for t in turns:
        for (before, after), count in zip(pairwise(t.arrival_seconds), t.arrival_counts[1:], strict=True):
            gaps.append(after - before)
            even += [(after - before) / count] * count
    return gaps, even


def _percentile(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3 if len(seconds) else 0.0


def category_means(categories: Sequence[Metrics]) -> CategoryMeans:
    """Arithmetic means over the categories."""

    def over(values: Sequence[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return fmean(known) if known else None

    names = {name for f in categories for name in f.over_peers}
    return CategoryMeans(
        tokens_per_pass=over([f.tokens_per_pass for f in categories]),
        tokens_per_second=over([f.tokens_per_second for f in categories]) or 0.0,
        speedup=over([f.speedup for f in categories]),
        over_peers={n: over([f.over_peers.get(n) for f in categories]) or 0.0 for n in sorted(names)},
    )


def spec_bench_metrics(records: Sequence[QuestionResult], plain: Sequence[QuestionResult]) -> SpecBenchMetrics:
    """#MAT and speed-ups as Spec-Bench computes them, by its six groups."""
    turns = [t for r in records if r.error is None and r.repeat == 0 for t in r.answers]
    passes = sum(t.passes for t in turns)

    def rates(of: Sequence[QuestionResult], tokens: Callable[[Answer], int]) -> dict[str, list[float]]:
        out: dict[str, list[float]] = defaultdict(list)
        for r in of:
            seconds = sum(total_seconds(t) for t in r.answers)
            if r.error is None and seconds:
                out[r.group].append(sum(tokens(t) for t in r.answers) / seconds)
        return out

    mine, base = rates(records, lambda t: len(t.tokens)), rates(plain, lambda t: t.retokenized_tokens)
    both = [g for g in mine if g in base and fmean(base[g])]
    above, below = [x for g in both for x in mine[g]], [x for g in both for x in base[g]]
    return SpecBenchMetrics(
        mean_accepted_tokens=sum(len(t.tokens) for t in turns) / passes if passes else None,
        speedup={g: fmean(mine[g]) / fmean(base[g]) for g in both},
        overall=fmean(above) / fmean(below) if below else 0.0,
    )


def mean_fidelity_loss(records: Sequence[QuestionResult]) -> MeanFidelityLoss | None:
    """A lossy method's price, weighted by tokens."""
    turns = [(t.fidelity, len(t.tokens)) for r in records if r.repeat == 0 for t in r.answers if t.fidelity is not None]
    total = sum(n for _, n in turns)
    if not total:
        return None
    return MeanFidelityLoss(
        kl=sum(p.kl * n for p, n in turns) / total,
        total_variation=sum(p.total_variation * n for p, n in turns) / total,
        changed=sum(p.changed * n for p, n in turns) / total,
    )
