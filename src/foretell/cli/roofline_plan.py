"""`foretell roofline analyze` and `plan`: the cost of a pass, and methods ranked by predicted gain."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.roofline_measured import read_measured
from foretell.cli.roofline_options import (
    AsCsv,
    AsJson,
    Axes,
    Device,
    DraftVocab,
    ModelName,
    OffloadCompute,
    OffloadParts,
    OffloadTier,
    PlannedDevice,
    StageName,
    Tokens,
    check_output_options,
    console,
    exit_with_error,
    print_records,
    stored_file,
)
from foretell.roofline import cli_inputs, records, report
from foretell.roofline.analysis import AnalyzedModel, analyse
from foretell.roofline.cli_inputs import GivenDevice, GivenWorkload
from foretell.roofline.hardware import CALIBRATED, Hardware, known_hardware
from foretell.roofline.method_profiles import with_draft_vocab
from foretell.roofline.model_configs import own_formats
from foretell.roofline.model_variants import model_variants
from foretell.roofline.offload import apply_offload
from foretell.roofline.plan import rank_methods
from foretell.roofline.speculation import MAX_NODES
from foretell.roofline.sweep import parse_axis, sweep
from foretell.roofline.workload import Workload


@options.with_settings(GivenDevice(), "device")
@options.with_settings(GivenWorkload(), "sizes")
def analyze_command(
    ctx: typer.Context,
    model: ModelName,
    hardware: Device = "a6000",
    device: options.Settings = options.NO_SETTINGS,
    stage: StageName = "decode",
    sizes: options.Settings = options.NO_SETTINGS,
    tokens: Tokens = 8,
    chunk: Annotated[int, typer.Option(help="chunked: tokens of the prompt per pass.")] = 512,
    generate: Annotated[int, typer.Option(help="chat: tokens generated after the prompt.")] = 256,
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
    given = GivenDevice(**device)
    on = given.named(hardware)
    target = AnalyzedModel.named(model)
    workload = GivenWorkload(**sizes).of_stage(stage, own_formats(model))
    workload = replace(workload, tokens=tokens, chunk=chunk, generate=generate, square=square)
    if axes:
        swept = records.sweep_records(sweep(target, on, workload, dict(map(parse_axis, axes))), on.capacity)
        print_records(swept, as_json, as_csv, f"{target.name} on {on.title}, {stage}")
        return
    analysis, result = analyse(target, on, workload), None
    placed = cli_inputs.select_offload(offload, tier, compute, analysis, given.hardware_file)
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


@options.with_settings(GivenDevice(), "device")
@options.with_settings(GivenWorkload(), "sizes")
def plan_command(
    ctx: typer.Context,
    model: ModelName,
    hardware: PlannedDevice = None,
    device: options.Settings = options.NO_SETTINGS,
    sizes: options.Settings = options.NO_SETTINGS,
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
    given = GivenDevice(**device)
    on, how = _planned_device(hardware, given)
    refuse_unused(ctx, ("tier", "compute"), "no --offload says what is outside the device", offload is None)
    best = "nodes", "tokens", "tree", "tau", "share", "density"
    refuse_unused(ctx, best, "--curve has the best shape at every batch size", curve)
    refuse_unused(ctx, ("share", "density"), "cheaper models are not listed with --offload", offload is not None)
    target, draft_model = AnalyzedModel.named(model), AnalyzedModel.named(draft) if draft else None
    known = {m.name: m.profile() for m in reversed(read_measured(measured)[1]) if m.shape} if measured else None
    chosen = cli_inputs.select_methods(method, accept, acceptance, known)
    profiles = {name: with_draft_vocab(profile, draft_vocab) for name, profile in chosen.items()}
    shape = cli_inputs.parse_shape(tokens, tree, tau)
    workload = GivenWorkload(**sizes).of_stage("decode", own_formats(model))
    analysis = analyse(target, on, workload)
    placed = cli_inputs.select_offload(offload, tier, compute, analysis, given.hardware_file)
    if curve:
        curves = cli_inputs.speedup_curves(target, on, workload, profiles, draft_model, placed)
        title = f"{target.name} on {on.title}, context {workload.context}: speed-up by batch"
        print_records(curves, as_json, as_csv, title)
        return
    plan = rank_methods(target, on, workload, profiles, draft_model, nodes, shape, placed)
    variants = [] if placed else model_variants(target, on, workload, share, density)
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
        out.print(_assumptions(on, workload, how), style="dim", highlight=False)
        out.print("", ranking, legend)
        if variants:
            out.print("", cheaper)
        for name, reason in plan.unavailable.items():
            typer.echo(f"unavailable: {name}: {reason}")
    exit_with_error(report.memory_warning(analysis, apply_offload(analysis, placed) if placed else None))


def _planned_device(name: str | None, given: GivenDevice) -> tuple[Hardware, str]:
    """The device that was named, else this machine; and how its figures are known, empty for one that was named."""
    if name is not None:
        return given.named(name), ""
    if CALIBRATED in known_hardware(given.hardware_file):
        return given.named(CALIBRATED), "calibrated"
    from foretell.cli.roofline_machine import estimated_hardware
    from foretell.cli.setup import spinner

    with spinner("measuring this machine's memory and products"):
        estimate = estimated_hardware()
    return given.changed(estimate), "this machine, estimated in a second; `foretell roofline calibrate` measures it"


def _assumptions(device: Hardware, workload: Workload, how: str) -> str:
    """What a plan is predicted for, in a line; `how`: how the device's figures are known."""
    return (
        f"for {device.title}{f' ({how})' if how else ''}; batch {workload.batch}, context {workload.context}, weights "
        f"{workload.weights.name}, activations {workload.activations.name}, cache {workload.kv.name}"
    )
