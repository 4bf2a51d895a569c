"""`foretell compress`: write a pruned, low-rank, shallower or narrower model with a card that says what it costs."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.lab.cli import quantize
from foretell.lab.compress import METHODS
from foretell.lab.compress.card import Card
from foretell.lab.compress.job import compress_model, plan
from foretell.lab.quantize.calibration import CalibrationText
from foretell.lab.quantize.job import Source
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.retrieval.corpus import find_files

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def compress(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory in safetensors to write.")],
    model: options.SourceModel = DEFAULT_MODEL,
    method: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(METHODS)}.")] = "sparsegpt",
    sparsity: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Weights that become zero; of shortgpt, blocks that are left out; of slicegpt, hidden size; "
            "of llm_pruner, numbers that are removed.",
        ),
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(metavar="N:M", help="Keep N of every M consecutive weights, such as 2:4.")
    ] = None,
    rank_share: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="svd, asvd, svd_llm, laser: share of the rank that is kept."),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, max=8, help="sparsegpt: round the weights that stay to so many bits, too."),
    ] = None,
    allocation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Unequal blocks: owl (pruning), loss (svd_llm). [default: equal]")
    ] = None,
    text: quantize.Text = None,
    calibration_tokens: quantize.CalibrationTokens = 16384,
    held_back_tokens: quantize.HeldBackTokens = 4096,
    seed: quantize.TextSeed = 0,
    force: quantize.Force = False,
    as_json: options.Json = False,
) -> None:
    """Compress a model by pruning, low rank, fewer blocks or a smaller hidden size. Lossy: the result is another model.

    The directory is for foretell and transformers; its card says what was done, and what it costs on text held back
    from calibration. An interrupted run goes on where it was. As a draft model of its source it changes no answer:

        foretell compress DIR --method wanda --pattern 2:4 --out small

        foretell generate "Hello" --model DIR --method draft_model --draft-model small
    """
    console, started = Console(file=sys.stderr), time.perf_counter()
    refuse_unused(ctx, ("seed",), "--text names the text", bool(text))
    quantize.check_output(out, force)
    if out.suffix == ".gguf":
        raise ValueError(f"{out}: compress writes a directory; quantise that into a .gguf file with foretell quantize")
    path = resolve_reference(model)
    source = Source.open(model, path, "compressed")
    chosen = plan(source, method, sparsity, pattern, rank_share, bits, allocation)
    wanted = calibration_tokens if chosen.calibrated else 0

    def read_text() -> CalibrationText:
        return quantize.calibration_text(source, text or [], wanted, held_back_tokens, seed, console)

    job = {
        "method": [chosen.method, chosen.amount],
        "source": _stamps([path]),
        "text": [_stamps(text or []), wanted, held_back_tokens, seed],
    }
    progress = quantize.block_progress(console, source.config.layers, "done")
    card = compress_model(source, chosen, job, read_text, out, progress)
    size = sum(file.stat().st_size for file in out.iterdir())
    if as_json:
        typer.echo(json.dumps({"out": str(out), "bytes": size} | asdict(card)))
    else:
        typer.echo(_summary(out, card, size, time.perf_counter() - started))


def _stamps(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of files."""
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in find_files(paths)]


def _summary(out: Path, card: Card, size: int, seconds: float) -> str:
    return "\n".join([
        f"{out}: {card.method}, {card.amount}, {card.zeros:.1%} zeros in the blocks, {size / 1e6:,.1f} MB, "
        f"{seconds:,.0f} s",
        card.speed,
        f"compared with the source on {card.comparison.tokens:,} positions held back ({card.comparison_text}):",
        quantize.format_comparison(card.comparison),
    ])  # fmt: skip
