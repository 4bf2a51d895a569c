"""`foretell roofline published` and `compare`: predictions beside measurements."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.roofline_measured import read_held_out, read_measured
from foretell.cli.roofline_options import (
    AsCsv,
    AsJson,
    DraftVocab,
    check_output_options,
    exit_with_error,
    print_records,
)
from foretell.roofline import records
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.cli_inputs import GivenDevice
from foretell.roofline.fit_runtime import FITTED, refit
from foretell.roofline.fitted_acceptance import fit_terms, published_tokens, unseen_errors
from foretell.roofline.hardware import CALIBRATED, known_hardware
from foretell.roofline.measured import compare_measured, measured_workload
from foretell.roofline.published import compare_published, group_errors
from foretell.roofline.published_loads import compare_loads, load_settings
from foretell.roofline.runtime import find_runtime, runtime_figures
from foretell.utils.names import unknown
from foretell.utils.paths import require_file_place


def published_command(
    ctx: typer.Context,
    fit: Annotated[
        str | None,
        typer.Option(help="Fit this runtime, or `acceptance`, anew to its rows and print its figures."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Picture of published against predicted (.png, .svg, .pdf).")] = None,
    loads: Annotated[
        bool, typer.Option("--loads", help="Gains of drafts under load instead, beside their simulation.")
    ] = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Compare predictions with published measurements: every row, and the errors by group."""
    check_output_options(as_json, as_csv)
    refuse_unused(ctx, ("fit", "out"), "--loads compares drafts under load", loads)
    refuse_unused(ctx, ("out",), "--fit prints the figures of a runtime", fit is not None)
    if loads:
        settings = list(load_settings().values())
        with Progress(console=Console(stderr=True), transient=True) as progress:
            compared_loads = [
                c for each in progress.track(settings, description="simulating") for c in compare_loads([each])
            ]
        title = "Published and simulated gains under load"
        print_records([records.compared_load_record(c) for c in compared_loads], as_json, as_csv, title)
        return
    choices = ("acceptance", *FITTED)
    if fit is not None and fit not in choices:
        raise unknown("--fit", fit, choices)
    if fit == "acceptance":
        fitted = fit_terms(published_tokens())
        print_records(records.acceptance_records(fitted), as_json, as_csv)
        if not as_csv and not as_json:
            unseen = records.unseen_records(fitted.papers, unseen_errors())
            print_records(unseen, False, False, "Tokens per pass of each paper, predicted from the others")
        return
    if fit is not None:
        refitted = refit(find_runtime(fit))
        print_records([{"name": refitted.name} | runtime_figures(refitted)], as_json, as_csv)
        return
    compared = compare_published()
    if out is not None:
        from foretell.roofline.paper.plots import draw_published

        require_file_place(out)
        draw_published(compared, out)
        typer.echo(f"{len(compared)} published measurements and their predictions: {out}", err=True)
    print_records([records.published_record(c) for c in compared], as_json, as_csv, "Published and predicted")
    if not as_csv and not as_json:
        print_records(
            [records.group_record(g) for g in group_errors(compared)], False, False, "Errors of the rows checked"
        )


@options.with_settings(GivenDevice(), "device", ("hardware_file", "runtime"))
def compare_command(
    results: Annotated[Path, typer.Argument(help="Results of `foretell bench run`, or their folder.")],
    hardware: Annotated[
        str, typer.Option("--hardware", "-H", help="The machine of the run; `foretell roofline calibrate` adds it.")
    ] = CALIBRATED,
    device: options.Settings = options.NO_SETTINGS,
    model: Annotated[str | None, typer.Option(help="Target, in place of the run's: as for plan.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, in place of the smallest of the family.")] = None,
    draft_vocab: DraftVocab = None,
    context: Annotated[int | None, typer.Option(help="Cached tokens; by default those of the run.")] = None,
    passes_of: Annotated[
        Path | None,
        typer.Option(help="Results on other questions: their tokens per pass predict the speed-ups of these."),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Compare the speed-ups of a benchmark with those predicted from its tokens per pass."""
    check_output_options(as_json, as_csv)
    run, methods = read_measured(results) if passes_of is None else read_held_out(results, passes_of)
    given = GivenDevice(**device)
    if hardware == CALIBRATED and hardware not in known_hardware(given.hardware_file):
        raise ValueError("this machine is not calibrated: run `foretell roofline calibrate` first, or name a device")
    on = given.named(hardware)
    target, draft_model = (AnalyzedModel.named(m) if m else None for m in (model or run.settings.model, draft))
    assert target is not None
    workloads = [measured_workload(m, context) for m in methods]
    rows, left_out = compare_measured(methods, target, on, workloads, draft_model, draft_vocab)
    title = f"{target.name} on {on.title}: measured and predicted speed-up"
    print_records([records.measured_record(row) for row in rows], as_json, as_csv, title)
    for name, reason in left_out.items():
        typer.echo(f"left out: {name}: {reason}", err=True)
    if rows and not as_json and not as_csv:
        errors = sorted(abs(row.error) for row in rows)
        typer.echo(f"median error {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}, of {len(rows)} methods")
    exit_with_error(None if rows else "nothing could be compared")
