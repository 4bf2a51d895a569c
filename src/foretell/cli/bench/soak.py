"""`foretell bench soak`: a server under mixed load for a long time."""

import os
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.soak import Soak, SoakPlan, SoakSample, kinds_table, verdict
from foretell.bench.soak_client import TIMEOUT, BusyError, SoakError, find_target
from foretell.bench.soak_histories import histories_table, run_histories
from foretell.utils.paths import require_file_place

API_KEY_VARIABLE = "FORETELL_API_KEY"


def soak(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of a `foretell serve`.")] = "http://127.0.0.1:8000",
    minutes: Annotated[float, typer.Option(metavar="N", min=0.01, help="Length of the load.")] = 10.0,
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="Clients at a time.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="New tokens per answer.")] = 48,
    max_growth: Annotated[
        float, typer.Option(metavar="SHARE", min=0, help="Growth of memory from which on the server has failed.")
    ] = 0.02,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Without a byte after which a request has failed. Raise it on a busy machine.",
        ),
    ] = TIMEOUT,
    histories: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="After the load, also compare the speed of ten requests before and after hostile histories: N answers "
            "of one or two tokens, N greedy and N sampled ones, a burst of 64, a pause of a minute. 0: do not.",
        ),
    ] = 0,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this file too.")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help=f"API key of the server; otherwise ${API_KEY_VARIABLE}.")
    ] = None,
) -> None:
    """Load a server with good and bad requests and with clients that leave in every phase, and watch it.

    Watched are errors, answers that differ from the first one to the same request, requests and rows of the cache that
    are left over, open files, and memory (the cache of keys and values apart, which grows until it is full). The status
    is 1 if the server has failed.

        foretell bench soak http://127.0.0.1:8000 --minutes 120
    """
    require_file_place(output)
    key = api_key or os.environ.get(API_KEY_VARIABLE, "").partition(",")[0]
    plan = SoakPlan(60 * minutes, clients, max_growth=max_growth)

    def report(sample: SoakSample) -> None:
        memory = f"{sample.resident / 1e6:.0f} MB, {sample.rest / 1e6:.0f} without the cache"
        typer.echo(f"{sample.seconds / 60:.1f} min: {sample.requests} requests, {memory}", err=True)

    target = find_target(url, key, max_new_tokens, timeout)
    soak_report = Soak(target, plan).run(report)
    text = f"{soak_report.table().markdown()}\n{kinds_table(soak_report).markdown()}\n{verdict(soak_report)}\n"
    if histories:
        try:
            results = run_histories(target, histories, lambda name: typer.echo(name, err=True))
        except (SoakError, BusyError) as error:
            raise ValueError(f"the histories ended: {error or 'the server refuses requests because of load'}") from None
        text += f"\n{histories_table(results).markdown()}"
    if output is not None:
        output.write_text(text)
    typer.echo(text, nl=False)
    if soak_report.problems():
        raise typer.Exit(1)
