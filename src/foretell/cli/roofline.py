"""`foretell roofline`: predicted cost of forward passes and speed-up of decoding methods."""

import json
import os
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

from foretell.cli.errors import print_error, report_errors
from foretell.cli.options import split_commas
from foretell.cli.roofline_measured import read_measured
from foretell.roofline import calibrate, cli_inputs, report
from foretell.roofline.analysis import AnalyzedModel, analyse
from foretell.roofline.arrivals import LoadComparison, StepCosts, advice, poisson_requests, read_trace, simulate
from foretell.roofline.fit_runtime import refit
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import CALIBRATED, known_hardware, read_hardware_file, user_hardware_file
from foretell.roofline.measured import compare_measured, measured_workload
from foretell.roofline.method_profiles import find_method, with_draft_vocab
from foretell.roofline.model_configs import builtin_models, find_model
from foretell.roofline.model_variants import model_variants
from foretell.roofline.offload import apply_offload
from foretell.roofline.paper.figures import FIGURES, figure
from foretell.roofline.paper.table1 import table1
from foretell.roofline.plan import cost_of_profile, profiles_for, rank_methods
from foretell.roofline.published import compare_published, group_errors
from foretell.roofline.runtime import DEFAULT_RUNTIME, find_runtime, known_runtimes
from foretell.roofline.speculation import MAX_NODES, estimate_method
from foretell.roofline.sweep import parse_axis, sweep
from foretell.roofline.viewer.page import page
from foretell.roofline.viewer.server import serve
from foretell.roofline.workload import FUSIONS, STAGES, Workload


class ErrorReportingGroup(TyperGroup):
    """A command group that reports errors in one sentence and exits non-zero, also when run as a module."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with report_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    help="Predict cost and speed-up from a model's configuration and a device's data sheet.",
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
RuntimeName = Annotated[
    str,
    typer.Option("--runtime", help=f"What is reached of the data sheet: {', '.join(known_runtimes())}. Not for CPUs."),
]
Bandwidth = Annotated[float | None, typer.Option(help="Memory bandwidth in GB/s, in place of the device's.")]
Peak = Annotated[float | None, typer.Option(help="16-bit peak in 1e12 OPs/s; the other peaks follow in proportion.")]
Capacity = Annotated[float | None, typer.Option(help="Memory in GB, in place of the device's.")]
StageName = Annotated[str, typer.Option(help=f"One of {', '.join(STAGES)}.")]
Batch = Annotated[int, typer.Option("--batch", "-b", help="Number of sequences.")]
Context = Annotated[
    int, typer.Option("--context", "-s", help="Cached tokens; for prefill, chunked and chat the prompt.")
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", help="verify: tokens per sequence, root included.")]
Bits = Annotated[
    str, typer.Option(help="Format: 1 to 16, 32, fp8, fp4; 4g128 counts a scale per 128, 4g128z a zero point too.")
]
Head = Annotated[
    str | None, typer.Option(help="Format of embedding and LM head, as 16 in AWQ and GPTQ; by default as --weights.")
]
FusionName = Annotated[
    str, typer.Option(help=f"One of {', '.join(FUSIONS)}: flash fuses attention, full also element-wise work.")
]
Devices = Annotated[int, typer.Option("--devices", help="Devices that share every layer (tensor parallelism).")]
Axes = Annotated[
    list[str] | None, typer.Option("--sweep", help="batch=1:256, context=128:65536*2, weights=16,8,4; repeatable.")
]
OffloadParts = Annotated[
    str | None,
    typer.Option(
        "--offload", help="Parts in memory outside the device, as weights=1,kv=0.5; auto: the weights that do not fit."
    ),
]
OffloadTier = Annotated[str, typer.Option("--tier", help="Memory tier of --offload: ddr, ddr-server, nvme.")]
OffloadCompute = Annotated[
    str, typer.Option("--offload-compute", help="Where offloaded data are computed: device or host.")
]
DraftVocab = Annotated[
    int | None, typer.Option(help="Tokens that drafters of one layer score, in place of those of the published ones.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


def print_records(records: list[dict[str, Any]], as_json: bool, as_csv: bool, title: str = "") -> None:
    """Print records as a table, JSON or CSV."""
    check_output_options(as_json, as_csv)
    if as_json:
        typer.echo(json.dumps(records, indent=1))
    elif as_csv:
        typer.echo(report.to_csv(records), nl=False)
    else:
        out = console()
        out.print(report.plain_table(records, out.width, title))


def check_output_options(as_json: bool, as_csv: bool) -> None:
    """Check that one output format was chosen.

    Raises:
        ValueError: two were chosen.
    """
    if as_json and as_csv:
        raise ValueError("--json and --csv were given; leave out one of them")


_PIPED_WIDTH = 160
"""Width of tables where neither a terminal nor COLUMNS sets one."""


def console() -> Console:
    """The console for tables, as wide as the terminal or COLUMNS."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=_PIPED_WIDTH)


def exit_with_error(sentence: str | None) -> None:
    """Print the sentence, if any, and exit with status 1."""
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
    runtime: RuntimeName = DEFAULT_RUNTIME,
    stage: StageName = "decode",
    batch: Batch = 1,
    context: Context = 1024,
    tokens: Tokens = 8,
    chunk: Annotated[int, typer.Option(help="chunked: tokens of the prompt per pass.")] = 512,
    generate: Annotated[int, typer.Option(help="chat: tokens generated after the prompt.")] = 256,
    weights: Bits = "16",
    activations: Bits = "16",
    kv: Bits = "16",
    head: Head = None,
    fusion: FusionName = "flash",
    devices: Devices = 1,
    square: Annotated[bool, typer.Option("--square", help="Count causal attention as the full square.")] = False,
    axes: Axes = None,
    offload: OffloadParts = None,
    tier: OffloadTier = "ddr",
    compute: OffloadCompute = "device",
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Predict the cost of every operation of a pass; totals, memory, and the largest sizes that fit."""
    check_output_options(as_json, as_csv)
    device = cli_inputs.select_hardware(hardware, hardware_file, bandwidth, peak, capacity, runtime)
    target = AnalyzedModel(*find_model(model))
    workload = Workload(
        cli_inputs.parse_stage(stage), batch, context, tokens, chunk, generate, parse_format(weights),
        parse_format(activations), parse_format(kv), cli_inputs.parse_fusion(fusion), devices, square,
        parse_format(head) if head else None,
    )  # fmt: skip
    if axes:
        records = report.sweep_records(sweep(target, device, workload, dict(map(parse_axis, axes))), device.capacity)
        print_records(records, as_json, as_csv, f"{target.name} on {device.title}, {stage}")
        return
    analysis, result = analyse(target, device, workload), None
    placed = cli_inputs.select_offload(offload, tier, compute, analysis, hardware_file)
    if placed is not None:
        result = apply_offload(analysis, placed)
    if as_json:
        typer.echo(
            json.dumps(report.analysis_record(analysis) | ({"offload": vars(result)} if result else {}), indent=1)
        )
    elif as_csv:
        typer.echo(report.to_csv([report.op_record(c) for c in analysis.op_costs]), nl=False)
    else:
        out = console()
        operations = report.fit_width(report.operations_table(analysis), out.width, report.OPERATIONS_OPTIONAL)
        out.print(operations, "", report.totals_table(analysis), *([report.offload_text(result)] if result else []))
    exit_with_error(report.memory_warning(analysis, result))


@app.command("plan")
def plan_command(
    model: ModelName,
    hardware: Device = "a100-80g",
    hardware_file: DeviceFile = None,
    bandwidth: Bandwidth = None,
    peak: Peak = None,
    capacity: Capacity = None,
    runtime: RuntimeName = DEFAULT_RUNTIME,
    batch: Batch = 1,
    context: Context = 1024,
    weights: Bits = "16",
    activations: Bits = "16",
    kv: Bits = "16",
    head: Head = None,
    fusion: FusionName = "flash",
    devices: Devices = 1,
    method: Annotated[list[str] | None, typer.Option(help="Only these methods; repeatable.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, in place of the smallest of the family.")] = None,
    accept: Annotated[
        float | None, typer.Option(help="Acceptance probability of the first choice, for every method.")
    ] = None,
    acceptance: Annotated[Path | None, typer.Option(help="JSON file of measured acceptance by method.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Results of `foretell bench run`: methods with the acceptance measured there.")
    ] = None,
    draft_vocab: DraftVocab = None,
    nodes: Annotated[int, typer.Option(help="Largest tree, root included.")] = MAX_NODES,
    tokens: Annotated[int | None, typer.Option(help="A chain of so many drafted tokens, in place of the best.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="A tree, drafted nodes x depth as 60x6, in place of the best.")
    ] = None,
    tau: Annotated[float | None, typer.Option(help="Tokens per pass that the chain or tree yields.")] = None,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve", help="Speed-up at batch 1 to 256, and the batch sizes at which each method is profitable."
        ),
    ] = False,
    share: Annotated[float, typer.Option(help="Layers run by early exit and layer skipping.")] = 0.5,
    density: Annotated[float, typer.Option(help="Feed-forward needed per token under contextual sparsity.")] = 0.2,
    offload: OffloadParts = None,
    tier: OffloadTier = "ddr",
    compute: OffloadCompute = "device",
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Rank decoding methods by predicted speed-up, or advise against speculation."""
    check_output_options(as_json, as_csv)
    device = cli_inputs.select_hardware(hardware, hardware_file, bandwidth, peak, capacity, runtime)
    target, draft_model = AnalyzedModel(*find_model(model)), AnalyzedModel(*find_model(draft)) if draft else None
    given = {m.name: m.profile() for m in reversed(read_measured(measured)[1]) if m.shape} if measured else None
    chosen = cli_inputs.select_methods(method, accept, acceptance, given)
    profiles = {name: with_draft_vocab(profile, draft_vocab) for name, profile in chosen.items()}
    shape = cli_inputs.parse_shape(tokens, tree, tau)
    workload = Workload(
        "decode", batch, context, weights=parse_format(weights), activations=parse_format(activations),
        kv=parse_format(kv), fusion=cli_inputs.parse_fusion(fusion), devices=devices,
        head=parse_format(head) if head else None,
    )  # fmt: skip
    analysis = analyse(target, device, workload)
    placed = cli_inputs.select_offload(offload, tier, compute, analysis, hardware_file)
    if curve:
        records = cli_inputs.speedup_curves(target, device, workload, profiles, draft_model, placed)
        title = f"{target.name} on {device.title}, context {context}: speed-up by batch"
        print_records(records, as_json, as_csv, title)
        return
    plan = rank_methods(target, device, workload, profiles, draft_model, nodes, shape, placed)
    variants = [] if placed else model_variants(target, device, workload, share, density)
    if as_json:
        typer.echo(json.dumps(report.plan_record(plan, variants), indent=1))
    elif as_csv:
        typer.echo(report.to_csv(report.plan_records(plan)), nl=False)
    else:
        out = console()
        ranking = report.fit_width(report.plan_table(plan), out.width, report.PLAN_OPTIONAL)
        cheaper = report.fit_width(report.variants_table(variants), out.width, ("OPs", "bytes"))
        out.print(f"[bold]{plan.advice}[/]", "", ranking, *(["", cheaper] if variants else []))
        for name, reason in plan.unavailable.items():
            typer.echo(f"unavailable: {name}: {reason}")
    exit_with_error(report.memory_warning(analysis, apply_offload(analysis, placed) if placed else None))


@app.command("table1")
def table1_command(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """Table 1 of the survey: Llama-2-7b on an A6000, 2048 tokens; our exact counts are in the last two columns."""
    rows, title = table1(), "Table 1 of arXiv 2402.16363: Llama-2-7b, RTX A6000, 2048 tokens, batch 1"
    records = report.table1_records(rows) if as_json or as_csv else report.table1_text(rows)
    print_records(records, as_json, as_csv, title)


@app.command("figure")
def figure_command(
    number: Annotated[int, typer.Argument(help=f"Figure of the survey: {', '.join(map(str, FIGURES))}.")],
    out: Annotated[
        Path, typer.Option(help="Picture to write (.png, .svg, .pdf); its data are written beside it as .csv.")
    ],
) -> None:
    """Draw a figure of the survey from our own numbers, and write its data as CSV."""
    from foretell.roofline.paper.plots import draw

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
    known, extra = known_hardware(hardware_file), [AnalyzedModel(*find_model(m)) for m in model or ()]
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
    """Check that the directory of an output file exists.

    Raises:
        ValueError: it does not.
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
    text = page(known_hardware(hardware_file), [AnalyzedModel(*find_model(m)) for m in model or ()])
    out.write_text(text, "utf-8")
    typer.echo(f"{out}: {len(text.encode()) / 1e6:.1f} MB")


@app.command()
def models(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the built-in models."""
    print_records(
        [
            report.model_record(AnalyzedModel(*find_model(name)), str(raw["source"]))
            for name, raw in builtin_models().items()
        ],
        as_json,
        as_csv,
    )


@app.command("hardware")
def hardware_command(hardware_file: DeviceFile = None, as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the known devices and the sources of their figures."""
    print_records([report.hardware_record(h) for h in known_hardware(hardware_file).values()], as_json, as_csv)


@app.command("load")
def load_command(
    model: ModelName,
    hardware: Device = "h100-sxm",
    hardware_file: DeviceFile = None,
    runtime: RuntimeName = DEFAULT_RUNTIME,
    weights: Bits = "16",
    activations: Bits = "16",
    kv: Bits = "16",
    devices: Devices = 1,
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
    ttft: Annotated[float, typer.Option(help="Seconds to the first token that count for the goodput.")] = 1.0,
    tpot: Annotated[float, typer.Option(help="Seconds per further token that count for the goodput.")] = 0.05,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Simulate requests that arrive over time: latencies and goodput without and with drafts."""
    check_output_options(as_json, as_csv)
    device = cli_inputs.select_hardware(hardware, hardware_file, None, None, None, runtime)
    target, draft_model = AnalyzedModel(*find_model(model)), AnalyzedModel(*find_model(draft)) if draft else None
    shape = cli_inputs.parse_shape(3 if tokens is None and tree is None else tokens, tree, tau)
    (profile,) = profiles_for(target, {method: find_method(method)}, draft_model).values()
    drafter = cost_of_profile(profile, target, draft_model)
    formats = [parse_format(text) for text in (weights, activations, kv)]
    workload = Workload("decode", 1, prompt, weights=formats[0], activations=formats[1], kv=formats[2], devices=devices)
    assert shape is not None
    shape = estimate_method(profile, drafter, target, device, workload, shape=shape).shape
    loads = (
        [read_trace(trace)]
        if trace
        else [poisson_requests(each, requests, prompt, output) for each in cli_inputs.parse_rates(rate)]
    )
    plain, drafted = (StepCosts(target, device, workload, s, d) for s, d in ((None, None), (shape, drafter)))
    compared = list[LoadComparison]()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for load in progress.track(loads, description="simulating"):
            results = (simulate(load, costs, running, ttft_limit=ttft, tpot_limit=tpot) for costs in (plain, drafted))
            compared.append(LoadComparison(*results))
    if not as_json and not as_csv:
        typer.echo(advice(compared))
    drafts = f"{profile.name}, {shape.nodes - 1} drafted, {shape.tokens:.2f} tokens per pass"
    title = f"{target.name} on {device.title}: {drafts}"
    print_records([report.load_record(c) for c in compared], as_json, as_csv, title)


@app.command("published")
def published_command(
    fit: Annotated[str | None, typer.Option(help="Fit this runtime anew to its rows and print its figures.")] = None,
    out: Annotated[Path | None, typer.Option(help="Picture of published against predicted (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Compare predictions with published measurements: every row, and the errors by group."""
    check_output_options(as_json, as_csv)
    if fit is not None:
        print_records([report.runtime_record(refit(find_runtime(fit)))], as_json, as_csv)
        return
    compared = compare_published()
    if out is not None:
        from foretell.roofline.paper.plots import draw_published

        check_folder(out)
        draw_published(compared, out)
        typer.echo(f"{len(compared)} published measurements and their predictions: {out}", err=True)
    print_records([report.published_record(c) for c in compared], as_json, as_csv, "Published and predicted")
    if not as_csv and not as_json:
        print_records(
            [report.group_record(g) for g in group_errors(compared)], False, False, "Errors of the rows checked"
        )


@app.command("compare")
def compare_command(
    results: Annotated[Path, typer.Argument(help="Results of `foretell bench run`, or their folder.")],
    hardware: Annotated[
        str, typer.Option("--hardware", "-H", help="The machine of the run; `foretell roofline calibrate` adds it.")
    ] = CALIBRATED,
    hardware_file: DeviceFile = None,
    runtime: RuntimeName = DEFAULT_RUNTIME,
    model: Annotated[str | None, typer.Option(help="Target, in place of the run's: as for plan.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, in place of the smallest of the family.")] = None,
    draft_vocab: DraftVocab = None,
    context: Annotated[int | None, typer.Option(help="Cached tokens; by default those of the run.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Compare the speed-ups of a benchmark with those predicted from its tokens per pass."""
    check_output_options(as_json, as_csv)
    run, methods = read_measured(results)
    if hardware == CALIBRATED and hardware not in known_hardware(hardware_file):
        raise ValueError("this machine is not calibrated: run `foretell roofline calibrate` first, or name a device")
    device = cli_inputs.select_hardware(hardware, hardware_file, None, None, None, runtime)
    target, draft_model = (AnalyzedModel(*find_model(m)) if m else None for m in (model or run.settings.model, draft))
    assert target is not None
    workloads = [measured_workload(m, context) for m in methods]
    rows, left_out = compare_measured(methods, target, device, workloads, draft_model, draft_vocab)
    title = f"{target.name} on {device.title}: measured and predicted speed-up"
    print_records([report.measured_record(row) for row in rows], as_json, as_csv, title)
    for name, reason in left_out.items():
        typer.echo(f"left out: {name}: {reason}", err=True)
    if rows and not as_json and not as_csv:
        errors = sorted(abs(row.error) for row in rows)
        typer.echo(f"median error {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}, of {len(rows)} methods")
    exit_with_error(None if rows else "nothing could be compared")


@app.command("calibrate")
def calibrate_command(
    name: Annotated[
        str | None, typer.Option(help=f"Name of the new hardware entry: {CALIBRATED}, or this-gpu for cuda.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16, int8 or float32; repeatable. Default: bfloat16 and int8.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Hardware file to add to; by default the user's own.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads to use; by default those torch uses.")] = None,
    repeat: Annotated[int, typer.Option(help="Timings of a pass without a faster one that end its measurement.")] = 10,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: also measure what each step of these methods takes outside the target's pass, with "
            "the embedded model."
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Measure although other programs use the machine.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare", help="Then compare predicted and measured passes of the embedded model."
        ),
    ] = True,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Measure this machine, add it as hardware, and compare predictions with passes of the embedded model."""
    from foretell.bench.competitor import MethodSpec
    from foretell.bench.machine import measure_bandwidth
    from foretell.cli import roofline_machine as machine
    from foretell.cli.setup import set_threads
    from foretell.model.load.network import parse_device

    set_threads(threads)
    where = parse_device(device)
    key = (name or (CALIBRATED if where.type == "cpu" else "this-gpu")).lower()
    forms = {precision: machine.number_format(precision) for precision in dtype or ["bfloat16", "int8"]}
    specs = MethodSpec.parse_all(split_commas(methods)) if methods else []
    if specs and where.type != "cpu":
        raise ValueError("--methods are measured on the cpu alone; leave them out with --device cuda")
    disturbed = machine.interference()
    if disturbed and not force:
        raise ValueError(f"{disturbed}, so the figures would be too low; calibrate while it is idle, or add --force")
    timings = {
        f.name: calibrate.time_probes(machine.probe_timers(precision, repeat, where)) for precision, f in forms.items()
    }
    spread = max(map(calibrate.timing_spread, timings.values()))
    if spread > calibrate.MAX_SPREAD:
        disturbed = f"the same passes took {spread:.0%} longer in another round"
        if not force:
            raise ValueError(
                f"{disturbed}, so nothing was written; calibrate while the machine is idle, or add --force"
            )
    fits = {name: calibrate.fit_costs(found) for name, found in timings.items()}
    file, title = out or user_hardware_file(), machine.device_title(where)
    source = f"{machine.calibration_source()}, spread of {calibrate.ROUNDS} rounds {spread:.1%}"
    if disturbed:
        source += f"; while {disturbed}"
    stream = measure_bandwidth(where)
    here = calibrate.calibrated_hardware(key, title, source, stream, machine.device_memory(where), fits)
    here = replace(here, drafting=machine.calibrate_drafting(list(forms), specs))
    calibrate.add_to_file(file, here, read_hardware_file(file) if file.is_file() else {})
    typer.echo(f"{here.title}: {here.bandwidth / 1e9:.1f} GB/s; added as {key!r} to {file}", err=True)
    errors = ", ".join(f"{name} bits {fit.median_error:.1%}" for name, fit in fits.items())
    typer.echo(f"two rounds differ by {spread:.1%}, the fit from the passes by {errors} (medians)", err=True)
    if not compare:
        return
    rows = []
    for precision, form in forms.items():
        measure, config = machine.embedded_timer(precision, repeat, where)
        checks = calibrate.check_predictions(AnalyzedModel("smollm2-135m", config), here, form, measure)
        rows += [report.check_record(precision, c) for c in checks]
        typer.echo(report.check_summary(precision, checks), err=True)
    print_records(rows, as_json, as_csv, "Predicted and measured passes of the embedded model")


if __name__ == "__main__":
    app(prog_name="foretell roofline")
