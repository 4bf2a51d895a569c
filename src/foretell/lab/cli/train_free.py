"""`foretell train free`: a changed model whose first layers answer alone where they are sure."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.data import open_or_generate
from foretell.cli.given import refuse_unused
from foretell.cli.setup import load_model
from foretell.lab.cli.quantize import Force, check_output, format_comparison
from foretell.lab.compress.checkpoint import tensors_of, write_checkpoint
from foretell.lab.quantize.job import Source
from foretell.model.block.decoder import Decoder
from foretell.model.load.reference import resolve_reference
from foretell.model.run.partial_pass import check_spans
from foretell.train.data.dataset import Document
from foretell.train.exits.shallow_deep import ShallowDeepSettings, shallow_quality, train_shallow_deep
from foretell.utils.unfinished import whole
from foretell.verify.comparison import Comparison

_HELD_OUT, _MOST_HELD_OUT, _COMPARED_TOKENS = 0.1, 16, 128
"""Share of the documents that are held out, the most of them, and the tokens of each that are compared."""


@options.with_settings(ShallowDeepSettings(layer=0))
def free(
    ctx: typer.Context,
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory in safetensors to write.")],
    layer: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The shallow model ends after so many layers. Default: a third."),
    ] = None,
    data_folder: options.AnswersSet = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers to write, without --data.")] = 60_000,
    settings: options.Settings = options.NO_SETTINGS,
    force: Force = False,
) -> None:
    """Train a model so that its first layers answer alone more often (FREE). LOSSY: the result is another model, whose
    answers differ.

    foretell train free smollm2-135m --layer 10 --out free

    foretell train exits free --kind shared --layers 10 --out free-exits

    foretell generate "Why is the sky blue?" --model free --method early_exit_lossy --draft-model free-exits
    """
    refuse_unused(ctx, ("tokens",), "--data names the answers", data_folder is not None)
    console = Console(file=sys.stderr)
    check_output(out, force)
    target = load_model(model)
    check_spans(target.config)
    source = Source.open(model, resolve_reference(model), "trained")
    asked = ShallowDeepSettings(layer or max(1, target.config.layers // 3), **settings)
    asked.check(target.config.layers)
    own = out.with_name(f"{out.name}-data")
    dataset = open_or_generate(data_folder, own, target, tokens=tokens, model=model, seed=asked.seed)
    count = max(1, min(len(dataset) // 2, round(_HELD_OUT * len(dataset)), _MOST_HELD_OUT))
    documents, held = ([dataset[i] for i in part] for part in dataset.split(count))
    decoder = target.checkpoint.decoder(torch.float32)
    with console.status("measuring") as status:
        before = shallow_quality(decoder, held, asked.layer)
        train_shallow_deep(
            decoder,
            documents,
            asked,
            lambda step, loss: status.update(f"step {step} of {asked.steps}, loss {loss:.3f}"),
        )
        status.update("measuring")
        after = shallow_quality(decoder, held, asked.layer)
        _write(source, decoder, out)
        comparison = _compare(source, out, held)
    depth = f"{asked.layer} of {target.config.layers} layers"
    typer.echo(
        f"{out}: the first {depth} give the whole model's token in {after.agreement:.1%} of {after.tokens:,} tokens "
        f"held out, {before.agreement:.1%} before\nLOSSY: another model than its source, on {comparison.tokens:,} "
        f"positions held out:\n{format_comparison(comparison)}\n"
        f"next: foretell train exits {out} --kind shared --layers {asked.layer} --out EXITS"
    )


def _write(source: Source, decoder: Decoder, out: Path) -> None:
    """Write the trained blocks with all else of the source; the checkpoint appears whole or not at all."""
    config = source.config
    with whole(out) as part:
        write_checkpoint(
            source, config, list(range(config.layers)), lambda i: tensors_of(config, i, decoder.block(i)), part
        )


def _compare(source: Source, out: Path, held: list[Document]) -> Comparison:
    """The changed model beside its source on the first tokens of texts held out."""
    texts = [d.tokens[:_COMPARED_TOKENS] for d in held if len(d.tokens) >= _COMPARED_TOKENS]
    if not texts:
        shortest = min(len(d.tokens) for d in held)
        texts = [d.tokens[:shortest] for d in held]
    return source.compare_with(out, torch.stack([torch.from_numpy(text).long() for text in texts]))
