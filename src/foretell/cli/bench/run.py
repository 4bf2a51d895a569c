"""`foretell bench run`: methods against plain decoding and other runtimes, in one interleaved run."""

import re
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.console import print_summary
from foretell.bench.output import write_results
from foretell.bench.peers.export import default_folder
from foretell.bench.plan import BenchPlan
from foretell.bench.questions import BUILT_IN, in_turns
from foretell.bench.results import build_results
from foretell.bench.schema import BenchSettings, QuestionResult
from foretell.bench.verdict import verdict
from foretell.cli import options
from foretell.cli.bench.inputs import (
    METHODS,
    QUICK_METHODS,
    Categories,
    Device,
    DraftModel,
    Folder,
    Length,
    Methods,
    ModelName,
    PerCategory,
    References,
    Tasks,
    Threads,
    check_peer_device,
    load_selected_questions,
    resumable,
)
from foretell.cli.given import is_given, refuse_unused
from foretell.cli.options import split_commas
from foretell.cli.progress import progress_bar
from foretell.cli.setup import set_threads, spinner
from foretell.core.target_options import TargetOptions
from foretell.load import resolve_dtype
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.utils.store import RunStore

_QUICK_TOKENS = 64
"""Longest answer of a quick run."""
_QUICK_SECONDS = 150.0
"""After which a quick run asks no further question."""
_SHOWN_FILES = "report.md", "report.html", "speedup.png"


@options.with_target(lossy=True)
def run(
    ctx: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results; an interrupted run there is continued. --quick: foretell-bench-MODEL if none is "
            "given.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="About three minutes: short answers, each once, to as many questions as fit; no peak memory. Options "
            "that are given keep their values.",
        ),
    ] = False,
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
            help="Comma-separated: transformers, llama.cpp, xllamacpp, openvino, onnxruntime, vllm, or one of their "
            "modes, e.g. llama.cpp-plain/q8_0, xllamacpp-ngram-mod; `foretell bench peers install` installs the last "
            "four."
        ),
    ] = "",
    draft_model: DraftModel = None,
    speculative_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON",
            help='A further method with its options, and its own draft models, for example \'{"method": "layer_skip", '
            '"model": "exits", "eagle_topk": 3}\'; repeatable.',
        ),
    ] = None,
    target: options.Target = options.NO_TARGET,
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
    batch: Annotated[int, typer.Option(min=1, help="Questions that a method answers at the same time.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Times each question is answered; times are medians.")] = 3,
    threads: Threads = None,
    target_memory_limit: options.MemoryLimit = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each competitor in a process of its own.")] = True,
    gguf_cache: Folder = None,
) -> None:
    """Measure methods on questions, interleaved with other runtimes; writes results.json and report.md."""
    if out is None:
        if not quick:
            raise ValueError("no folder for the results: give one with --out, or --quick for a short run")
        out = Path(f"foretell-bench-{_file_name(model)}")
    chosen = is_given(ctx, "methods")
    if quick:
        methods = methods if chosen else QUICK_METHODS
        max_new_tokens = max_new_tokens if is_given(ctx, "max_new_tokens") else _QUICK_TOKENS
        repeats = repeats if is_given(ctx, "repeats") else 1
        memory = memory and is_given(ctx, "memory")
    check_peer_device(split_commas(peers), device)
    converts = any(name in peers for name in ("llama.cpp", "onnxruntime", "vllm"))
    refuse_unused(ctx, ("gguf_cache",), "no --peers of llama.cpp, onnxruntime or vllm is named", not converts)
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
        batch=batch,
        remember=remember,
        draft_model=draft_model,
        references=tuple(str(r) for r in reference or ()),
        memory_limit=None if target_memory_limit is None else target_memory_limit << 20,
        target=TargetOptions(**target),
    )
    named, folder = split_commas(methods), gguf_cache or default_folder()
    required = [*(named if chosen else ()), *(speculative_config or ())]
    plan = BenchPlan.from_settings(settings, required, split_commas(peers), folder, () if chosen else named)
    with resumable(out), RunStore(out, settings, QuestionResult) as store:
        with spinner(f"loading {model}"):
            bench_run = plan.create_run(plan.load_models(), repeats)
        for note in bench_run.notes:
            typer.echo(note, err=True)
        if store.records:
            typer.echo(f"{out} has {len(store.records):,} answers of an earlier run, which count; it goes on", err=True)
        questions = in_turns(selected.questions) if quick else selected.questions
        with progress_bar(len(questions) * bench_run.answers_per_question) as progress:
            bench_run.run(questions, store, progress, _QUICK_SECONDS if quick else inf)
        peaks = plan.measure_memory(bench_run, questions) if memory else {}
        wanted = {q.id for q in questions}
        kept = [r for r in store.records if r.question in wanted and r.repeat < repeats]
        results = build_results(kept, settings, {c.name: c.lossless for c in bench_run.competitors}, peaks)
        paths = write_results(out, results)
    print_summary(results)
    answered = len({r.question for r in kept})
    if answered < len(questions):
        typer.echo(f"{answered} of {len(questions)} questions were asked; the same command asks further ones.")
    typer.echo(verdict(results))
    for path in paths:
        if path.name in _SHOWN_FILES:
            typer.echo(path)
    if selected.problems:
        raise typer.Exit(1)


def _file_name(reference: str) -> str:
    """A reference of a model as a part of a file name: its last part."""
    return re.sub(r"[^\w.-]+", "-", reference.rstrip("/").rpartition("/")[2])
