"""`foretell roofline load`: requests that arrive over time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.roofline_options import (
    AsCsv,
    AsJson,
    Device,
    ModelName,
    check_output_options,
    print_records,
)
from foretell.roofline import cli_inputs, records
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.arrivals import (
    LoadComparison,
    advice,
    drafts_text,
    load_costs,
    poisson_requests,
    read_trace,
    simulate,
)
from foretell.roofline.cli_inputs import GivenDevice, GivenWorkload
from foretell.roofline.method_profiles import find_method
from foretell.roofline.model_configs import own_formats


class SimulationProgress:
    """A progress bar over the requests of several simulations, and a sentence if they will take minutes."""

    def __init__(self, total: int) -> None:
        self._total, self._before, self._now, self._told = total, 0, 0, False
        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("simulating", total=total)
        self._started = time.monotonic()

    def __enter__(self) -> "SimulationProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self) -> Callable[[int], None]:
        """Begin the next simulation; what is returned takes the number of its requests that are answered."""
        self._before = self._now
        return self._update

    def _update(self, answered: int) -> None:
        if (now := self._before + answered) == self._now:
            return
        self._now = now
        self._bar.update(self._task, completed=now)
        took = time.monotonic() - self._started
        left = took * (self._total / now - 1)
        if not self._told and took > TELL_AFTER and left > LONG:
            self._told = True
            self._bar.console.print(
                f"The simulation of {self._total:,} requests takes about {left / 60:.0f} minutes more; fewer "
                "--requests or a shorter --trace take less.",
                highlight=False,
            )


TELL_AFTER, LONG = 3.0, 60.0
"""Seconds after which the rest of a simulation is estimated, and from which it is called long."""


@options.with_settings(GivenDevice(), "device", ("hardware_file", "runtime"))
@options.with_settings(GivenWorkload(), "sizes", ("weights", "activations", "kv", "devices"))
def load_command(
    ctx: typer.Context,
    model: ModelName,
    hardware: Device = "h100-sxm",
    device: options.Settings = options.NO_SETTINGS,
    sizes: options.Settings = options.NO_SETTINGS,
    rate: Annotated[str, typer.Option(help="Requests a second, one or several: 1,4,16.")] = "1,2,4,8,16",
    trace: Annotated[Path | None, typer.Option(help="CSV with arrival, prompt, output, in place of --rate.")] = None,
    requests: Annotated[int, typer.Option(help="Requests of each rate.")] = 300,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    output: Annotated[int, typer.Option(help="Mean tokens of an answer.")] = 200,
    running: Annotated[int, typer.Option(help="Most requests in a pass.")] = 256,
    method: Annotated[str, typer.Option(help="Drafts of this method.")] = "eagle3",
    draft: Annotated[str | None, typer.Option(help="Draft model, in place of the smallest of the family.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="A chain of so many drafted tokens; 3 if no --tree is given.")
    ] = None,
    tree: Annotated[str | None, typer.Option(help="A tree of drafted nodes x depth, as 60x6.")] = None,
    tau: Annotated[float | None, typer.Option(help="Tokens per pass that it yields; by default as published.")] = None,
    draft_devices: Annotated[
        int | None, typer.Option(help="Devices that share the draft model; by default as --devices.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Most tokens of prompts in a pass.")] = 2048,
    ttft: Annotated[float, typer.Option(help="Seconds to the first token that count for the goodput.")] = 1.0,
    tpot: Annotated[float, typer.Option(help="Seconds per further token that count for the goodput.")] = 0.05,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Simulate requests that arrive over time: latencies and goodput without and with drafts."""
    check_output_options(as_json, as_csv)
    refuse_unused(ctx, ("rate", "requests", "output"), "--trace names the requests", trace is not None)
    on = GivenDevice(**device).named(hardware)
    target, draft_model = AnalyzedModel.named(model), AnalyzedModel.named(draft) if draft else None
    shape = cli_inputs.parse_shape(3 if tokens is None and tree is None else tokens, tree, tau)
    workload = GivenWorkload(**sizes, context=prompt).of_stage("decode", own_formats(model))
    assert shape is not None
    profile = find_method(method)
    plain, drafted = load_costs(profile, target, on, workload, shape, draft_model, draft_devices)
    loads = (
        [read_trace(trace)]
        if trace
        else [poisson_requests(each, requests, prompt, output) for each in cli_inputs.parse_rates(rate)]
    )
    compared = list[LoadComparison]()
    with SimulationProgress(2 * sum(map(len, loads))) as progress:
        for load in loads:
            results = [
                simulate(load, costs, running, prompt_tokens, ttft, tpot, finished=progress.start())
                for costs in (plain, drafted)
            ]
            compared.append(LoadComparison(*results))
    if not as_json and not as_csv:
        typer.echo(advice(compared))
    drafts = drafts_text(profile.name, drafted)
    units = "rates and goodput in requests/s, times in seconds, speedup: of the mean latency"
    title = f"{target.name} on {on.title}: {drafts}; {units}"
    print_records([records.load_record(c) for c in compared], as_json, as_csv, title)
