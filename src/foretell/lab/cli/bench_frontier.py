"""`foretell bench frontier`: cheaper passes compared."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.console import print_sections
from foretell.bench.machine import describe_machine
from foretell.bench.output import write_files
from foretell.bench.questions import BUILT_IN, Question
from foretell.bench.report import markdown_page
from foretell.bench.schema import BenchSettings
from foretell.bench.text_table import TextTable
from foretell.cli.bench.inputs import (
    METHODS,
    Categories,
    Device,
    DraftModel,
    Length,
    ModelName,
    PerCategory,
    Tasks,
    Threads,
    load_selected_questions,
    parse_counts,
    resumable,
)
from foretell.cli.errors import print_error
from foretell.cli.given import refuse_unused
from foretell.cli.options import split_commas
from foretell.cli.progress import progress_bar
from foretell.cli.setup import set_threads
from foretell.lab.frontier.report import (
    DEFINITIONS,
    as_csv,
    frontier_table,
    ordered,
    picture,
)
from foretell.lab.frontier.run import open_variants, predictor, run_frontier
from foretell.lab.frontier.variants import FAMILIES, ModelOptions, VariantInputs, all_variants
from foretell.load import resolve_dtype
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.roofline.hardware import CALIBRATED, Hardware, known_hardware
from foretell.utils.names import unknown


def frontier(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for results; an interrupted run there is continued.")],
    model: ModelName = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Dtype of the exact model that all ways are compared with.")] = "bfloat16",
    dtypes: Annotated[str, typer.Option(help="Comma-separated: dtypes that are ways.")] = "int8,int4",
    kv_budget: Annotated[str, typer.Option(help="Comma-separated: budgets of the KV cache policies.")] = "128",
    checkpoint: Annotated[
        list[Path] | None, typer.Option(help="Checkpoint of foretell compress or quantize; repeatable.")
    ] = None,
    exits: Annotated[
        list[Path] | None, typer.Option(help="Exits of foretell train exits, with calibrations; repeatable.")
    ] = None,
    sparsity: Annotated[
        list[Path] | None, typer.Option(help="Directory of foretell calibrate or train sparsity; repeatable.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated: lossless methods on the axis.")] = METHODS,
    families: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FAMILIES)}. Default: all.")] = "",
    draft_model: DraftModel = None,
    tasks: Tasks = BUILT_IN,
    categories: Categories = "",
    per_category: PerCategory = 1,
    max_new_tokens: Length = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Times each question is answered; times are medians.")] = 3,
    hardware: Annotated[
        str | None,
        typer.Option(help="Device of the predictions. Default: this machine, as foretell roofline calibrate left it."),
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Price every lossy way to decode beside its gain, measured and predicted, with the lossless methods on the axis.

    Dtypes, KV caches, compressed checkpoints, early exits, sparsity and lossy methods; greedy, on first turns.

    foretell bench frontier --out frontier --checkpoint pruned --exits exits --threads 2
    """
    chosen_families = _families(families)
    for option, users in _FAMILIES_OF.items():
        unread = not set(users) & set(chosen_families)
        refuse_unused(ctx, (option,), f"--families leaves {' and '.join(users)} out", unread)
    refuse_unused(ctx, ("csv",), "--json is another format", as_json)
    count = set_threads(threads)
    all_questions, selected = load_selected_questions(tasks, per_category, categories)
    questions = [Question(q.id, q.category, q.turns[:1]) for q in selected.questions]
    exact = ModelOptions(model, resolve_dtype(model, dtype, device))
    settings = BenchSettings(
        model=model, tasks=selected.source, digest=all_questions.digest, max_new_tokens=max_new_tokens,
        temperature=0.0, seed=0, threads=count, dtypes=(exact.dtype,), device=device, draft_model=draft_model,
    )  # fmt: skip
    inputs = VariantInputs(
        exact, tuple(split_commas(dtypes)), tuple(parse_counts(kv_budget, "--kv-budget")), tuple(checkpoint or ()),
        tuple(exits or ()), tuple(sparsity or ()), tuple(split_commas(draft_model or "")), tuple(split_commas(methods)),
    )  # fmt: skip
    chosen = _device(hardware)
    variants = [variant for variant in all_variants(inputs) if variant.family in chosen_families]
    with resumable(out):
        opened = open_variants(variants, exact, device, max_new_tokens)
        for note in opened.notes:
            typer.echo(note, err=True)
        total = len(questions) * repeats * len(opened.competitors) + len(opened.variants)
        with progress_bar(total) as report:
            context = sum(len(opened.exact.tokens(q.turns[0])) for q in questions) // len(questions)
            predicted = predictor(chosen, opened.exact, context + max_new_tokens // 2)
            results = run_frontier(opened, settings, questions, repeats, predicted, out, report)
    not_run = TextTable(["way", "why it was not run"], list(opened.unavailable.items()))
    tables = {"Gain and price": frontier_table(results), "Not run": not_run}
    record = {
        "settings": settings.model_dump(), "machine": describe_machine(device), "unavailable": opened.unavailable,
        "hardware": None if chosen is None else chosen.title, "fitted_to": None if chosen is None else chosen.source,
        "ways": [r.model_dump() | {"prediction_error": r.prediction_error} for r in ordered(results)],
    }  # fmt: skip
    conditions = f"{settings.tasks}, {len(questions)} questions, at most {max_new_tokens} new tokens, {count} threads."
    if chosen is not None:
        conditions += f" Predicted for {chosen.title}: {chosen.source}."
    files = {
        "frontier.json": json.dumps(record, indent=1).encode(),
        "frontier.csv": as_csv(results).encode(),
        "report.md": markdown_page(f"Cheaper passes of {model}", conditions, tables, DEFINITIONS).encode(),
    }
    write_files(out, files | ({"frontier.png": picture(results)} if find_spec("matplotlib") is not None else {}))
    if as_json or csv:
        typer.echo(json.dumps(record, indent=1) if as_json else as_csv(results), nl=as_json)
    else:
        print_sections({title: table for title, table in tables.items() if table.rows})


_FAMILIES_OF: Mapping[str, tuple[str, ...]] = {
    "dtypes": ("weights",), "kv_budget": ("kv-policy",), "checkpoint": ("checkpoint",), "exits": ("exits",),
    "sparsity": ("sparsity",), "methods": ("lossless-method",), "draft_model": ("lossy-method", "lossless-method"),
}  # fmt: skip
"""Families that read an option of the command."""


def _families(text: str) -> tuple[str, ...]:
    names = split_commas(text) or list(FAMILIES)
    for name in names:
        if name not in FAMILIES:
            raise unknown("family", name, FAMILIES)
    return tuple(names)


def _device(name: str | None) -> Hardware | None:
    """The device of the predictions; None where this machine was not calibrated."""
    known = known_hardware()
    if name is None and CALIBRATED not in known:
        print_error("this machine is not calibrated, so no gain is predicted: run foretell roofline calibrate")
        return None
    if (name or CALIBRATED) not in known:
        raise unknown("hardware", name or CALIBRATED, known)
    return known[name or CALIBRATED]
