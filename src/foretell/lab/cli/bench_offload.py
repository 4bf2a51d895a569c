"""`foretell bench offload`: the block schedule of FlexGen, searched and run."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from foretell.api import Model
from foretell.bench.questions import BUILT_IN
from foretell.cli import options
from foretell.cli.bench.inputs import (
    Categories,
    Length,
    ModelName,
    PerCategory,
    Tasks,
    Threads,
    load_selected_questions,
)
from foretell.cli.setup import set_threads
from foretell.lab.tune.block_schedule import BlockRun, Policy, measure_cost, run_blocks, search
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.model.offload.block_store import OffloadedDecoder


def offload(
    memory: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Most memory for weights, keys and values together.")
    ],
    model: ModelName = DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    bandwidth: Annotated[
        float | None, typer.Option(metavar="MB", min=0.001, help="Read at most so many MB of weights per second.")
    ] = None,
    most_rows: Annotated[int, typer.Option(metavar="N", min=1, help="Most requests that share a reading.")] = 32,
    tasks: Tasks = BUILT_IN,
    categories: Categories = "",
    per_category: PerCategory = None,
    max_new_tokens: Length = 32,
    threads: Threads = None,
    as_json: options.Json = False,
) -> None:
    """Choose how many requests share every reading of the weights, and how many blocks their keys and values leave room
    for, by a search over measured costs (FlexGen); run the choice beside the schedule row by row and powers of two.

    Requests have one length: prompts are cut to the shortest one, and answers do not end early.

    foretell bench offload --memory 64 --bandwidth 200 --threads 1
    """
    set_threads(threads)
    questions = load_selected_questions(tasks, per_category, categories)[1].questions
    console = Console(stderr=True)

    def loaded(limit: int) -> Model:
        opened = load(model, dtype, memory_limit=limit)
        if bandwidth is not None and isinstance(opened.network, OffloadedDecoder):
            opened.network.store.bandwidth = 1e6 * bandwidth
        return opened

    with console.status("measuring"):
        first = loaded(memory << 20)
        prompts = [first.tokens(q.turns[0]) for q in questions]
        length, most = min(map(len, prompts)), min(most_rows, len(prompts))
        prompts = [p[-length:] for p in prompts]
        cost = measure_cost(first, prompts[0], most, max_new_tokens)
        policies = search(cost, memory << 20, most)
    if not policies:
        raise ValueError(
            f"--memory {memory}: one request's keys and values ({cost.row_bytes:,} bytes) leave no room for a block "
            f"beside the {cost.fixed_bytes:,} bytes of weights that always stay"
        )
    best = max(policies, key=lambda policy: policy.tokens_per_second(len(prompts)))
    results = list[tuple[Policy, BlockRun]]()
    for policy in policies:
        if policy.rows & (policy.rows - 1) == 0 or policy is best:
            with console.status(f"{policy.rows} rows"):
                opened = loaded((memory << 20) - policy.cache_bytes)
                results.append((policy, run_blocks(opened, prompts, policy, max_new_tokens)))
    if as_json:
        runs = [{"policy": asdict(p), "run": asdict(r)} for p, r in results]
        typer.echo(json.dumps({"cost": asdict(cost), "chosen_rows": best.rows, "runs": runs}))
        return
    table, count, plain = Table(box=None), len(prompts) * max_new_tokens, results[0][1]
    for name in (
        "rows", "blocks in memory", "MB read per token", "forecast", "ms per pass", "forecast", "tokens/s", "forecast",
        "same tokens",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for policy, run in results:
        same = sum(a == b for a, b in zip(run.tokens, plain.tokens, strict=True))
        table.add_row(
            f"{policy.rows}{' (chosen)' * (policy is best)}",
            f"{policy.resident_blocks} of {len(cost.sizes)}",
            f"{run.read_bytes / count / 1e6:.2f}",
            f"{policy.bytes_per_token(len(prompts)) / 1e6:.2f}",
            f"{1e3 * run.pass_seconds:.1f}",
            f"{1e3 * policy.seconds:.1f}",
            f"{count / run.seconds:.1f}",
            f"{policy.tokens_per_second(len(prompts)):.1f}",
            f"{same} of {len(prompts)} answers",
        )
    Console(width=140).print(table)
    typer.echo(
        f"{len(prompts)} requests of {length} + {max_new_tokens} tokens; {cost.row_bytes / 2**20:.2f} MiB of keys and "
        f"values each; weights were read at {cost.bandwidth / 1e6:,.0f} MB/s"
    )
