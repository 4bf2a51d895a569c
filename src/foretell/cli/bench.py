"""`foretell bench`: measure methods against plain decoding and against other runtimes, in one interleaved run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from foretell.api import Model
from foretell.bench import record as recording
from foretell.bench import replay as replaying
from foretell.bench import step as stepping
from foretell.bench import tables
from foretell.bench.collect import collect
from foretell.bench.compare import compare, differing
from foretell.bench.console import print_replay, print_summary, progress, read, write
from foretell.bench.lineup import Lineup
from foretell.bench.machine import describe, read_bandwidth
from foretell.bench.peers import choose
from foretell.bench.peers.export import default_folder
from foretell.bench.random_model import random_models
from foretell.bench.schema import Record, Results, Settings
from foretell.bench.scripted import Recording
from foretell.bench.tasks import BUILT_IN
from foretell.bench.tasks import Tasks as TaskSet
from foretell.bench.tasks import load as load_tasks
from foretell.cli.errors import print_error, report_errors
from foretell.cli.setup import set_threads
from foretell.load import DEFAULT_MODEL, load, parse_device
from foretell.utils.store import RunStore


class Group(TyperGroup):
    """The commands of `foretell bench`, their errors in one sentence also when run on their own."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with report_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure methods against plain decoding and against other runtimes, in one interleaved run.",
)


@app.callback()
def bench() -> None:
    """Measure methods against plain decoding and against other runtimes, in one interleaved run."""


ModelName = Annotated[str, typer.Option("--model", help="Alias, directory, GGUF file or hub id.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of every runtime (unsaid: torch's own choice).")]
Device = Annotated[str, typer.Option(help="cpu or cuda; other runtimes are measured on the CPU only.")]
Folder = Annotated[
    Path | None,
    typer.Option("--gguf-cache", help="Folder for GGUF files made for llama.cpp (unsaid: ~/.cache/foretell/gguf)."),
]


Tasks = Annotated[
    str, typer.Option(help="'builtin', or a file of questions: JSONL (Spec-Bench, HumanEval, prompts) or plain text.")
]
Methods = Annotated[
    str,
    typer.Option(
        help="Comma-separated; name@8 drafts 8 tokens, where the method reads such a number. Plain decoding always "
        "takes part."
    ),
]
Categories = Annotated[str, typer.Option(help="Comma-separated; none: all of the file.")]
PerCategory = Annotated[int | None, typer.Option(min=1, help="Questions of each category; unsaid: all.")]
Length = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
DraftModel = Annotated[str | None, typer.Option(help="Reference of a draft model, for methods that need one.")]
References = Annotated[
    list[Path] | None, typer.Option("--reference", help="Text file that methods may copy from; repeat for more.")
]
METHODS = "ngram,suffix,recycling,sam_recycling"
"""Measured unless the user names others: lossless, and needing nothing but the model."""


def words(text: str) -> list[str]:
    """The parts of a comma-separated option."""
    return [w.strip() for w in text.split(",") if w.strip()]


def numbers(text: str, option: str) -> list[int]:
    """Positive whole numbers of a comma-separated option.

    Raises:
        ValueError: something else is among them.
    """
    try:
        found = [int(w) for w in words(text)]
    except ValueError as error:
        raise ValueError(f"{option}: comma-separated whole numbers were expected, found {text!r}") from error
    if not found or min(found) < 1:
        raise ValueError(f"{option}: at least one number, each 1 or more, was expected, found {text!r}")
    return found


def chosen(source: str, per_category: int | None, categories: str) -> tuple[TaskSet, TaskSet]:
    """All questions of a file, and those asked for; broken lines are told."""
    everything = load_tasks(source)
    for problem in everything.problems:
        print_error(problem)
    return everything, everything.select(per_category, words(categories))


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """An interruption says that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        print_error(f"interrupted; what was finished is kept in {out}: give the same command again to go on")
        raise typer.Exit(130) from None


@app.command()
def step(
    model: ModelName = DEFAULT_MODEL,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights in the shape of this model of `foretell roofline models`, in place of --model."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16, int8.")] = "bfloat16",
    device: Device = "cpu",
    tokens: Annotated[str, typer.Option(help="Numbers of new tokens per pass.")] = "1,2,4,8,16,32,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens cached before the pass.")] = 256,
    peers: Annotated[str, typer.Option(help="Comma-separated: transformers, llama.cpp.")] = "",
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all contenders.")] = 15,
    rows: Annotated[str, typer.Option(help="Batch sizes of plain decoding.")] = "1,16",
    engine: Annotated[bool, typer.Option(help="Measure whole engine steps too: batches, and prompt lookup.")] = True,
    gguf_cache: Folder = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
) -> None:
    """Time one pass of the target over a few new tokens, interleaved with other runtimes; medians and ratios.

    The bytes of a pass are held against the measured memory bandwidth. On CUDA passes are timed with and without
    graphs.
    """
    count, sizes, batches = set_threads(threads), numbers(tokens, "--tokens"), numbers(rows, "--rows")
    named = words(peers)
    refuse_peers(named, device)
    choose.check(choose.expand(named, "bfloat16", False))
    models, place = _models(model, shape, words(dtype), device), parse_device(device)
    setting = choose.Setting(
        model, None, models[0].precision, context + max(sizes) + 64, count, gguf_cache or default_folder()
    )
    steppers = stepping.contenders(models) + choose.steppers(named, setting)
    text = _passage(models[0], context, at_random=shape is not None)
    bandwidth = read_bandwidth(place)
    console = Console()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("warming up")
        passes = stepping.time_passes(steppers, text, sizes, repeats, lambda s: bar.update(task, description=s))
        plain, looked = (
            stepping.time_engines(models, text, batches, repeats, lambda s: bar.update(task, description=s))
            if engine
            else ({}, [])
        )
    speeds, passes = stepping.throughput(plain), stepping.with_bytes(passes, models, context)
    figures = stepping.figures(passes, speeds, looked) if place.type == "cpu" else []
    report = stepping.StepReport(
        model=shape or model, context=context, threads=count, device=device, bandwidth=bandwidth,
        machine=describe(device),
        passes=tuple(passes), throughput=tuple(speeds), figures=tuple(figures),
    )  # fmt: skip
    for table in tables.step_tables(report):
        console.print(table)
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=1))


def refuse_peers(names: Sequence[str], device: str) -> None:
    """Peers and a GPU do not go together.

    Raises:
        ValueError: both were asked for.
    """
    if names and device != "cpu":
        raise ValueError(f"peers are measured on the CPU only: leave out --peers, or --device {device}")


def _models(reference: str, shape: str | None, precisions: Sequence[str], device: str) -> list[Model]:
    """The model at every precision, or random ones of a shape."""
    if shape is None:
        return [load(reference, p, device) for p in precisions]
    return random_models(shape, precisions, parse_device(device))


def _passage(model: Model, length: int, at_random: bool) -> list[int]:
    """Tokens that every pass continues: the built-in questions, or any tokens for a model without a language."""
    if at_random:
        return [int(t) for t in np.random.default_rng(0).integers(model.config.vocab, size=length)]
    passage = model.codec.encode(" ".join(t for q in load_tasks(BUILT_IN).questions for t in q.turns))
    return (passage * (length // len(passage) + 1))[:length]


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder for results; a run that was interrupted there goes on.")],
    tasks: Tasks = BUILT_IN,
    methods: Methods = METHODS,
    categories: Categories = "",
    per_category: PerCategory = None,
    max_new_tokens: Length = 160,
    model: ModelName = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16, int8.")] = "bfloat16",
    device: Device = "cpu",
    peers: Annotated[
        str,
        typer.Option(
            help="Comma-separated: transformers, llama.cpp, or one of their modes, e.g. llama.cpp-plain/q8_0."
        ),
    ] = "",
    draft_model: DraftModel = None,
    reference: References = None,
    temperature: Annotated[float, typer.Option(min=0, help="Peers are measured at 0 only.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every answer's sampling.")] = 0,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember",
            help="Methods keep what they learned from earlier questions, as a server's do; each repeat on its own.",
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Times each question is answered; times are medians.")] = 3,
    threads: Threads = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, in a process per contender.")] = True,
    gguf_cache: Folder = None,
) -> None:
    """Measure methods on questions, interleaved with other runtimes; writes results.json and report.md."""
    refuse_peers(words(peers), device)
    everything, found = chosen(tasks, per_category, categories)
    settings = Settings(
        model=model,
        tasks=found.source,
        digest=everything.digest,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        threads=set_threads(threads),
        dtypes=tuple(words(dtype)),
        device=device,
        remember=remember,
        draft_model=draft_model,
        references=tuple(str(r) for r in reference or ()),
    )
    lineup = Lineup.of(settings, words(methods), words(peers), gguf_cache or default_folder())
    with resumable(out), RunStore(out, settings, Record) as store:
        session = lineup.session(lineup.models(), repeats)
        with progress(len(found.questions) * session.size) as tick:
            session.run(found.questions, store, tick)
        peaks = lineup.memory(session, found.questions) if memory else {}
        wanted = {q.id for q in found.questions}
        records = [r for r in store.records if r.question in wanted and r.repeat < repeats]
        results = collect(records, settings, {c.name: c.lossless for c in session.contenders}, peaks)
        write(out, results)
    print_summary(results)
    if found.problems:
        raise typer.Exit(1)


@app.command("record")
def record_(
    out: Annotated[Path, typer.Option(help="Folder for the recording; one that was interrupted there goes on.")],
    tasks: Tasks = BUILT_IN,
    categories: Categories = "",
    per_category: PerCategory = None,
    max_new_tokens: Length = 160,
    model: ModelName = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "bfloat16",
    device: Device = "cpu",
    top_k: Annotated[int, typer.Option(min=1, help="Best tokens kept at every position.")] = 32,
    threads: Threads = None,
) -> None:
    """Keep the target's greedy answers to a workload, with its best scores at every token, for `replay`."""
    set_threads(threads)
    everything, found = chosen(tasks, per_category, categories)
    target = load(model, dtype, device)
    setting = recording.describe(target, everything, len(found.questions), max_new_tokens, top_k)
    with resumable(out), RunStore(out, setting, Recording) as store, progress(len(found.questions)) as tick:
        recording.record(target, found.questions, setting, store, tick)
    typer.echo(f"{len(found.questions)} questions recorded in {out}")
    if found.problems:
        raise typer.Exit(1)


@app.command("replay")
def replay_(
    source: Annotated[Path, typer.Argument(metavar="RECORDING", help="Folder that `foretell bench record` wrote.")],
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated; unsaid: those that --check has pinned, or the usual ones.")
    ] = None,
    draft_model: DraftModel = None,
    reference: References = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and reports.")] = None,
    pin: Annotated[Path | None, typer.Option(help="Write the counts of tokens and passes to this file.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Compare the counts with this file; differences end with status 1.")
    ] = None,
) -> None:
    """Tokens per pass of any method on a recorded workload, without running the target.

    Greedy, lossless methods; times mean nothing.
    """
    setting, recordings = replaying.load(source)
    pinned = None if check is None else replaying.Baseline.read(check)
    named = words(METHODS if methods is None else methods) if methods is not None or pinned is None else pinned.methods
    casts = replaying.casts(setting, methods=named, draft_model=draft_model, references=reference or ())
    with progress(len(casts) * len(recordings)) as tick:
        records = replaying.replay(recordings, casts, tick)
    results = collect(records, replaying.as_settings(setting), {c.name: True for c in casts})
    print_replay(results)
    if out is not None:
        write(out, results)
    now = replaying.Baseline.of(records)
    if pin is not None:
        pin.write_text(now.model_dump_json(indent=1) + "\n")
    if pinned is not None:
        differences = pinned.differences(now)
        for line in differences:
            print_error(line)
        if differences:
            raise typer.Exit(1)
        typer.echo(f"as pinned in {check}")


@app.command("compare")
def compare_(
    first: Annotated[Path, typer.Argument(metavar="A", help="results.json, or its folder.")],
    second: Annotated[Path, typer.Argument(metavar="B")],
) -> None:
    """Compare two results question by question, with bootstrap confidence intervals."""
    a, b = read(first), read(second)
    for difference in differing(a, b):
        print_error(difference)
    Console().print(tables.comparison_table(compare(a, b), (str(first), str(second))))


@app.command()
def schema() -> None:
    """Print the JSON schema of results.json."""
    typer.echo(json.dumps(Results.model_json_schema(), indent=1))


@app.command("report")
def report_(
    results: Annotated[Path, typer.Argument(help="results.json, or its folder.")],
    out: Annotated[Path, typer.Option(help="Folder for report.md, report.html and the charts.")],
) -> None:
    """Make the reports and charts of results again."""
    for path in write(out, read(results)):
        typer.echo(str(path))


if __name__ == "__main__":
    app(prog_name="foretell bench")
