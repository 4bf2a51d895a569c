"""A target that does not fit in memory: peak resident memory and blocks read per token, with and without drafts
(LLMCad, arXiv 2309.04255).

Every configuration runs in its own process. Without `--draft-model`, the target's blocks that stay in memory are the
draft model, which needs no further memory; a trained draft model drafts better.

    python examples/memory_limit.py --limit-mb 60 --tokens 48
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
from foretell.model.offload.block_store import OffloadedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import LLMCadTree

CONFIGURATIONS = ("whole, plain", "limited, plain", "limited, suffix", "limited, llmcad")
TEXT = "Here is a list of the months with their number of days: January 31, February 28, March 31, April"


def resident_mb(peak: bool) -> float:
    """Resident memory of this process now, or its peak since `reset_peak`, in MiB."""
    wanted = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(wanted))


def reset_peak() -> None:
    """Set the peak to the present resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def build_method(configuration: str, model: Model, draft: str | None) -> AnyMethod:
    """The method of a configuration."""
    if configuration.endswith("plain"):
        return model.method("autoregressive")
    if configuration.endswith("suffix"):
        return model.method("suffix")
    if draft is not None:
        return model.method("llmcad", drafts=[load(draft)])
    assert isinstance(model.network, OffloadedDecoder)
    inner = model.network.first_layers(max(1, model.network.store.resident_blocks))
    return Method(DraftModel(DecoderRunner(inner)), LLMCadTree(8), Match())


def measure(configuration: str, name: str, draft: str | None, limit: int, tokens: int) -> dict[str, float | str]:
    """Decode with one configuration in this process."""
    before = resident_mb(peak=False)
    model = load(name, memory_limit=None if configuration.startswith("whole") else limit)
    method = build_method(configuration, model, draft)
    gc.collect()
    reset_peak()
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
    """Compare all configurations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--limit-mb", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--configuration", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.configuration is not None:
        limit = options.limit_mb * 2**20
        print(json.dumps(measure(options.configuration, options.model, options.draft_model, limit, options.tokens)))
        return
    print(f"{'':18}{'peak MB':>9}{'tokens/pass':>13}{'blocks read/token':>19}{'seconds':>9}  same text")
    plain = None
    for configuration in CONFIGURATIONS:
        command = [sys.executable, *sys.argv, "--configuration", configuration]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(run.stderr.strip().splitlines()[-1])
        r = json.loads(run.stdout.splitlines()[-1])
        plain = r["text"] if plain is None else plain
        same = "yes" if r["text"] == plain else "no: rounding decided a tie differently"
        numbers = f"{r['peak_mb']:9.0f}{r['tokens_per_pass']:13.2f}{r['blocks_per_token']:19.1f}{r['seconds']:9.1f}"
        print(f"{configuration:18}{numbers}  {same}")


if __name__ == "__main__":
    main()
