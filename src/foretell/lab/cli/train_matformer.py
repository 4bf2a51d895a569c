"""`foretell train matformer`: order the neurons of a model so that every prefix of them is a network of its own."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli.given import refuse_unused
from foretell.lab.cli.quantize import check_output, format_comparison
from foretell.lab.cli.sparsity import open_source, read_calibration_text
from foretell.lab.quantize.evaluate import compare
from foretell.lab.sparsify.nested import NestedSettings, write_nested
from foretell.load import open_checkpoint

_DEFAULTS = NestedSettings()


def matformer(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a directory, a .gguf file, or a hub id.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory in safetensors to write.")],
    shares: Annotated[
        str, typer.Option(metavar="LIST", help="Sizes that are trained together, as shares of all neurons.")
    ] = ",".join(f"{s:g}" for s in _DEFAULTS.shares),
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Gradient steps per layer; 0: neurons are ordered only, and no answer changes."
        ),
    ] = _DEFAULTS.steps,
    lr: Annotated[float, typer.Option(metavar="X", min=0, help="Learning rate of these steps.")] = _DEFAULTS.rate,
    extract: Annotated[
        float, typer.Option(metavar="SHARE", help="Write this share of the neurons only, as a smaller model.")
    ] = _DEFAULTS.extract,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Text to train on and to compare on; repeatable. Default: the model writes it."
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to train on.")] = 4096,
    held_back_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the comparison.")] = 2048,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of text and batches.")] = _DEFAULTS.seed,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
) -> None:
    """Write a model with nested feed-forward networks (MatFormer). Its first neurons draft for all of them:

    foretell train matformer smollm2-135m --out nested

    foretell generate "Why is the sky blue?" --model nested --method matformer_draft
    """
    refuse_unused(ctx, ("lr",), "--steps 0 only orders neurons", not steps)
    console = Console(file=sys.stderr)
    check_output(out, force)
    settings = NestedSettings(_parse_shares(shares), steps, lr, extract=extract, seed=seed)
    source = open_source(model, "nested")
    calibration_text = read_calibration_text(source, text, calibration_tokens, held_back_tokens, seed, console)
    with console.status("reading activations") as status:
        size = write_nested(
            source, calibration_text.calibration, settings, out,
            lambda done: status.update(f"{done} of {source.config.layers} blocks"),
        )  # fmt: skip
    opened = open_checkpoint(out)
    compared = compare((source.config, source.weights), (opened.config, opened.weights), calibration_text.held_back)
    typer.echo(
        f"{out}: {size} of {source.config.ffn} neurons per layer, ordered"
        f"{f', {steps} steps per layer' if steps else ''}; compared with the source on {compared.tokens:,} positions "
        f"held back:\n{format_comparison(compared)}"
    )


def _parse_shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--shares: numbers with commas between were expected, found {text!r}") from None
