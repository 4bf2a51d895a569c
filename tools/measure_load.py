"""Measures what methods gain where several requests are decoded at once, in one process.

    python tools/measure_load.py spec_bench_dev.jsonl --requests 1,4,16 --seconds 60 --temperature 0.7 --top-p 0.9

Each method has an engine and a queue of the first turns of the questions, never empty. The engines run in turn, for a
tenth of a second each, so that what else the machine does touches all of them alike. What a request takes to be read
counts in "tokens/s", and not in "decoding", the steps that read no prompt.
"""

import argparse
import itertools
import time
from dataclasses import dataclass, field, replace

import torch

import foretell
from foretell import SamplingParams
from foretell.api import Model
from foretell.bench.questions import load_questions
from foretell.engine.engine import Engine
from foretell.engine.pass_times import PassTimes

_TURN = 0.1
"""Seconds."""


@dataclass
class Queue:
    """An engine whose requests never run out, and what it did."""

    engine: Engine
    model: Model
    prompts: list[str]
    params: SamplingParams
    rows: int
    new_tokens: int
    asked: int = 0
    seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    expected: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Tokens of these steps that the budget expected, and their seconds over those of a plain step."""

    def turn(self, seconds: float) -> None:
        """Run for so long."""
        started = now = time.perf_counter()
        while now - started < seconds:
            while sum(self.engine.load) < self.rows:
                self._ask()
            tokens = sum(len(update.tokens) for update in self.engine.step())
            took, now = time.perf_counter() - now, time.perf_counter()
            self.seconds, self.tokens = self.seconds + took, self.tokens + tokens
            if not self.engine.last_step.counts.reads_prompt:
                self.decode_seconds += took
                self.decode_tokens += tokens
                self.decode_steps += 1
                last = self.engine.budget.last
                self.expected[0] += last.tokens or 0.0
                self.expected[1] += last.seconds / last.plain_seconds

    def forget(self) -> None:
        """Begin to count."""
        self.seconds = self.decode_seconds = 0.0
        self.tokens = self.decode_tokens = self.decode_steps = 0
        self.expected = [0.0, 0.0]

    def _ask(self) -> None:
        prompt = self.prompts[self.asked % len(self.prompts)]
        params = replace(self.params, seed=self.asked)
        request = self.model.request([{"role": "user", "content": prompt}], params, max_new_tokens=self.new_tokens)
        # A salt of its own: no request lives on what another one has read.
        self.engine.submit(replace(request, cache_salt=str(self.asked)))
        self.asked += 1


def measure(model: Model, options: argparse.Namespace, prompts: list[str], rows: int) -> None:
    """Print a line per method."""
    params, queues = SamplingParams(temperature=options.temperature, top_p=options.top_p), dict[str, Queue]()
    for method in options.methods.split(","):
        model.pass_times = PassTimes(expected=model.usual_passes)
        engine = model.engine(method, rows=rows)
        queues[method] = Queue(engine, model, prompts, params, rows, options.max_new_tokens)
    started, names = time.perf_counter(), itertools.cycle(queues)
    for queue in queues.values():
        queue.turn(1.0)
        queue.forget()
    while time.perf_counter() - started < options.seconds:
        for _ in queues:
            queues[next(names)].turn(_TURN)
        next(names)
    plain = next(iter(queues.values()))
    for name, q in queues.items():
        print(
            f"{rows:3} requests, {name}: {q.tokens / q.seconds:.0f} tokens/s "
            f"({q.tokens / q.seconds * plain.seconds / plain.tokens:.2f}), decoding "
            f"{q.decode_tokens / q.decode_seconds:.0f} "
            f"({q.decode_tokens / q.decode_seconds * plain.decode_seconds / plain.decode_tokens:.2f}, "
            f"forecast {q.expected[0] / q.expected[1] / rows:.2f}), "
            f"{q.decode_tokens / q.decode_steps / rows:.2f} tokens per request and pass",
            flush=True,
        )


def main() -> None:
    """Read the command line, and measure each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default="autoregressive,auto", help="the first one is what others are compared to")
    parser.add_argument("--requests", default="1,4,16,64")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each number of requests")
    parser.add_argument("--per-category", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = foretell.load(options.model)
    prompts = [q.turns[0] for q in load_questions(options.tasks).select(options.per_category).questions]
    for rows in map(int, options.requests.split(",")):
        measure(model, options, prompts, rows)


if __name__ == "__main__":
    main()
