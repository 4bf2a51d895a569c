"""`foretell bench step`: the time of one pass of the target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from foretell.api import Model
from foretell.bench import step as step_bench
from foretell.bench.console import print_step_report
from foretell.bench.machine import describe_machine, measure_bandwidth
from foretell.bench.own_backend import OwnForwardBackend
from foretell.bench.peers import registry
from foretell.bench.peers.export import default_folder
from foretell.bench.questions import BUILT_IN, load_questions
from foretell.bench.random_file import random_model_file
from foretell.bench.random_model import random_models
from foretell.cli.bench.inputs import (
    Device,
    Folder,
    ModelName,
    Threads,
    check_peer_device,
    parse_counts,
    print_or_write,
)
from foretell.cli.garbage import freeze_garbage_collector
from foretell.cli.given import refuse_unused
from foretell.cli.options import split_commas
from foretell.cli.setup import load_model, set_threads, spinner
from foretell.model.load.native import finish_writing
from foretell.model.load.network import parse_device
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.utils.paths import require_file_place

_CONTEXT_MARGIN = 64
"""Cache slots of a peer beyond the tokens of a step."""


def step(
    ctx: typer.Context,
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
            help="With --shape: write random weights of this type (bf16, Q8_0, Q4_0, Q4_1, Q4_K or IQ4_NL) to a "
            "GGUF file once, and load it."
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
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all samples to this file; - prints them and no table.")
    ] = None,
) -> None:
    """Time one pass of the target over a few new tokens, interleaved with other runtimes; medians and ratios.

    The bytes of a pass are compared with the measured memory bandwidth. On CUDA passes are timed with and without
    graphs.
    """
    refuse_unused(ctx, ("model",), "--shape names random weights in place of a model", shape is not None)
    refuse_unused(ctx, ("rows",), "--no-engine times single passes only", not engine)
    reads_files = weights or "llama.cpp" in peers
    refuse_unused(ctx, ("gguf_cache",), "neither --weights nor --peers llama.cpp needs GGUF files", not reads_files)
    require_file_place(json_file)
    count, sizes, batches = set_threads(threads), parse_counts(tokens, "--tokens"), parse_counts(rows, "--rows")
    peer_names = split_commas(peers)
    check_peer_device(peer_names, device)
    registry.require_forward(peer_names)
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
    freeze_garbage_collector()
    backends = registry.load_forward_backends(peer_names, peer_settings)
    backends = [*(own for m in models for own in OwnForwardBackend.from_model(m)), *backends]
    prefix = _prefix_tokens(models[0], context, random=shape is not None)
    bandwidth = measure_bandwidth(torch_device)
    with spinner("warming up") as progress:
        passes = step_bench.time_passes(backends, prefix, sizes, repeats, progress)
        plain, lookup = step_bench.time_engines(models, prefix, batches, repeats, progress) if engine else ({}, [])
    passes, throughput = step_bench.add_bytes(passes, models, context), step_bench.median_throughput(plain)
    goals = step_bench.ratio_goals(passes, throughput, lookup) if torch_device.type == "cpu" else []
    report = step_bench.StepReport(
        model=shape or model, context=context, threads=count, device=device, bandwidth=bandwidth,
        machine=describe_machine(device),
        passes=tuple(passes), throughput=tuple(throughput), ratio_goals=tuple(goals),
    )  # fmt: skip
    print_or_write(lambda: print_step_report(report), json_file, lambda: report.model_dump_json(indent=1))


def _load_models(reference: str, shape: str | None, precisions: Sequence[str], device: str) -> list[Model]:
    """The model in every precision, or random ones of a shape."""
    if shape is None:
        models = [load_model(reference, p, device) for p in precisions]
        finish_writing()
        return models
    return random_models(shape, ["bfloat16" if p == "auto" else p for p in precisions], parse_device(device))


def _prefix_tokens(model: Model, length: int, random: bool) -> list[int]:
    """Cached tokens before a pass: the built-in questions, or random tokens for a random model."""
    if random:
        return [int(t) for t in np.random.default_rng(0).integers(model.config.vocab, size=length)]
    tokens = model.codec.encode(" ".join(t for q in load_questions(BUILT_IN).questions for t in q.turns))
    return (tokens * (length // len(tokens) + 1))[:length]
