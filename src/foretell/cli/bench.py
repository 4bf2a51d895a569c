"""`foretell bench`: measure methods against plain decoding and other runtimes, in one interleaved run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from foretell.api import Model
from foretell.bench import step as step_bench
from foretell.bench.baseline import Baseline
from foretell.bench.compare import compare, settings_differences
from foretell.bench.console import print_comparison, print_replay, print_step_report, print_summary, progress_bar
from foretell.bench.load_test import LoadResult, Server, Workload, load_table, run_all
from foretell.bench.machine import describe_machine, measure_bandwidth
from foretell.bench.output import read_results, write_results
from foretell.bench.peers import registry
from foretell.bench.peers.export import default_folder
from foretell.bench.plan import BenchPlan
from foretell.bench.questions import BUILT_IN, QuestionSet, load_questions
from foretell.bench.random_file import random_model_file
from foretell.bench.random_model import random_models
from foretell.bench.recorder import record_questions, recording_settings
from foretell.bench.recording import RecordedQuestion, load_recording
from foretell.bench.replay import method_replays, replay_all
from foretell.bench.results import build_results
from foretell.bench.schema import BenchResults, BenchSettings, QuestionResult
from foretell.cli.errors import print_error, report_errors
from foretell.cli.options import split_commas
from foretell.cli.setup import set_threads
from foretell.load import DEFAULT_MODEL, load, parse_device, resolve_dtype
from foretell.model.load.native import finish_writing
from foretell.utils.store import RunStore
from foretell.utils.validation import parse_json


class Group(TyperGroup):
    """The commands of `foretell bench`; errors become one sentence also when this module is run on its own."""

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
Threads = Annotated[int | None, typer.Option(help="CPU threads of every runtime (default: torch's own choice).")]
Device = Annotated[str, typer.Option(help="cpu or cuda; other runtimes are measured on the CPU only.")]
Folder = Annotated[
    Path | None,
    typer.Option("--gguf-cache", help="Folder for GGUF files made for llama.cpp (default: ~/.cache/foretell/gguf)."),
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
Categories = Annotated[str, typer.Option(help="Comma-separated; default: all of the file.")]
PerCategory = Annotated[int | None, typer.Option(min=1, help="Questions of each category; default: all.")]
Length = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
DraftModel = Annotated[str | None, typer.Option(help="Reference of a draft model, for methods that need one.")]
References = Annotated[
    list[Path] | None, typer.Option("--reference", help="Text file that methods may copy from; repeat for more.")
]
METHODS = "ngram,suffix,recycling,sam_recycling"
"""Measured unless the user names others: lossless, and needing nothing but the model."""
_CONTEXT_MARGIN = 64
"""Cache slots of a peer beyond the tokens of a step."""


def parse_counts(text: str, option: str) -> list[int]:
    """Parse positive whole numbers of a comma-separated option.

    Raises:
        ValueError: something else is among them.
    """
    try:
        found = [int(w) for w in split_commas(text)]
    except ValueError as error:
        raise ValueError(f"{option}: comma-separated whole numbers were expected, found {text!r}") from error
    if not found or min(found) < 1:
        raise ValueError(f"{option}: at least one number, each 1 or more, was expected, found {text!r}")
    return found


def load_selected_questions(source: str, per_category: int | None, categories: str) -> tuple[QuestionSet, QuestionSet]:
    """All questions of a file, and the selected ones; broken lines are reported."""
    all_questions = load_questions(source)
    for problem in all_questions.problems:
        print_error(problem)
    return all_questions, all_questions.select(per_category, split_commas(categories))


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """On an interruption, say that finished work is kept."""
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
    weights: Annotated[
        str,
        typer.Option(
            help="With --shape: write random weights of this type (bf16, Q8_0, Q4_0, Q4_1 or Q4_K) to a GGUF file "
            "once, and load it.",
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="Comma-separated: auto, float32, bfloat16, int8, int8-activations, int4.")
    ] = "auto",
    device: Device = "cpu",
    tokens: Annotated[str, typer.Option(help="Numbers of new tokens per pass.")] = "1,2,4,8,16,32,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens cached before the pass.")] = 256,
    peers: Annotated[str, typer.Option(help="Comma-separated: transformers, llama.cpp.")] = "",
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all competitors.")] = 15,
    rows: Annotated[str, typer.Option(help="Batch sizes of plain decoding.")] = "1,16",
    engine: Annotated[bool, typer.Option(help="Time whole engine steps, too: batches, and prompt lookup.")] = True,
    gguf_cache: Folder = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
) -> None:
    """Time one pass of the target over a few new tokens, interleaved with other runtimes; medians and ratios.

    The bytes of a pass are compared with the measured memory bandwidth. On CUDA passes are timed with and without
    graphs.
    """
    count, sizes, batches = set_threads(threads), parse_counts(tokens, "--tokens"), parse_counts(rows, "--rows")
    peer_names = split_commas(peers)
    check_peer_device(peer_names, device)
    registry.require_installed(registry.expand_names(peer_names, "bfloat16", False))
    if weights:
        if shape is None:
            raise ValueError("--weights writes a random model, whose sizes --shape names")
        model = str(random_model_file(shape, weights, gguf_cache or default_folder()))
    known_shape = None if weights else shape
    models, torch_device = _load_models(model, known_shape, split_commas(dtype), device), parse_device(device)
    peer_settings = registry.PeerSettings(
        model=model,
        draft_model=None,
        dtype=models[0].precision,
        context=context + max(sizes) + _CONTEXT_MARGIN,
        threads=count,
        folder=gguf_cache or default_folder(),
    )
    backends = step_bench.own_backends(models) + registry.load_forward_backends(peer_names, peer_settings)
    prefix = _prefix_tokens(models[0], context, random=shape is not None)
    bandwidth = measure_bandwidth(torch_device)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up")

        def progress(description: str) -> None:
            bar.update(task, description=description)

        passes = step_bench.time_passes(backends, prefix, sizes, repeats, progress)
        plain, lookup = step_bench.time_engines(models, prefix, batches, repeats, progress) if engine else ({}, [])
    passes, throughput = step_bench.add_bytes(passes, models, context), step_bench.median_throughput(plain)
    goals = step_bench.ratio_goals(passes, throughput, lookup) if torch_device.type == "cpu" else []
    report = step_bench.StepReport(
        model=shape or model, context=context, threads=count, device=device, bandwidth=bandwidth,
        machine=describe_machine(device),
        passes=tuple(passes), throughput=tuple(throughput), ratio_goals=tuple(goals),
    )  # fmt: skip
    print_step_report(report)
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=1))


def check_peer_device(names: Sequence[str], device: str) -> None:
    """Check that peers are measured on the CPU.

    Raises:
        ValueError: there are peers, and the device is another one.
    """
    if names and device != "cpu":
        raise ValueError(f"peers are measured on the CPU only: leave out --peers, or --device {device}")


def _load_models(reference: str, shape: str | None, precisions: Sequence[str], device: str) -> list[Model]:
    """The model in every precision, or random ones of a shape."""
    if shape is None:
        models = [load(reference, p, device) for p in precisions]
        finish_writing()
        return models
    return random_models(shape, ["bfloat16" if p == "auto" else p for p in precisions], parse_device(device))


def _prefix_tokens(model: Model, length: int, random: bool) -> list[int]:
    """Cached tokens before a pass: the built-in questions, or random tokens for a random model."""
    if random:
        return [int(t) for t in np.random.default_rng(0).integers(model.config.vocab, size=length)]
    tokens = model.codec.encode(" ".join(t for q in load_questions(BUILT_IN).questions for t in q.turns))
    return (tokens * (length // len(tokens) + 1))[:length]


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder for results; an interrupted run there is continued.")],
    tasks: Tasks = BUILT_IN,
    methods: Methods = METHODS,
    categories: Categories = "",
    per_category: PerCategory = None,
    max_new_tokens: Length = 160,
    model: ModelName = DEFAULT_MODEL,
    dtype: Annotated[
        str, typer.Option(help="Comma-separated: auto, float32, bfloat16, int8, int8-activations, int4.")
    ] = "auto",
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
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember",
            help="Methods keep their state from question to question, as in a server, separately for each repeat.",
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Times each question is answered; times are medians.")] = 3,
    threads: Threads = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each competitor in a process of its own.")] = True,
    gguf_cache: Folder = None,
) -> None:
    """Measure methods on questions, interleaved with other runtimes; writes results.json and report.md."""
    check_peer_device(split_commas(peers), device)
    all_questions, selected = load_selected_questions(tasks, per_category, categories)
    settings = BenchSettings(
        model=model,
        tasks=selected.source,
        digest=all_questions.digest,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        threads=set_threads(threads),
        dtypes=tuple(dict.fromkeys(resolve_dtype(model, name, device) for name in split_commas(dtype))),
        device=device,
        remember=remember,
        draft_model=draft_model,
        references=tuple(str(r) for r in reference or ()),
    )
    plan = BenchPlan.from_settings(settings, split_commas(methods), split_commas(peers), gguf_cache or default_folder())
    with resumable(out), RunStore(out, settings, QuestionResult) as store:
        bench_run = plan.create_run(plan.load_models(), repeats)
        with progress_bar(len(selected.questions) * bench_run.answers_per_question) as progress:
            bench_run.run(selected.questions, store, progress)
        peaks = plan.measure_memory(bench_run, selected.questions) if memory else {}
        wanted = {q.id for q in selected.questions}
        kept = [r for r in store.records if r.question in wanted and r.repeat < repeats]
        results = build_results(kept, settings, {c.name: c.lossless for c in bench_run.competitors}, peaks)
        write_results(out, results)
    print_summary(results)
    if selected.problems:
        raise typer.Exit(1)


@app.command("record")
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
    target = load(model, dtype, device)
    settings = recording_settings(target, all_questions, len(selected.questions), max_new_tokens, top_k)
    count = len(selected.questions)
    with resumable(out), RunStore(out, settings, RecordedQuestion) as store, progress_bar(count) as progress:
        record_questions(target, selected.questions, settings, store, progress)
    typer.echo(f"{count} questions recorded in {out}")
    if selected.problems:
        raise typer.Exit(1)


@app.command("replay")
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
) -> None:
    """Tokens per pass of any method on a recorded workload, without running the target.

    Greedy decoding with lossless methods; times are meaningless.
    """
    settings, questions = load_recording(source)
    pinned = None if check is None else Baseline.read(check)
    names = (
        pinned.methods
        if methods is None and pinned is not None
        else split_commas(METHODS if methods is None else methods)
    )
    replays = method_replays(settings, names, draft_model, reference or ())
    with progress_bar(len(replays) * len(questions)) as progress:
        question_results = replay_all(replays, questions, progress)
    results = build_results(question_results, settings.bench_settings(), {r.name: True for r in replays})
    print_replay(results)
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


@app.command("serve")
def serve_(
    servers: Annotated[
        list[str],
        typer.Argument(metavar="NAME=URL", help="Servers of OpenAI's chat completions; they are loaded in turn."),
    ],
    questions: Annotated[str, typer.Option("--tasks", metavar="FILE", help="Prompts; see bench run.")] = BUILT_IN,
    per_category: Annotated[int | None, typer.Option(metavar="N", help="Prompts per category.")] = None,
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Streams at a time.")] = "1,4,16",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="New tokens per answer.")] = 128,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Repetitions.")] = 3,
    fields: Annotated[
        list[str] | None,
        typer.Option("--fields", metavar="NAME=JSON", help="Further fields of a server's requests; repeatable."),
    ] = None,
) -> None:
    """Measure servers under load: tokens per second, time to the first token and between tokens, greedy.

    The first server is compared with the others.

        foretell bench serve ours=http://127.0.0.1:8000 peer=http://127.0.0.1:8080
    """
    extra = dict(split_assignment(each, "--fields") for each in fields or ())
    named = [Server(*split_assignment(each, "NAME=URL")) for each in servers]
    if missing := set(extra) - {s.name for s in named}:
        raise ValueError(f"--fields names {sorted(missing)[0]!r}, which is not among the servers")
    for text in extra.values():
        if not isinstance(parse_json(text, "--fields"), dict):
            raise ValueError(f"--fields: a JSON object was expected, found {text!r}")
    named = [replace(s, fields=extra.get(s.name, "{}")) for s in named]
    selected = load_selected_questions(questions, per_category, "")[1]
    workload = Workload(tuple(q.turns[0] for q in selected.questions), max_new_tokens)

    def report(result: LoadResult) -> None:
        speed = f"{result.tokens_per_second:.1f} tokens/s"
        typer.echo(f"{result.server}, {result.concurrency} streams: {speed}", err=True)

    results = run_all(named, workload, parse_counts(concurrency, "--concurrency"), repeats, report)
    typer.echo(load_table(results).markdown(), nl=False)


def split_assignment(text: str, what: str) -> tuple[str, str]:
    """The two sides of `NAME=VALUE`.

    Raises:
        ValueError: there is no name, no value or no `=`.
    """
    name, _, value = text.partition("=")
    if not name or not value:
        raise ValueError(f"{what}: NAME=VALUE was expected, found {text!r}")
    return name, value


@app.command("compare")
def compare_(
    first: Annotated[Path, typer.Argument(metavar="A", help="results.json, or its folder.")],
    second: Annotated[Path, typer.Argument(metavar="B")],
) -> None:
    """Compare two results question by question, with bootstrap confidence intervals."""
    a, b = read_results(first), read_results(second)
    for difference in settings_differences(a, b):
        print_error(difference)
    print_comparison(compare(a, b), (str(first), str(second)))


@app.command()
def schema() -> None:
    """Print the JSON schema of results.json."""
    typer.echo(json.dumps(BenchResults.model_json_schema(), indent=1))


@app.command("report")
def report_(
    results: Annotated[Path, typer.Argument(help="results.json, or its folder.")],
    out: Annotated[Path, typer.Option(help="Folder for report.md, report.html and the charts.")],
) -> None:
    """Write the reports and charts of results again."""
    for path in write_results(out, read_results(results)):
        typer.echo(str(path))


if __name__ == "__main__":
    app(prog_name="foretell bench")
