"""`foretell quantize`: write a model with few bits per weight, and say how far it is from its source."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.lab.quantize import METHODS
from foretell.lab.quantize.base import Quantizer
from foretell.lab.quantize.calibration import (
    LENGTH,
    CalibrationText,
    check_token_counts,
    generated_documents,
    split_text,
    text_documents,
)
from foretell.lab.quantize.gguf_grids import GGUF_GRIDS
from foretell.lab.quantize.gptq import GPTQ
from foretell.lab.quantize.job import Source, Target, plan, quantize_model
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.retrieval.corpus import find_files
from foretell.utils.names import unknown
from foretell.verify.comparison import Comparison

app = typer.Typer(pretty_exceptions_enable=False)
_LINE_INTERVAL = 10.0
"""Seconds between lines of progress."""

# Options that `foretell compress` has, too.
Text = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="Text to calibrate on and to compare on; repeatable. Default: the model writes it."
    ),
]
CalibrationTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of calibration.")]
HeldBackTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the comparison.")]
TextSeed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the text that the model writes.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]


@app.command()
def quantize(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="PATH", help="A .gguf file, or a directory in safetensors, to write.")],
    model: options.SourceModel = DEFAULT_MODEL,
    method: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(METHODS)}.")] = "gptq",
    kind: Annotated[
        str, typer.Option("--type", metavar="NAME", help=f"{', '.join(GGUF_GRIDS)}; in a directory Q4_0, Q4_1, Q8_0.")
    ] = "Q4_0",
    group_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Inputs per scale in a directory. [default: 128, or fewer if it must]"),
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option("--act-order/--no-act-order", help="GPTQ: inputs of large activations first. [default: yes]"),
    ] = None,
    text: Text = None,
    calibration_tokens: CalibrationTokens = 16384,
    held_back_tokens: HeldBackTokens = 4096,
    seed: TextSeed = 0,
    force: Force = False,
    as_json: options.Json = False,
) -> None:
    """Quantise a model: round to nearest, GPTQ, AWQ or HQQ.

    GGUF files are for foretell and llama.cpp; directories, in the format of compressed-tensors, also for transformers
    and vLLM. The report compares the next-token distributions with the source's on text held back from calibration.
    """
    console, started = Console(file=sys.stderr), time.perf_counter()
    quantizer = _quantizer(method, act_order)
    refuse_unused(ctx, ("seed",), "--text names the text", bool(text))
    check_output(out, force)
    source = Source.open(model, resolve_reference(model))
    target = plan(source, out, kind, group_size)
    wanted = calibration_tokens if quantizer.calibrated else 0
    calibration = calibration_text(source, text or [], wanted, held_back_tokens, seed, console)
    compared = quantize_model(
        source, quantizer, target, calibration, block_progress(console, source.config.layers, "quantised")
    )
    size = out.stat().st_size if out.is_file() else sum(f.stat().st_size for f in out.iterdir())
    if as_json:
        summary = {"out": str(out), "method": method, "type": kind, "bytes": size, "notes": target.notes}
        typer.echo(json.dumps(summary | asdict(compared)))
    else:
        typer.echo(_summary(target, method, compared, calibration, size, time.perf_counter() - started))


def _quantizer(method: str, act_order: bool | None) -> Quantizer:
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if act_order is None:
        return METHODS[method]()
    if method != "gptq":
        raise ValueError(f"--act-order and --no-act-order are for --method gptq, found {method}")
    return GPTQ(act_order=act_order)


def block_progress(console: Console, layers: int, what: str) -> Callable[[int], None]:
    """Prints how many blocks are done, at most every ten seconds and at the end."""
    last = 0.0

    def report(done: int) -> None:
        nonlocal last
        if time.perf_counter() - last >= _LINE_INTERVAL or done == layers:
            last = time.perf_counter()
            console.print(f"{done} of {layers} blocks {what}", highlight=False, soft_wrap=True)

    return report


def check_output(out: Path, force: bool, besides: str = "") -> None:
    """Refuse an output that exists, unless it is replaced. `besides`: a name that may be in it, of what an interrupted
    run left there.

    Raises:
        ValueError: it exists, or its directory does not.
    """
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}: no such directory; make it, or write elsewhere")
    if not out.exists() or (besides and out.is_dir() and all(path.name == besides for path in out.iterdir())):
        return
    if not force:
        raise ValueError(f"{out}: exists already; name another output, or replace it with --force")
    if (out.suffix == ".gguf") != out.is_file():
        raise ValueError(f"{out}: a {'directory' if out.is_dir() else 'file'} of this name exists; name another output")
    if out.is_dir() and not (out / "config.json").is_file():
        raise ValueError(f"{out}: no model is in this directory, so it is not replaced; name another output")


def calibration_text(
    source: Source, files: list[Path], calibration: int, held_back: int, seed: int, console: Console
) -> CalibrationText:
    """Calibration and held-back sequences of the user's files, or of what the model writes.

    Raises:
        ValueError: there is not enough text, or the model writes none.
    """
    length = min(LENGTH, source.config.context)
    check_token_counts(calibration, held_back, length)
    if files:
        documents = text_documents(find_files(files), source.codec)
        return split_text(documents, calibration, held_back, length, ", ".join(map(str, files)))
    if source.codec.chat_template is None:
        raise ValueError(f"{source.name}: a model without a chat template writes no text to calibrate on; give --text")
    console.print(f"{source.name} writes {calibration + held_back:,} tokens of text", highlight=False, soft_wrap=True)
    # Questions count too, but are not known before; whole documents are kept.
    documents = generated_documents(load(source.name), calibration + 2 * held_back, seed)
    return split_text(documents, calibration, held_back, length, "text of the model")


def _summary(
    target: Target, method: str, comparison: Comparison, text: CalibrationText, size: int, seconds: float
) -> str:
    lines = [
        f"{target.path}: {target.kind} by {method}, {size / 1e6:,.1f} MB, {seconds:,.0f} s",
        *target.notes,
        f"compared with the source on {comparison.tokens:,} positions held back ({text.origin}):",
        format_comparison(comparison),
    ]
    return "\n".join(lines)


def format_comparison(comparison: Comparison) -> str:
    """A comparison in three lines."""
    return (
        f"  KL divergence {comparison.kl:.4f} nats (99th percentile {comparison.kl_99:.3f}), total variation "
        f"{comparison.total_variation:.4f}\n"
        f"  same most probable token {comparison.same_top:.1%}\n"
        f"  perplexity {comparison.quantized_perplexity:.3f}, of the source {comparison.perplexity:.3f} "
        f"({comparison.quantized_perplexity / comparison.perplexity:.4f} times)"
    )
