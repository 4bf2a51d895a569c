"""`foretell roofline analyze` and `plan`: the cost of a pass, and methods ranked by predicted gain."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli.given import refuse_unused
from foretell.cli.roofline_measured import read_measured
from foretell.cli.roofline_options import (
    AsCsv,
    AsJson,
    Axes,
    Bandwidth,
    Batch,
    Bits,
    Capacity,
    Context,
    Device,
    DeviceFile,
    Devices,
    DraftVocab,
    FusionName,
    Head,
    ModelName,
    OffloadCompute,
    OffloadParts,
    OffloadTier,
    Peak,
    PlannedDevice,
    RuntimeName,
    StageName,
    Tokens,
    WeightBits,
    check_output_options,
    console,
    exit_with_error,
    print_records,
    stored_file,
)
from foretell.roofline import cli_inputs, records, report
from foretell.roofline.analysis import AnalyzedModel, analyse
from foretell.roofline.hardware import CALIBRATED, Hardware, known_hardware
from foretell.roofline.method_profiles import with_draft_vocab
from foretell.roofline.model_configs import find_model, own_formats
from foretell.roofline.model_variants import model_variants
from foretell.roofline.offload import apply_offload
from foretell.roofline.plan import rank_methods
from foretell.roofline.runtime import DEFAULT_RUNTIME
from foretell.roofline.speculation import MAX_NODES
from foretell.roofline.sweep import parse_axis, sweep
from foretell.roofline.workload import Workload


def analyze_command(
    ctx: typer.Context,
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
    weights: WeightBits = "auto",
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
    model = stored_file(model)
    for option, user in {"tokens": "verify", "chunk": "chunked", "generate": "chat"}.items():
        refuse_unused(ctx, (option,), f"it is for --stage {user}, and this is {stage}", stage != user)
    refuse_unused(ctx, ("offload", "tier", "compute"), "--sweep keeps all parts on the device", bool(axes))
    refuse_unused(ctx, ("tier", "compute"), "no --offload says what is outside the device", offload is None)
    device = cli_inputs.select_hardware(hardware, hardware_file, bandwidth, peak, capacity, runtime)
    target = AnalyzedModel(*find_model(model))
    workload = cli_inputs.parse_workload(
        stage,
        batch,
        context,
        weights,
        activations,
        kv,
        head=head,
        fusion=fusion,
        devices=devices,
        own=own_formats(model),
    )
    workload = replace(workload, tokens=tokens, chunk=chunk, generate=generate, square=square)
    if axes:
        swept = records.sweep_records(sweep(target, device, workload, dict(map(parse_axis, axes))), device.capacity)
        print_records(swept, as_json, as_csv, f"{target.name} on {device.title}, {stage}")
        return
    analysis, result = analyse(target, device, workload), None
    placed = cli_inputs.select_offload(offload, tier, compute, analysis, hardware_file)
    if placed is not None:
        result = apply_offload(analysis, placed)
    if as_json:
        typer.echo(
            json.dumps(records.analysis_record(analysis) | ({"offload": vars(result)} if result else {}), indent=1)
        )
    elif as_csv:
        typer.echo(records.to_csv([records.op_record(c) for c in analysis.op_costs]), nl=False)
    else:
        out = console()
        operations = report.fit_width(report.operations_table(analysis), out.width, report.OPERATIONS_OPTIONAL)
        out.print(
            operations,
            f"[dim]{report.OPERATIONS_LEGEND}[/]",
            "",
            report.totals_table(analysis),
            *([report.offload_text(result)] if result else []),
        )
    exit_with_error(report.memory_warning(analysis, result))


def plan_command(
    ctx: typer.Context,
    model: ModelName,
    hardware: PlannedDevice = None,
    hardware_file: DeviceFile = None,
    bandwidth: Bandwidth = None,
    peak: Peak = None,
    capacity: Capacity = None,
    runtime: RuntimeName = DEFAULT_RUNTIME,
    batch: Batch = 1,
    context: Context = 1024,
    weights: WeightBits = "auto",
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
    model = stored_file(model)
    device, how = _planned_device(hardware, hardware_file, bandwidth, peak, capacity, runtime)
    refuse_unused(ctx, ("tier", "compute"), "no --offload says what is outside the device", offload is None)
    best = "nodes", "tokens", "tree", "tau", "share", "density"
    refuse_unused(ctx, best, "--curve has the best shape at every batch size", curve)
    refuse_unused(ctx, ("share", "density"), "cheaper models are not listed with --offload", offload is not None)
    target, draft_model = AnalyzedModel(*find_model(model)), AnalyzedModel(*find_model(draft)) if draft else None
    given = {m.name: m.profile() for m in reversed(read_measured(measured)[1]) if m.shape} if measured else None
    chosen = cli_inputs.select_methods(method, accept, acceptance, given)
    profiles = {name: with_draft_vocab(profile, draft_vocab) for name, profile in chosen.items()}
    shape = cli_inputs.parse_shape(tokens, tree, tau)
    workload = cli_inputs.parse_workload(
        "decode",
        batch,
        context,
        weights,
        activations,
        kv,
        head=head,
        fusion=fusion,
        devices=devices,
        own=own_formats(model),
    )
    analysis = analyse(target, device, workload)
    placed = cli_inputs.select_offload(offload, tier, compute, analysis, hardware_file)
    if curve:
        curves = cli_inputs.speedup_curves(target, device, workload, profiles, draft_model, placed)
        title = f"{target.name} on {device.title}, context {context}: speed-up by batch"
        print_records(curves, as_json, as_csv, title)
        return
    plan = rank_methods(target, device, workload, profiles, draft_model, nodes, shape, placed)
    variants = [] if placed else model_variants(target, device, workload, share, density)
    if as_json:
        typer.echo(json.dumps(records.plan_record(plan, variants), indent=1))
    elif as_csv:
        typer.echo(records.to_csv(records.plan_records(plan)), nl=False)
    else:
        out = console()
        ranking = report.fit_width(report.plan_table(plan), out.width, report.PLAN_OPTIONAL)
        cheaper = report.fit_width(report.variants_table(variants), out.width, ("OPs", "bytes"))
        legend = f"[dim]{report.PLAN_LEGEND}[/]"
        out.print(f"[bold]{plan.advice}[/]")
        out.print(_assumptions(device, workload, how), style="dim", highlight=False)
        out.print("", ranking, legend)
        if variants:
            out.print("", cheaper)
        for name, reason in plan.unavailable.items():
            typer.echo(f"unavailable: {name}: {reason}")
    exit_with_error(report.memory_warning(analysis, apply_offload(analysis, placed) if placed else None))


def _planned_device(
    name: str | None,
    file: Path | None,
    bandwidth: float | None,
    peak: float | None,
    capacity: float | None,
    runtime: str,
) -> tuple[Hardware, str]:
    """The device that was named, else this machine; and how its figures are known, empty for one that was named."""
    if name is not None:
        return cli_inputs.select_hardware(name, file, bandwidth, peak, capacity, runtime), ""
    if CALIBRATED in known_hardware(file):
        return cli_inputs.select_hardware(CALIBRATED, file, bandwidth, peak, capacity, runtime), "calibrated"
    from foretell.cli.roofline_machine import estimated_hardware
    from foretell.cli.setup import spinner

    with spinner("measuring this machine's memory and products"):
        estimate = estimated_hardware()
    device = cli_inputs.with_given_figures(estimate, bandwidth, peak, capacity, runtime)
    return device, "this machine, estimated in a second; `foretell roofline calibrate` measures it"


def _assumptions(device: Hardware, workload: Workload, how: str) -> str:
    """What a plan is predicted for, in a line; `how`: how the device's figures are known."""
    return (
        f"for {device.title}{f' ({how})' if how else ''}; batch {workload.batch}, context {workload.context}, weights "
        f"{workload.weights.name}, activations {workload.activations.name}, cache {workload.kv.name}"
    )
