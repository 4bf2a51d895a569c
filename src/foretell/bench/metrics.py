"""Metrics of a run, computed from `QuestionResult`s. `DEFINITIONS`, which is printed with the results, defines each."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
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
    "tokens per pass": "new tokens over passes of the target that decided tokens, including the pass that ends the "
    "prefill. The target's own token of each pass (the bonus token) counts, so plain decoding has 1.",
    "without bonus": "accepted drafts over the same passes: plain decoding has 0. Drafts accepted beyond the wanted "
    "length count here, not above.",
    "conditional acceptance": "at depth d: passes that accepted a draft there, over passes that tested one there, that "
    "is, all drafts before it were accepted and the tree went on.",
    "cumulative acceptance": "at depth d: passes that accepted a draft there, over all passes.",
    "tokens/s": "tokens that arrived after the first arrival, over the time since it, so prefill is excluded. End to "
    "end counts all tokens and all time. Of questions answered together: per question, from the time at which the last "
    "prompt of them has been read.",
    "speed-up": "tokens/s over that of our own plain decoding of the same precision, same questions, same run.",
    "over a peer": "tokens/s over the peer's, which read the same prompts and wrote as many tokens as our plain "
    "decoding of the first precision.",
    "mean": "arithmetic mean over the categories; everything else is pooled over questions. Times of a question "
    "are medians over the repeats.",
    "draft, verify, other": "shares of the time of decoding steps spent in the drafter, in the target's pass, and in "
    "everything else.",
    "inter-token time": "time between arrivals divided by the number of tokens that arrived together; the gap is the "
    "undivided time between arrivals.",
    "prefill": "time to the first arrival, mean over the answers.",
    "identical": "questions answered with exactly the tokens of plain decoding of the same precision, of those "
    "compared. The margin of a divergence is the difference of the two tokens' logits when the target reads the common "
    "prefix without speculation: near zero means a tie that rounding decided.",
    "peak memory": "highest resident memory of a process that only answers the longest question.",
    "Spec-Bench": "#MAT is the mean of accepted tokens and bonus over all passes. The speed-up is the mean over "
    "questions of tokens/s including prefill, over the same of plain decoding, whose tokens are those of the stripped "
    "answer tokenized again, as in its speed.py.",
    "fidelity": "of lossy methods, per token: Kullback-Leibler divergence (KL, nats) and total variation of the "
    "method's distribution from the target's, and the share of changed tokens.",
}


def decode_tokens(answer: Answer) -> int:
    """Tokens after the first arrival."""
    return len(answer.tokens) - answer.arrival_counts[0] if answer.arrival_counts else 0


def decode_seconds(answer: Answer) -> float:
    """From the first to the last arrival."""
    return answer.arrival_seconds[-1] - answer.arrival_seconds[0] if answer.arrival_seconds else 0.0


def total_seconds(answer: Answer) -> float:
    """From the request to the last arrival."""
    return answer.arrival_seconds[-1] if answer.arrival_seconds else 0.0


def question_metrics(results: Iterable[QuestionResult]) -> list[QuestionMetrics]:
    """Metrics of one competitor by question: counts of the first repeat, medians of the times over the repeats."""
    by_question: dict[str, list[QuestionResult]] = defaultdict(list)
    for r in sorted(results, key=lambda r: r.repeat):
        if r.error is None:
            by_question[r.question].append(r)

    def median_seconds(repeats: Sequence[QuestionResult], seconds: Callable[[Answer], float]) -> float:
        return median(sum(seconds(a) for a in r.answers) for r in repeats)

    return [
        QuestionMetrics(
            question=question,
            category=repeats[0].category,
            tokens=sum(len(a.tokens) for a in repeats[0].answers),
            passes=sum(a.passes for a in repeats[0].answers),
            decode_tokens=sum(decode_tokens(a) for a in repeats[0].answers),
            decode_seconds=median_seconds(repeats, decode_seconds),
            total_seconds=median_seconds(repeats, total_seconds),
        )
        for question, repeats in by_question.items()
    ]


def tokens_per_second(questions: Sequence[QuestionMetrics], end_to_end: bool = False) -> float:
    """Of decoding, or including prefill."""
    tokens = sum(q.tokens if end_to_end else q.decode_tokens for q in questions)
    seconds = sum(q.total_seconds if end_to_end else q.decode_seconds for q in questions)
    return tokens / seconds if seconds else 0.0


def speed_ratio(
    mine: Sequence[QuestionMetrics], theirs: Sequence[QuestionMetrics], end_to_end: bool = False
) -> float | None:
    """Ratio of tokens per second over the questions that both answered; None if there are none."""
    common = {q.question for q in mine} & {q.question for q in theirs}
    numerator = tokens_per_second([q for q in mine if q.question in common], end_to_end)
    denominator = tokens_per_second([q for q in theirs if q.question in common], end_to_end)
    return numerator / denominator if numerator and denominator else None


def compute_metrics(
    results: Sequence[QuestionResult], plain: Sequence[QuestionResult], peers: Mapping[str, Sequence[QuestionResult]]
) -> Metrics:
    """Metrics of one competitor pooled over some questions, given plain decoding's and the peers' results of them."""
    answered = [r for r in results if r.error is None]
    first = [a for r in answered if r.repeat == 0 for a in r.answers]
    every = [a for r in answered for a in r.answers]
    mine, base = question_metrics(answered), question_metrics(plain)
    passes, tokens = sum(a.passes for a in first), sum(len(a.tokens) for a in first)
    tested = _sum_positions([a.tested_per_position for a in first])
    accepted = _sum_positions([a.accepted_per_position for a in first])
    steps = sum(a.step_seconds for a in every)
    draft_share = sum(a.draft_seconds for a in every) / steps if steps else None
    verify_share = sum(a.verify_seconds for a in every) / steps if steps else None
    gaps, per_token = _inter_token_seconds(every)
    over = {name: speed_ratio(mine, question_metrics(rs)) for name, rs in peers.items()}
    return Metrics(
        questions=len(mine),
        tokens=tokens,
        passes=passes,
        tokens_per_pass=tokens / passes if passes else None,
        accepted_per_pass=sum(accepted) / passes if passes else None,
        drafted_per_pass=sum(a.drafted for a in first) / passes if passes else None,
        read_per_pass=_mean_of_passes(every, lambda a: a.read_per_pass),
        requests_per_pass=_mean_of_passes(every, lambda a: a.requests_per_pass) or 1.0,
        decode_tokens_per_pass=_decode_tokens_per_pass(every),
        mean_context=fmean(a.prompt_tokens + len(a.tokens) / 2 for a in every) if every else 0.0,
        acceptance_conditional=tuple(a / n for a, n in zip_longest(accepted, tested, fillvalue=0)),
        acceptance_cumulative=tuple(a / passes for a in accepted),
        tokens_per_second=tokens_per_second(mine),
        end_to_end_tokens_per_second=tokens_per_second(mine, end_to_end=True),
        speedup=speed_ratio(mine, base),
        end_to_end_speedup=speed_ratio(mine, base, end_to_end=True),
        over_peers={name: value for name, value in over.items() if value is not None},
        draft_share=draft_share,
        verify_share=verify_share,
        other_share=None if draft_share is None or verify_share is None else max(0.0, 1 - draft_share - verify_share),
        prefill_seconds=fmean(a.arrival_seconds[0] if a.arrival_seconds else 0.0 for a in every) if every else 0.0,
        inter_token_p50_ms=_percentile_ms(per_token, 50),
        inter_token_p95_ms=_percentile_ms(per_token, 95),
        gap_p95_ms=_percentile_ms(gaps, 95),
    )


def _mean_of_passes(answers: Sequence[Answer], value: Callable[[Answer], float]) -> float | None:
    """Mean over the answers' passes after the prompt; None if there are none."""
    passes = [max(0, a.passes - 1) for a in answers]
    return sum(n * value(a) for n, a in zip(passes, answers, strict=True)) / sum(passes) if sum(passes) else None


def _decode_tokens_per_pass(answers: Sequence[Answer]) -> float | None:
    passes = sum(max(0, len(a.arrival_counts) - 1) for a in answers)
    return sum(map(decode_tokens, answers)) / passes if passes else None


def _sum_positions(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(position) for position in zip_longest(*counts, fillvalue=0)]


def _inter_token_seconds(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Seconds between arrivals, and the same per token, shared by those that arrived together."""
    gaps, per_token = list[float](), list[float]()
    for a in answers:
        for (before, after), count in zip(pairwise(a.arrival_seconds), a.arrival_counts[1:], strict=True):
            gaps.append(after - before)
            per_token += [(after - before) / count] * count
    return gaps, per_token


def _percentile_ms(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3 if len(seconds) else 0.0


def category_means(categories: Sequence[Metrics]) -> CategoryMeans:
    """Arithmetic means over the categories."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return fmean(known) if known else None

    names = {name for m in categories for name in m.over_peers}
    return CategoryMeans(
        tokens_per_pass=mean([m.tokens_per_pass for m in categories]),
        tokens_per_second=mean([m.tokens_per_second for m in categories]) or 0.0,
        speedup=mean([m.speedup for m in categories]),
        over_peers={n: mean([m.over_peers.get(n) for m in categories]) or 0.0 for n in sorted(names)},
    )


def spec_bench_metrics(results: Sequence[QuestionResult], plain: Sequence[QuestionResult]) -> SpecBenchMetrics:
    """#MAT and speed-ups as Spec-Bench computes them, by its six groups."""
    answers = [a for r in results if r.error is None and r.repeat == 0 for a in r.answers]
    passes = sum(a.passes for a in answers)

    def rates_by_group(of: Sequence[QuestionResult], tokens: Callable[[Answer], int]) -> dict[str, list[float]]:
        out: dict[str, list[float]] = defaultdict(list)
        for r in of:
            seconds = sum(total_seconds(a) for a in r.answers)
            if r.error is None and seconds:
                out[r.group].append(sum(tokens(a) for a in r.answers) / seconds)
        return out

    mine = rates_by_group(results, lambda a: len(a.tokens))
    base = rates_by_group(plain, lambda a: a.retokenized_tokens)
    common = [g for g in mine if g in base and fmean(base[g])]
    mine_rates, base_rates = [x for g in common for x in mine[g]], [x for g in common for x in base[g]]
    return SpecBenchMetrics(
        mean_accepted_tokens=sum(len(a.tokens) for a in answers) / passes if passes else None,
        speedup={g: fmean(mine[g]) / fmean(base[g]) for g in common},
        overall=fmean(mine_rates) / fmean(base_rates) if base_rates else 0.0,
    )


def mean_fidelity_loss(results: Sequence[QuestionResult]) -> MeanFidelityLoss | None:
    """Fidelity loss of a lossy method, weighted by tokens; None for a lossless one."""
    answers = [a for r in results if r.repeat == 0 for a in r.answers]
    losses = [(a.fidelity, len(a.tokens)) for a in answers if a.fidelity is not None]
    total = sum(n for _, n in losses)
    if not total:
        return None
    return MeanFidelityLoss(
        kl=sum(loss.kl * n for loss, n in losses) / total,
        total_variation=sum(loss.total_variation * n for loss, n in losses) / total,
        changed=sum(loss.changed * n for loss, n in losses) / total,
    )
