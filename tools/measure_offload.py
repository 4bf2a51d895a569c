"""FlexGen's block schedule (arXiv 2303.06865), searched and run under one limit of memory for weights, keys and values.

    python tools/measure_offload.py --memory 64 --bandwidth 200 --threads 1

A search over measured costs chooses how many requests share every reading of the weights, and so how many blocks their
keys and values leave room for. The choice runs beside the schedule row by row and powers of two. Requests have one
length: prompts are cut to the shortest one, and answers do not end early.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from block_schedule import BlockRun, PassCost, Policy, measure_cost, run_blocks, search

from foretell.api import Model
from foretell.bench.questions import BUILT_IN, load_questions
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.model.offload.block_store import OffloadedDecoder


def measure(given: argparse.Namespace) -> tuple[PassCost, Policy, list[tuple[Policy, BlockRun]]]:
    """Measured costs, the policy that the search chose, and the runs.

    Raises:
        ValueError: the limit is too small or too large.
    """
    memory = given.memory << 20

    def loaded(limit: int) -> Model:
        opened = load(given.model, given.dtype, memory_limit=limit)
        if given.bandwidth and isinstance(opened.network, OffloadedDecoder):
            opened.network.store.bandwidth = 1e6 * given.bandwidth
        return opened

    first = loaded(memory)
    prompts = [first.tokens(q.turns[0]) for q in load_questions(given.tasks).select(given.per_category).questions]
    length, most = min(map(len, prompts)), min(given.most_rows, len(prompts))
    prompts = [p[-length:] for p in prompts]
    cost = measure_cost(first, prompts[0], most, given.tokens)
    policies = search(cost, memory, most)
    if not policies:
        raise ValueError(
            f"--memory {given.memory}: one request's keys and values ({cost.row_bytes:,} bytes) leave no room for a "
            f"block beside the {cost.fixed_bytes:,} bytes of weights that always stay"
        )
    best = max(policies, key=lambda policy: policy.tokens_per_second(len(prompts)))
    tried = [p for p in policies if p.rows & (p.rows - 1) == 0 or p is best]
    return cost, best, [(p, run_blocks(loaded(memory - p.cache_bytes), prompts, p, given.tokens)) for p in tried]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, required=True, help="MiB for weights, keys and values together")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--bandwidth", type=float, help="read at most so many MB of weights per second")
    parser.add_argument("--most-rows", type=int, default=32, help="most requests that share a reading")
    parser.add_argument("--tasks", default=BUILT_IN, help="questions, as those of `foretell bench run`")
    parser.add_argument("--per-category", type=int, default=4, help="questions of each category")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of every answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        cost, best, results = measure(given)
    except ValueError as error:
        sys.exit(str(error))
    if given.json:
        runs = [{"policy": asdict(p), "run": asdict(r)} for p, r in results]
        print(json.dumps({"cost": asdict(cost), "chosen_rows": best.rows, "runs": runs}))
        return
    plain = results[0][1].tokens
    print("| rows | blocks in memory | MB per token | forecast | ms per pass | forecast | tokens/s | forecast | same |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for policy, run in results:
        count, requests = sum(map(len, run.tokens)), len(run.tokens)
        ran = replace(policy, seconds=run.pass_seconds)
        same = sum(a == b for a, b in zip(run.tokens, plain, strict=True))
        print(
            f"| {policy.rows}{' (chosen)' * (policy is best)} | {policy.resident_blocks} of {len(cost.sizes)} | "
            f"{run.read_bytes / count / 1e6:.2f} | {policy.bytes_per_token(requests) / 1e6:.2f} | "
            f"{1e3 * run.pass_seconds:.0f} | {1e3 * policy.seconds:.0f} | {ran.tokens_per_second(requests):.1f} | "
            f"{policy.tokens_per_second(requests):.1f} | {same} of {requests} |"
        )
    print(f"{cost.row_bytes / 2**20:.2f} MiB of keys and values per row; read at {cost.bandwidth / 1e6:,.0f} MB/s")


if __name__ == "__main__":
    main()
