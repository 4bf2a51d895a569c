"""`foretell roofline calibrate`: this machine as a device."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli.options import split_commas
from foretell.cli.roofline_options import AsCsv, AsJson, print_records
from foretell.roofline import calibrate, records, report
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.formats import number_format
from foretell.roofline.hardware import CALIBRATED, read_hardware_file, user_hardware_file


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
    forms = {precision: number_format(precision) for precision in dtype or ["bfloat16", "int8"]}
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
    fits = {name: calibrate.fit_costs(passes) for name, passes in timings.items()}
    file, title = out or user_hardware_file(), machine.device_title(where)
    steps = f" and steps of {methods} on prompts of its own" if specs else ""
    source = f"{machine.calibration_source()}, spread of {calibrate.ROUNDS} rounds {spread:.1%}"
    source += f", fitted to passes of random networks{steps}"
    if disturbed:
        source += f"; while {disturbed}"
    stream = measure_bandwidth(where)
    here = calibrate.calibrated_hardware(key, title, source, stream, machine.device_memory(where), fits)
    here = replace(here, drafting=machine.calibrate_drafting(forms, specs, here))
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
        rows += [records.check_record(precision, c) for c in checks]
        typer.echo(report.check_summary(precision, checks), err=True)
    print_records(rows, as_json, as_csv, "Predicted and measured passes of the embedded model")
