"""`foretell bench record` and `replay`: tokens per pass without running the target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.baseline import Baseline
from foretell.bench.console import print_replay
from foretell.bench.output import write_results
from foretell.bench.questions import BUILT_IN
from foretell.bench.recording import RecordedQuestion, load_recording, record_questions, recording_settings
from foretell.bench.replay import MethodReplay, method_replays, replay_all
from foretell.bench.results import build_results
from foretell.cli.bench.inputs import (
    REPLAYED_METHODS,
    Categories,
    Device,
    DraftModel,
    Length,
    ModelName,
    PerCategory,
    References,
    Tasks,
    Threads,
    load_selected_questions,
    resumable,
)
from foretell.cli.errors import print_error
from foretell.cli.options import split_commas
from foretell.cli.progress import progress_bar
from foretell.cli.setup import load_model, set_threads
from foretell.engine.pass_times import PassTimes
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.utils.paths import require_file_place, require_folder_place
from foretell.utils.store import RunStore


def record_(
    out: Annotated[Path, typer.Option(help="Folder for the recording; an interrupted one there is continued.")],
    tasks: Tasks = BUILT_IN,
    categories: Categories = "",
    per_category: PerCategory = None,
    max_new_tokens: Length = 160,
    model: ModelName = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, int8, int8-activations or int4.")] = "auto",
    device: Device = "cpu",
    top_k: Annotated[int, typer.Option(min=1, help="Best tokens recorded at every position.")] = 32,
    threads: Threads = None,
) -> None:
    """Record the target's greedy answers to a workload, with its best tokens at every position, for `replay`."""
    set_threads(threads)
    all_questions, selected = load_selected_questions(tasks, per_category, categories)
    target = load_model(model, dtype, device)
    settings = recording_settings(target, all_questions, len(selected.questions), max_new_tokens, top_k)
    count = len(selected.questions)
    with resumable(out), RunStore(out, settings, RecordedQuestion) as store, progress_bar(count) as progress:
        record_questions(target, selected.questions, settings, store, progress)
    typer.echo(f"{count} questions recorded in {out}")
    if selected.problems:
        raise typer.Exit(1)


def replay_(
    source: Annotated[Path, typer.Argument(metavar="RECORDING", help="Folder that `foretell bench record` wrote.")],
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated; default: those that --check pins, or the usual ones.")
    ] = None,
    draft_model: DraftModel = None,
    reference: References = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and reports.")] = None,
    pin: Annotated[Path | None, typer.Option(help="Write the counts of tokens and passes to this file.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Compare the counts with this file; differences end with status 1.")
    ] = None,
    pass_times: Annotated[
        str | None,
        typer.Option(
            metavar="N=MS,…",
            help="Milliseconds of passes over N tokens, as 1=2.7,8=6.6: the draft budget chooses as on a machine that "
            "has these times, and the speed there is printed.",
        ),
    ] = None,
) -> None:
    """Tokens per pass of any method on a recorded workload, without running the target.

    Greedy decoding with lossless methods; times are meaningless, but those that --pass-times gives.
    """
    require_folder_place(out)
    require_file_place(pin)
    settings, questions = load_recording(source)
    pinned = None if check is None else Baseline.read(check)
    names = (
        pinned.methods
        if methods is None and pinned is not None
        else split_commas(REPLAYED_METHODS if methods is None else methods)
    )
    times = None if pass_times is None else _pass_times(pass_times)
    replays = method_replays(settings, names, draft_model, reference or (), times)
    with progress_bar(len(replays) * len(questions)) as progress:
        question_results = replay_all(replays, questions, progress)
    results = build_results(question_results, settings.bench_settings(), {r.name: True for r in replays})
    print_replay(results)
    if times is not None:
        _print_speeds(replays)
    if out is not None:
        write_results(out, results)
    now = Baseline.from_results(question_results)
    if pin is not None:
        pin.write_text(now.model_dump_json(indent=1) + "\n")
    if pinned is not None:
        differences = pinned.differences(now)
        for line in differences:
            print_error(line)
        if differences:
            raise typer.Exit(1)
        typer.echo(f"as pinned in {check}")


def _pass_times(given: str) -> PassTimes:
    pairs = [part.partition("=") for part in split_commas(given)]
    try:
        return PassTimes({int(tokens): float(ms) / 1e3 for tokens, _, ms in pairs})
    except ValueError as error:
        raise ValueError(
            f"--pass-times: {given} is no list of tokens and milliseconds such as 1=2.7,8=6.6: {error}"
        ) from error


def _print_speeds(replays: Sequence[MethodReplay]) -> None:
    plain, *others = [replay for replay in replays if replay.tokens]
    for replay in others:
        gain = (plain.seconds / plain.tokens) / (replay.seconds / replay.tokens)
        typer.echo(f"{replay.spec.label}: {gain:.2f} times plain decoding with these pass times, drafting in no time")
