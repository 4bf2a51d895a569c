"""Measures a plan against plain decoding of the same questions: what is written, and in how many passes and seconds.

    python tools/measure_plan.py tools/plan_questions.jsonl --plan skeleton --out answers.txt
    python tools/measure_plan.py tools/plan_questions.jsonl --plan skeleton --times 8

    python tools/measure_plan.py tools/plan_questions.jsonl --plan apar --model my-apar/target

Each line of the file has `prompt` and `list`: whether the answer has independent points, by a person's judgement. The
router is measured on all of them, the rest on those with `list`, without a router. Texts go to `--out`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import foretell
from foretell.api import Answer, Model
from foretell.engine.request import Request

Row = dict[str, Any]
_STREAMS = 12
"""Streams of an answer that are decoded side by side, on the average."""


def measure_router(model: Model, plan: Row, rows: Sequence[Row]) -> None:
    """How the router judges questions with and without points."""
    for router, wanted in product(("trained", "prompt"), (True, False)):
        questions = [r["prompt"] for r in rows if r["list"] is wanted]
        answers = model.generate(questions, plan=plan | {"router": router}, max_new_tokens=8)
        routed = [a for a in answers if a.plan is not None and "router" not in a.plan.reason]
        kind = "with" if wanted else "without"
        print(f"router {router}, questions {kind} points: {len(routed)} of {len(answers)} get a plan")


def timed(make: Callable[[], Answer]) -> tuple[Answer, float]:
    """An answer and its seconds, of processor time where `--processor-time` asks for it."""
    clock = time.process_time if "--processor-time" in sys.argv else time.perf_counter
    started = clock()
    answer = make()
    return answer, clock() - started


def mean_logprob(model: Model, prompt: str, text: str) -> float:
    """Mean log-probability per token that the model itself gives to an answer in the plain conversation."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    tokens, start = model.codec.chat(turns, continue_final_message=True), len(model.tokens(prompt))
    (found,) = model.engine(rows=1).complete([Request(tokens, max_new_tokens=1, prompt_logprobs=0)])
    return statistics.fmean(found.prompt_logprobs[start - 1 :])


def repetition(text: str) -> float:
    """Share of the trigrams of words that occurred before in the text."""
    words = text.lower().split()
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def describe(name: str, model: Model, prompts: Sequence[str], answers: Sequence[Answer]) -> None:
    """What a set of answers is like."""
    mean = statistics.fmean
    logprobs = [mean_logprob(model, p, a.text) for p, a in zip(prompts, answers, strict=True)]
    print(
        f"{name}: {mean(a.statistics.new_tokens for a in answers):.0f} tokens written, "
        f"{mean(len(a.text.split()) for a in answers):.0f} words shown, "
        f"{mean(a.finish_reason == 'length' for a in answers):.0%} cut by the limit, "
        f"repeated trigrams {mean(repetition(a.text) for a in answers):.1%}, "
        f"log-probability per token {mean(logprobs):.2f}"
    )


@dataclass(frozen=True)
class CacheUse:
    """Tokens whose keys and values are cached at most, and those attended to in all: by a plan that forks, and by plain
    decoding of the same tokens without the control tokens.
    """

    cached: int
    attended: int
    plain_cached: int
    plain_attended: int


def cache_use(streams: Sequence[tuple[Sequence[int], int]]) -> CacheUse:
    """Of the streams of an answer that was written with forks, each its prompt and the number of its tokens; first the
    root. What two streams share is cached once, and forgotten with the last of them.
    """
    root, begin, parent, offset = len(streams[0][0]), [0], [-1], [0]
    for i, (prompt, _) in enumerate(streams[1:], 1):
        fits = [j for j in range(i) if list(prompt[: len(streams[j][0])]) == list(streams[j][0])]
        parent.append(max(fits, key=lambda j: len(streams[j][0])))
        offset.append(len(prompt) - 1 - len(streams[parent[i]][0]))
        begin.append(begin[parent[i]] + offset[i])
    cached = 0
    for step in range(max(b + n for b, (_, n) in zip(begin, streams, strict=True))):
        # A stream begins with its child token, which is read in its first pass.
        needed = [
            step - b + (i > 0) if b <= step < b + n else 0
            for i, (b, (_, n)) in enumerate(zip(begin, streams, strict=True))
        ]
        for i in range(len(streams) - 1, 0, -1):
            if needed[i]:
                needed[parent[i]] = max(needed[parent[i]], offset[i] + (parent[i] > 0))
        cached = max(cached, root + sum(needed))
    total = sum(n for _, n in streams) - 2 * (len(streams) - 1)
    attended = sum(sum(range(len(prompt), len(prompt) + n)) for prompt, n in streams)
    return CacheUse(cached, attended, root + total - 1, sum(range(root, root + total)))


def measure_cache(model: Model, plan: Row, method: str, prompts: Sequence[str], tokens: int) -> None:
    """Cached and attended tokens of the answers that fork."""
    runs = [model.plan_run(prompt, plan, max_new_tokens=tokens) for prompt in prompts]
    model.plan_engine(method, rows=_STREAMS * len(runs)).complete(runs)
    forked = [run for run in runs if len(run.requests) > 1]
    if forked:
        uses = [cache_use([(r.request.prompt, r.tokens) for r in run.requests]) for run in forked]
        cached, attended = ([getattr(u, n) / getattr(u, f"plain_{n}") for u in uses] for n in ("cached", "attended"))
        passes = [sum(r.tokens for r in run.requests) / run.report.passes for run in forked]
        print(
            f"{method}: {len(forked)} of {len(runs)} answers fork; of what the same text takes without, cached at most "
            f"{statistics.fmean(cached):.0%} ({min(cached):.0%} to {max(cached):.0%}), attended to "
            f"{statistics.fmean(attended):.0%}; tokens per pass {statistics.fmean(passes):.2f} (median "
            f"{statistics.median(passes):.2f}, {min(passes):.2f} to {max(passes):.2f})"
        )


def measure_texts(model: Model, plan: Row, prompts: Sequence[str], tokens: int, out: Path | None) -> None:
    """What is written, plainly and by the plan, for the questions whose answers were expanded."""
    planned = model.generate(prompts, plan=plan, max_new_tokens=tokens)
    plain = model.generate(prompts, max_new_tokens=tokens)
    reports = [a.plan for a in planned if a.plan is not None]
    expanded = [i for i, report in enumerate(reports) if report.outcome == "expanded"]
    parts = statistics.fmean(reports[i].parts for i in expanded)
    print(f"{len(expanded)} of {len(prompts)} answers expanded, {parts:.1f} parts each")
    if out is not None:
        triples = zip(prompts, plain, planned, strict=True)
        out.write_text("\n\n".join(f"## {q}\n\n# plain\n{a.text}\n\n# {b.plan}\n{b.text}" for q, a, b in triples))
    chosen = [prompts[i] for i in expanded]
    describe("plain", model, chosen, [plain[i] for i in expanded])
    describe("plan", model, chosen, [planned[i] for i in expanded])


def measure_times(model: Model, plan: Row, method: str, prompts: Sequence[str], tokens: int, rounds: int) -> None:
    """Answer each question by the plan and then plainly with as many tokens, one question at a time, in `rounds`; what
    comes first is not counted.
    """
    engine, plan_engine = model.engine(method, 1), model.plan_engine(method)
    times = list[tuple[Answer, float, Answer, float]]()
    for prompt in [prompts[0], *prompts * rounds]:

        def planned(prompt: str = prompt) -> Answer:
            run = model.plan_run(prompt, plan, max_new_tokens=tokens)
            (completion,) = plan_engine.complete([run])
            return Answer.from_completion(completion, plan_engine.engine, plan=run.report)

        by_plan = timed(planned)

        def plain(prompt: str = prompt, most: int = by_plan[0].statistics.new_tokens) -> Answer:
            (completion,) = engine.complete([model.request(prompt, max_new_tokens=most)])
            return Answer.from_completion(completion, engine)

        if by_plan[0].plan is not None and by_plan[0].plan.outcome == "expanded":
            times.append((*timed(plain), *by_plan))
    times = times[1:]
    median = statistics.median
    passes = median(b.statistics.new_tokens / b.plan.passes for _, _, b, _ in times if b.plan is not None)
    rates = [(a.statistics.new_tokens / x, b.statistics.new_tokens / y) for a, x, b, y in times]
    print(f"{method}, {len(times)} answers: {passes:.2f} tokens per pass of the plan")
    print(f"tokens: {median(a.statistics.new_tokens for a, *_ in times)} plain, ", end="")
    print(f"{median(b.statistics.new_tokens for _, _, b, _ in times)} plan")
    print(f"tokens/s: {median(x for x, _ in rates):.0f} plain, {median(y for _, y in rates):.0f} plan, ", end="")
    ratios = sorted(y / x for x, y in rates)
    print(f"ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"seconds per answer: {median(x for _, x, _, _ in times):.2f} plain, {median(y for *_, y in times):.2f} plan")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--plan", default="skeleton")
    parser.add_argument("--methods", default="autoregressive,auto", help="methods to take times with")
    parser.add_argument("--times", type=int, default=0, help="take times with so many questions; 0: measure the texts")
    parser.add_argument("--points", type=int, default=0, help="most points of a skeleton")
    parser.add_argument("--rounds", type=int, default=1, help="how often times are taken with each question")
    parser.add_argument("--processor-time", action="store_true", help="for a machine that others use, with one thread")
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--out", type=Path, help="file for the texts")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.questions.read_text("utf-8").splitlines()]
    model = foretell.load(args.model)
    plan: Row = {"type": args.plan}
    plan |= {"router": "off"} if args.plan == "skeleton" and not args.times else {}
    plan |= {"max_points": args.points} if args.points else {}
    prompts = [r["prompt"] for r in rows if r["list"]]
    if args.times:
        for method in args.methods.split(","):
            measure_times(model, plan, method, prompts[: args.times], args.max_new_tokens, args.rounds)
        return
    if args.plan == "skeleton":
        measure_router(model, plan, rows)
    else:
        for method in args.methods.split(","):
            measure_cache(model, plan, method, prompts, args.max_new_tokens)
    measure_texts(model, plan, prompts, args.max_new_tokens, args.out)


if __name__ == "__main__":
    main()
