"""`foretell bench`: measure methods against plain decoding and against other runtimes, in one interleaved run."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from foretell.bench import step as stepping
from foretell.bench import tables
from foretell.bench.collect import collect
from foretell.bench.console import print_summary, progress, write
from foretell.bench.lineup import Lineup
from foretell.bench.machine import describe
from foretell.bench.peers import choose
from foretell.bench.peers.export import default_folder
from foretell.bench.schema import Record, Settings
from foretell.bench.store import Store
from foretell.bench.tasks import BUILT_IN
from foretell.bench.tasks import load as load_tasks
from foretell.cli.errors import say, spoken
from foretell.load import EMBEDDED, load


class Group(TyperGroup):
    """The commands of `foretell bench`, their errors in one sentence also when run on their own."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with spoken():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure methods against plain decoding and against other runtimes, in one interleaved run.",
)


@app.callback()
def bench() -> None:
    """Measure methods against plain decoding and against other runtimes, in one interleaved run."""


ModelName = Annotated[str, typer.Option("--model", help="Alias, directory, GGUF file or hub id.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of every runtime (unsaid: torch's own choice).")]
Folder = Annotated[
    Path | None,
    typer.Option("--gguf-cache", help="Folder for GGUF files made for llama.cpp (unsaid: ~/.cache/foretell/gguf)."),
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


def set_threads(threads: int | None) -> int:
    """Give every runtime this many threads; how many there are now."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


@app.command()
def step(
    model: ModelName = EMBEDDED,
    dtype: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16, int8.")] = "bfloat16",
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
    """Time one pass of the target over a few new tokens, interleaved with other runtimes; medians and ratios."""
    count, sizes, batches = set_threads(threads), numbers(tokens, "--tokens"), numbers(rows, "--rows")
    named = words(peers)
    choose.check(choose.expand(named, "bfloat16", False))
    models = [load(model, d) for d in words(dtype)]
    setting = choose.Setting(
        model, None, models[0].precision, context + max(sizes) + 64, count, gguf_cache or default_folder()
    )
    steppers = stepping.contenders(models) + choose.steppers(named, setting)
    passage = models[0].codec.encode(" ".join(t for q in load_tasks(BUILT_IN).questions for t in q.turns))
    text = (passage * (context // len(passage) + 1))[:context]
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
    speeds = stepping.throughput(plain)
    report = stepping.StepReport(
        model=model, context=context, threads=count, machine=describe(), passes=tuple(passes), throughput=tuple(speeds),
        figures=tuple(stepping.figures(passes, speeds, looked)),
    )  # fmt: skip
    for table in tables.step_tables(report):
        console.print(table)
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=1))


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder for results; a run that was interrupted there goes on.")],
    tasks: Annotated[
        str,
        typer.Option(help="'builtin', or a file of questions: JSONL (Spec-Bench, HumanEval, prompts) or plain text."),
    ] = BUILT_IN,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; name@8 drafts 8 tokens. Plain decoding always takes part.")
    ] = "ngram,suffix,recycling,sam_recycling",
    categories: Annotated[str, typer.Option(help="Comma-separated; none: all of the file.")] = "",
    per_category: Annotated[int | None, typer.Option(min=1, help="Questions of each category; unsaid: all.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 160,
    model: ModelName = EMBEDDED,
    dtype: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16, int8.")] = "bfloat16",
    peers: Annotated[
        str,
        typer.Option(
            help="Comma-separated: transformers, llama.cpp, or one of their modes, e.g. llama.cpp-plain/q8_0."
        ),
    ] = "",
    draft_model: Annotated[
        str | None, typer.Option(help="Reference of a draft model, for methods that need one.")
    ] = None,
    reference: Annotated[
        list[Path] | None, typer.Option(help="Text file that methods may copy from; repeat for more.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Times each question is answered; times are medians.")] = 3,
    threads: Threads = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, in a process per contender.")] = True,
    gguf_cache: Folder = None,
) -> None:
    """Measure methods on questions, interleaved with other runtimes; writes results.json and report.md."""
    everything = load_tasks(tasks)
    found = everything.select(per_category, words(categories))
    for problem in found.problems:
        say(problem)
    settings = Settings(
        model=model, tasks=found.source, digest=everything.digest, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
        threads=set_threads(threads), dtypes=tuple(words(dtype)), draft_model=draft_model, references=tuple(str(r) for r in reference or ()),
    )  # fmt: skip
    lineup = Lineup.of(settings, words(methods), words(peers), gguf_cache or default_folder())
    with Store(out, settings, Record) as store:
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


if __name__ == "__main__":
    app(prog_name="foretell bench")
