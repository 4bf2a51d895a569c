"""Collective boost of two draft models beside one, with equal training: SpecInfer's boost-tuning (arXiv 2305.09781).

    python tools/measure_boost.py MODEL TEXT --set "one, 2N"=once --set "two apart"=first,apart \\
        --set "second boosted"=first,second

Tokens per pass of `specinfer` with each set of draft models, over beginnings of text with the same seeds, and those
over the first set's; intervals hold 95 % of 4,000 samples of the beginnings.
"""

import argparse
from pathlib import Path

import numpy as np

from foretell.core.sampling import SamplingParams
from foretell.engine.request import Request
from foretell.lab.reproduce.counts import Counts, Samples, Totals, bootstrap
from foretell.load import load

_ROWS, _SEEDS = 8, 2


def interval(samples: Samples) -> str:
    """A quantity with its 95 % interval."""
    low, high = np.quantile(samples[1:], (0.025, 0.975))
    return f"{samples[0]:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path, help="a file that no draft model was trained on")
    parser.add_argument("--set", action="append", required=True, metavar="NAME=DIR,...", dest="sets")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=10, help="num_draft_tokens")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = load(args.model)
    text = args.text.read_text("utf-8")
    codes = model.codec.encode(text[: 1 << 21], add_special_tokens=False)
    starts = [i * (len(codes) - 256) // args.prompts for i in range(args.prompts)]
    requests = [
        Request(
            codes[s : s + 96],
            SamplingParams(temperature=args.temperature, seed=args.seed + k),
            max_new_tokens=args.tokens,
        )
        for s in starts
        for k in range(_SEEDS)
    ]
    weights = bootstrap(args.prompts)
    first = None
    print("| drafts | tokens per pass | over the first | first draft accepted |\n|---|---:|---:|---:|")
    for name, _, folders in (given.rpartition("=") for given in args.sets):
        method = model.method("specinfer", {"num_draft_tokens": args.nodes}, drafts=list(map(Path, folders.split(","))))
        done = model.engine(method, rows=_ROWS).complete(requests)
        answers = [Counts.of(done[i : i + _SEEDS]) for i in range(0, len(done), _SEEDS)]
        totals = Totals.of(answers, weights)
        first = totals.per_pass if first is None else first
        cells = interval(totals.per_pass), interval(totals.per_pass / first), interval(totals.acceptance)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
