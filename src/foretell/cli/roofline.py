"""`foretell roofline`: predict before you run."""

import json
import os
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from foretell.cli.errors import print_error, report_errors
from foretell.roofline import ask, calibrate, report
from foretell.roofline.analysis import Model, analyse
from foretell.roofline.changes import cost_changes
from foretell.roofline.describe import built_in, find
from foretell.roofline.figures import FIGURES, figure
from foretell.roofline.formats import parse
from foretell.roofline.hardware import devices, read_file, tier, user_file
from foretell.roofline.offload import Offload, offloaded
from foretell.roofline.plan import plan
from foretell.roofline.setting import FUSIONS, STAGES, Setting
from foretell.roofline.speculate import MOST_NODES
from foretell.roofline.sweep import parse_axis, sweep
from foretell.roofline.table1 import table1
from foretell.roofline.viewer.page import page
from foretell.roofline.viewer.server import serve


class Spoken(TyperGroup):
    """A command group that turns a refusal into one sentence and a non-zero exit, also where it runs by itself."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with report_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Spoken,
    no_args_is_help=True,
    help="Predict cost and speed-up from a model's configuration, before anything runs.",
    pretty_exceptions_enable=False,
)

ModelName = Annotated[str, typer.Argument(help="Built-in name, hub id, config.json, its directory, or a GGUF file.")]
Device = Annotated[
    str,
    typer.Option(
        "--hardware", "-H", help="Device; see `foretell roofline hardware`; `custom` takes the next options alone."
    ),
]
DeviceFile = Annotated[Path | None, typer.Option("--hardware-file", help="TOML file with more devices.")]
Bandwidth = Annotated[float | None, typer.Option(help="Memory bandwidth in GB/s, in place of the device's.")]
Peak = Annotated[float | None, typer.Option(help="16-bit peak in 1e12 OPs/s; the other peaks follow in proportion.")]
Capacity = Annotated[float | None, typer.Option(help="Memory in GB, in place of the device's.")]
StageName = Annotated[str, typer.Option(help=f"One of {', '.join(STAGES)}.")]
Batch = Annotated[int, typer.Option("--batch", "-b", help="Sequences.")]
Context = Annotated[
    int, typer.Option("--context", "-s", help="Cached tokens; for prefill, chunked and chat the prompt.")
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", help="verify: tokens per sequence, root included.")]
Bits = Annotated[
    str, typer.Option(help="Format: 1 to 16, 32, fp8, fp4; 4g128 counts a scale per 128, 4g128z a zero point too.")
]
FusionName = Annotated[
    str, typer.Option(help=f"One of {', '.join(FUSIONS)}: flash fuses attention, full also element-wise work.")
]
Devices = Annotated[int, typer.Option("--devices", help="Devices that share every layer (tensor parallelism).")]
Axes = Annotated[
    list[str] | None, typer.Option("--sweep", help="batch=1:256, context=128:65536*2, weights=16,8,4; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


def emit(records: list[dict[str, Any]], as_json: bool, as_csv: bool, title: str = "") -> None:
    """Print records in the form asked for."""
    check_form(as_json, as_csv)
    if as_json:
        typer.echo(json.dumps(records, indent=1))
    elif as_csv:
        typer.echo(report.to_csv(records), nl=False)
    else:
        out = console()
        out.print(report.plain_table(records, out.width, title))


def check_form(as_json: bool, as_csv: bool) -> None:
    """One form of output at a time.

    Raises:
        ValueError: two were asked for.
    """
    if as_json and as_csv:
        raise ValueError("--json and --csv were given; leave out one of them")


_PIPED_WIDTH = 160
"""Columns of a table that no terminal and no COLUMNS limits."""


def console() -> Console:
    """Where tables go: as wide as the terminal or COLUMNS says."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=_PIPED_WIDTH)


def warn(sentence: str | None) -> None:
    """Say what is wrong with the setting and leave with a non-zero status."""
    if sentence:
        print_error(sentence)
        raise typer.Exit(1)


@app.command()
def analyze(
    model: ModelName,
    hardware: Device = "a6000",
    hardware_file: DeviceFile = None,
    bandwidth: Bandwidth = None,
    peak: Peak = None,
    capacity: Capacity = None,
    stage: StageName = "decode",
    batch: Batch = 1,
    context: Context = 1024,
    tokens: Tokens = 8,
    chunk: Annotated[int, typer.Option(help="chunked: tokens of the prompt per pass.")] = 512,
    generate: Annotated[int, typer.Option(help="chat: tokens generated after the prompt.")] = 256,
    weights: Bits = "16",
    activations: Bits = "16",
    kv: Bits = "16",
    fusion: FusionName = "flash",
    number: Devices = 1,
    square: Annotated[bool, typer.Option("--square", help="Count causal attention as the full square.")] = False,
    over: Axes = None,
    offload: Annotated[str | None, typer.Option(help="Parts kept outside the device, as weights=1,kv=0.5.")] = None,
    tier_name: Annotated[str, typer.Option("--tier", help="Where to: ddr, ddr-server, nvme.")] = "ddr",
    compute: Annotated[str, typer.Option("--offload-compute", help="device or host.")] = "device",
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Price every operation of a pass; totals, memory, and what still fits."""
    check_form(as_json, as_csv)
    on, target = ask.device(hardware, hardware_file, bandwidth, peak, capacity), Model(*find(model))
    w, a, cache = parse(weights), parse(activations), parse(kv)
    asked = Setting(
        ask.stage(stage), batch, context, tokens, chunk, generate, w, a, cache, ask.fusion(fusion), number, square
    )
    if over:
        found = sweep(target, on, asked, dict(parse_axis(o) for o in over))
        emit(report.sweep_records(found, on.capacity), as_json, as_csv, f"{target.name} on {on.title}, {stage}")
        return
    answer = analyse(target, on, asked)
    away = None
    if offload is not None:
        away = offloaded(
            answer, Offload(tier(tier_name), *ask.offloaded_parts(offload), compute), devices(hardware_file)
        )
    if as_json:
        typer.echo(json.dumps(report.record(answer) | ({"offload": vars(away)} if away else {}), indent=1))
    elif as_csv:
        typer.echo(report.to_csv([report.line_record(line) for line in answer.lines]), nl=False)
    else:
        out = console()
        operations = report.fitted(report.operations_table(answer), out.width, report.OPERATIONS_DISPENSABLE)
        out.print(operations, "", report.totals_table(answer), *([report.offload_text(away)] if away else []))
    warn(report.too_big(answer, away))


@app.command("plan")
def plan_command(
    model: ModelName,
    hardware: Device = "a100-80g",
    hardware_file: DeviceFile = None,
    bandwidth: Bandwidth = None,
    peak: Peak = None,
    capacity: Capacity = None,
    batch: Batch = 1,
    context: Context = 1024,
    weights: Bits = "16",
    activations: Bits = "16",
    kv: Bits = "16",
    fusion: FusionName = "flash",
    number: Devices = 1,
    method: Annotated[list[str] | None, typer.Option(help="Only these methods; repeatable.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, in place of the smallest of the family.")] = None,
    accept: Annotated[
        float | None, typer.Option(help="Probability that the first drafted choice stands, for every method.")
    ] = None,
    acceptance: Annotated[Path | None, typer.Option(help="JSON file of measured acceptance by method.")] = None,
    nodes: Annotated[int, typer.Option(help="Largest tree, root included.")] = MOST_NODES,
    curve: Annotated[
        bool, typer.Option("--curve", help="Speed-up at batch 1 to 256 and where each method stops paying.")
    ] = False,
    share: Annotated[float, typer.Option(help="Layers run by early exit and layer skipping.")] = 0.5,
    density: Annotated[float, typer.Option(help="Feed-forward needed per token under contextual sparsity.")] = 0.2,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Rank decoding methods by predicted gain, and say when not to speculate."""
    check_form(as_json, as_csv)
    on, target = ask.device(hardware, hardware_file, bandwidth, peak, capacity), Model(*find(model))
    other, chosen = Model(*find(draft)) if draft else None, ask.methods(method, accept, acceptance)
    w, a, cache = parse(weights), parse(activations), parse(kv)
    asked = Setting(
        "decode", batch, context, weights=w, activations=a, kv=cache, fusion=ask.fusion(fusion), devices=number
    )
    if curve:
        emit(
            ask.curves(target, on, asked, chosen, other),
            as_json,
            as_csv,
            f"{target.name} on {on.title}, context {context}: speed-up by batch",
        )
        return
    answer, changes = plan(target, on, asked, chosen, other, nodes), cost_changes(target, on, asked, share, density)
    if as_json:
        typer.echo(json.dumps(report.plan_record(answer, changes), indent=1))
    elif as_csv:
        typer.echo(report.to_csv(report.plan_records(answer)), nl=False)
    else:
        out = console()
        ranking = report.fitted(report.plan_table(answer), out.width, report.PLAN_DISPENSABLE)
        cheaper = report.fitted(report.changes_table(changes), out.width, ("OPs", "bytes"))
        out.print(f"[bold]{answer.advice}[/]", "", ranking, "", cheaper)
        for name, why in answer.refused.items():
            typer.echo(f"left out {name}: {why}")
    warn(report.too_big(analyse(target, on, asked)))


@app.command("table1")
def table1_command(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """Table 1 of the survey: Llama-2-7b on an A6000, 2048 tokens, with our exact counts in the last two columns."""
    emit(
        report.table1_records(table1()),
        as_json,
        as_csv,
        "Table 1 of arXiv 2402.16363: Llama-2-7b, RTX A6000, 2048 tokens, batch 1",
    )


@app.command("figure")
def figure_command(
    number: Annotated[int, typer.Argument(help=f"Figure of the survey: {', '.join(map(str, FIGURES))}.")],
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg, .pdf); the data go beside it as .csv.")],
) -> None:
    """Draw a figure of the survey from our own numbers, and write its data as CSV."""
    from foretell.roofline.plots import draw

    check_folder(out)
    drawn = figure(number)
    draw(drawn, out)
    out.with_suffix(".csv").write_text(report.to_csv(drawn.records), "utf-8")
    typer.echo(f"{drawn.title}: {out} and {out.with_suffix('.csv')}\n{drawn.note}")


Extra = Annotated[
    list[str] | None, typer.Option("--model", help="A model of your own beside the built-in ones; repeatable.")
]


@app.command()
def view(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 8712,
    model: Extra = None,
    hardware_file: DeviceFile = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Show the analyzer as a local page."""
    known, extra = devices(hardware_file), [Model(*find(m)) for m in model or ()]
    server = serve(lambda: page(known, extra), port)
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    typer.echo(f"{address} (stop with Ctrl+C)")
    if browser:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("stopped")
    finally:
        server.server_close()


def check_folder(out: Path) -> None:
    """The folder of a file to write must be there.

    Raises:
        ValueError: it is not.
    """
    if not out.parent.is_dir():
        raise ValueError(f"there is no directory {out.parent} to write {out.name} to")


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="HTML file to write.")],
    model: Extra = None,
    hardware_file: DeviceFile = None,
) -> None:
    """Write the analyzer as one HTML file that opens from disk."""
    check_folder(out)
    text = page(devices(hardware_file), [Model(*find(m)) for m in model or ()])
    out.write_text(text, "utf-8")
    typer.echo(f"{out}: {len(text.encode()) / 1e6:.1f} MB")


@app.command()
def models(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the built-in models."""
    emit(
        [report.model_record(Model(*find(name)), str(raw["source"])) for name, raw in built_in().items()],
        as_json,
        as_csv,
    )


@app.command("hardware")
def hardware_command(hardware_file: DeviceFile = None, as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the known devices and where their figures come from."""
    emit([report.hardware_record(h) for h in devices(hardware_file).values()], as_json, as_csv)


@app.command("calibrate")
def calibrate_command(
    name: Annotated[str, typer.Option(help="Name of the new hardware entry.")] = "this-machine",
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16, int8 or float32; repeatable. Default: bfloat16 and int8.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Hardware file to add to; by default the user's own.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads to use; by default those torch uses.")] = None,
    repeat: Annotated[int, typer.Option(help="Timings of a pass without a faster one that end its measurement.")] = 10,
    force: Annotated[
        bool, typer.Option("--force", help="Measure although other programs keep the machine busy.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Then predict and measure the embedded model.")
    ] = True,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Measure this machine, add it as hardware, and hold predictions against the embedded model's real passes."""
    import torch

    from foretell.bench.machine import read_bandwidth
    from foretell.cli import roofline_machine as machine
    from foretell.cli.setup import set_threads

    set_threads(threads)
    forms = {precision: machine.form(precision) for precision in dtype or ["bfloat16", "int8"]}
    disturbed = machine.disturbance()
    if disturbed and not force:
        raise ValueError(f"{disturbed}, so the figures would be too low; calibrate while it is idle, or add --force")
    fits = {
        f.name: calibrate.fit(calibrate.sample(machine.probes(precision, repeat))) for precision, f in forms.items()
    }
    file, title, source = out or user_file(), machine.title(), machine.source()
    if disturbed:
        source += f"; while {disturbed}"
    here = calibrate.hardware(name.lower(), title, source, read_bandwidth(torch.device("cpu")), machine.memory(), fits)
    calibrate.add_to_file(file, here, read_file(file) if file.is_file() else {})
    typer.echo(f"{here.title}: {here.bandwidth / 1e9:.1f} GB/s; added as {name.lower()!r} to {file}", err=True)
    if not compare:
        return
    rows = []
    for precision, form in forms.items():
        measure, config = machine.embedded(precision, repeat)
        checks = calibrate.check(Model("smollm2-135m", config), here, form, measure)
        rows += [report.check_record(precision, c) for c in checks]
        typer.echo(report.check_summary(precision, checks), err=True)
    emit(rows, as_json, as_csv, "Predicted and measured passes of the embedded model")


if __name__ == "__main__":
    app(prog_name="foretell roofline")
