"""A target that may not stay in memory: peak resident memory and blocks read per token, with and without drafts
(LLMCad, arXiv 2309.04255).

Every way runs in a process of its own. Without `--draft-model`, the blocks of the target that stay in memory draft for
it, which costs no memory at all; a small model trained for the purpose drafts better.

    python examples/memory_limit.py --limit-mb 120 --tokens 48
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

from foretell import load
from foretell.accept import Match
from foretell.api import Model
from foretell.draft import DraftModel
from foretell.engine.method import AnyMethod, Method
from foretell.model.offload import OffloadedDecoder
from foretell.model.runner import DecoderRunner
from foretell.shape import LLMCadTree

WAYS = ("whole, plain", "limited, plain", "limited, suffix", "limited, llmcad")
TEXT = "Here is a list of the months with their number of days: January 31, February 28, March 31, April"


def resident_mb(peak: bool) -> float:
    """Memory of this process that is resident now, or was at most since `forget_peak`."""
    wanted = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(wanted))


def forget_peak() -> None:
    """Start the peak anew at the present size (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def method_of(way: str, model: Model, draft: str | None) -> AnyMethod:
    """The method of one way to decode."""
    if way.endswith("plain"):
        return model.method("autoregressive")
    if way.endswith("suffix"):
        return model.method("suffix")
    if draft is not None:
        return model.method("llmcad", drafts=[load(draft)])
    assert isinstance(model.network, OffloadedDecoder)
    inner = model.network.first_layers(max(1, model.network.store.resident_blocks))
    return Method(DraftModel(DecoderRunner(inner)), LLMCadTree(8), Match())


def measure(way: str, name: str, draft: str | None, limit: int, tokens: int) -> dict[str, float | str]:
    """Decode in one way, in this process."""
    before = resident_mb(peak=False)
    model = load(name, memory_limit=None if way.startswith("whole") else limit)
    method = method_of(way, model, draft)
    gc.collect()
    forget_peak()
    store = model.network.store if isinstance(model.network, OffloadedDecoder) else None
    fetched = store.fetch_count if store else 0
    start = time.perf_counter()
    answer = model.generate(TEXT, method, max_new_tokens=tokens, raw=True)[0]
    seconds = time.perf_counter() - start
    return {
        "peak_mb": resident_mb(peak=True) - before,
        "tokens_per_pass": answer.statistics.tokens_per_pass,
        "blocks_per_token": ((store.fetch_count if store else 0) - fetched) / len(answer.tokens),
        "seconds": seconds,
        "text": answer.text,
    }


def main() -> None:
    """Compare all ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--limit-mb", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        found = measure(options.way, options.model, options.draft_model, options.limit_mb * 2**20, options.tokens)
        print(json.dumps(found))
        return
    print(f"{'':18}{'peak MB':>9}{'tokens/pass':>13}{'blocks read/token':>19}{'seconds':>9}  same text")
    plain = None
    for way in WAYS:
        run = subprocess.run([sys.executable, *sys.argv, "--way", way], capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(run.stderr.strip().splitlines()[-1])
        r = json.loads(run.stdout.splitlines()[-1])
        plain = r["text"] if plain is None else plain
        same = "yes" if r["text"] == plain else "no: a tie within rounding fell the other way"
        numbers = f"{r['peak_mb']:9.0f}{r['tokens_per_pass']:13.2f}{r['blocks_per_token']:19.1f}{r['seconds']:9.1f}"
        print(f"{way:18}{numbers}  {same}")


if __name__ == "__main__":
    main()
