"""`foretell bench run`: methods against plain decoding and other runtimes, in one interleaved run."""

from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.console import print_summary, progress_bar
from foretell.bench.output import write_results
from foretell.bench.peers.export import default_folder
from foretell.bench.plan import BenchPlan
from foretell.bench.questions import BUILT_IN
from foretell.bench.results import build_results
from foretell.bench.schema import BenchSettings, QuestionResult
from foretell.cli import options
from foretell.cli.bench.inputs import (
    METHODS,
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
from foretell.cli.given import refuse_unused
from foretell.cli.options import split_commas
from foretell.cli.setup import set_threads
from foretell.load import TargetOptions, resolve_dtype
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.utils.store import RunStore


def run(
    ctx: typer.Context,
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
    speculative_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON",
            help='A further method with its options, and its own draft models, for example \'{"method": "layer_skip", '
            '"model": "exits", "eagle_topk": 3}\'; repeatable.',
        ),
    ] = None,
    max_model_len: options.MaxModelLen = None,
    rope_scaling: options.RopeScaling = None,
    lora: options.Lora = None,
    pre_tokenizer: options.PreTokenizer = None,
    chat_template_date: options.ChatTemplateDate = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kv_cache_policy: options.KvCachePolicy = None,
    sparsity: options.Sparsity = None,
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
    check_peer_device(split_commas(peers), device)
    refuse_unused(ctx, ("gguf_cache",), "no --peers of llama.cpp reads GGUF files", "llama.cpp" not in peers)
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
        target=TargetOptions(
            max_model_len,
            rope_scaling,
            kv_cache_dtype,
            kv_cache_policy,
            sparsity,
            pre_tokenizer=pre_tokenizer,
            chat_template_date=chat_template_date,
            lora=lora,
        ),
    )
    named = [*split_commas(methods), *(speculative_config or ())]
    plan = BenchPlan.from_settings(settings, named, split_commas(peers), gguf_cache or default_folder())
    with resumable(out), RunStore(out, settings, QuestionResult) as store:
        bench_run = plan.create_run(plan.load_models(), repeats)
        for note in bench_run.notes:
            typer.echo(note, err=True)
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
