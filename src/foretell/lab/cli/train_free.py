"""`foretell train free`: a changed model whose first layers answer alone where they are sure."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from jaxtyping import Bool, Int
from rich.console import Console

from foretell.cli import options
from foretell.cli.data import open_or_generate
from foretell.cli.given import refuse_unused
from foretell.cli.setup import load_model
from foretell.cli.training import interruptible
from foretell.lab.cli.quantize import Force, check_output, format_comparison
from foretell.lab.compress.checkpoint import tensors_of, write_checkpoint
from foretell.lab.quantize.job import Source
from foretell.model.block.decoder import Decoder
from foretell.model.load.reference import resolve_reference
from foretell.model.run.partial_pass import check_spans
from foretell.train.data.dataset import Document
from foretell.train.exits.checkpoints import digest
from foretell.train.exits.depth_quality import depth_quality
from foretell.train.exits.from_start import FromStartSettings, train_from_start
from foretell.train.loop.checkpoint import FOLDER
from foretell.utils.unfinished import whole
from foretell.verify.comparison import Comparison

_FREE = FromStartSettings(
    steps=100, rate=1e-4, batch=1024, sequence=512, exit_loss="linear", distillation=0.5, exits=(1,)
)
"""The losses after the first layers and after all are weighted by their numbers."""
_HELD_OUT, _MOST_HELD_OUT, _COMPARED_TOKENS = 0.1, 16, 128
"""Share of the documents that are held out, the most of them, and the tokens of each that are compared."""


@options.with_settings(_FREE, only=("steps", "rate", "batch", "distillation", "seed"))
def free(
    ctx: typer.Context,
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory in safetensors; training resumes in it.")],
    layer: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The shallow model ends after so many layers. Default: a third."),
    ] = None,
    data_folder: options.AnswersSet = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers to write, without --data.")] = 60_000,
    settings: options.Settings = options.NO_SETTINGS,
    save_minutes: options.SaveMinutes = 10.0,
    force: Force = False,
) -> None:
    """Train a model so that its first layers answer alone more often (FREE). LOSSY: the result is another model, whose
    answers differ. The same command resumes an interrupted training.

    foretell train free smollm2-135m --layer 10 --out free

    foretell train exits free --kind shared --layers 10 --out free-exits

    foretell generate "Why is the sky blue?" --model free --method early_exit_lossy --draft-model free-exits
    """
    refuse_unused(ctx, ("tokens",), "--data names the answers", data_folder is not None)
    console = Console(file=sys.stderr)
    check_output(out, force, besides=FOLDER)
    target = load_model(model)
    check_spans(target.config)
    source = Source.open(model, resolve_reference(model), "trained")
    layers = target.config.layers
    shallow = max(1, layers // 3) if layer is None else layer
    if not 1 <= shallow < layers:
        raise ValueError(f"--layer {shallow}: the model has {layers} layers; give 1 to {layers - 1}")
    own = out.with_name(f"{out.name}-data")
    dataset = open_or_generate(data_folder, own, target, tokens=tokens, model=model, seed=settings["seed"])
    count = max(1, min(len(dataset) // 2, round(_HELD_OUT * len(dataset)), _MOST_HELD_OUT))
    documents, held = ([dataset[i] for i in part] for part in dataset.split(count))
    text, learn = _answers(documents)
    asked = replace(_FREE, **settings, exits=(shallow,), sequence=min(_FREE.sequence, settings["batch"], len(text) - 1))
    decoder = target.checkpoint.decoder(torch.float32)

    def agreement() -> float:
        texts = [torch.from_numpy(d.tokens[: _FREE.sequence]).long() for d in held]
        return depth_quality(decoder, texts, (shallow, layers)).agreement[0]

    with console.status("measuring") as status:
        read = {"the text": digest(text), "the model": target.checkpoint.fingerprint()}
        before = agreement()
        with interruptible(ctx, out, save_minutes, read) as checkpoints:
            train_from_start(
                decoder, text, asked,
                on_step=lambda step, loss: status.update(f"step {step} of {asked.steps}, loss {loss:.3f}"),
                learn=learn, blocks_only=True, checkpoints=checkpoints,
            )  # fmt: skip
        status.update("measuring")
        after = agreement()
        _write(source, decoder, out)
        comparison = _compare(source, out, held)
    typer.echo(
        f"{out}: the first {shallow} of {layers} layers give the whole model's token in {after:.1%} of the tokens held "
        f"out, {before:.1%} before\nLOSSY: another model than its source, on {comparison.tokens:,} "
        f"positions held out:\n{format_comparison(comparison)}\n"
        f"next: foretell train exits {out} --kind shared --layers {shallow} --out EXITS"
    )


def _answers(documents: Sequence[Document]) -> tuple[Int[torch.Tensor, " n"], Bool[torch.Tensor, " n"]]:
    """Documents one after the other, and the tokens whose successors are of an answer."""
    learn = list[np.ndarray]()
    for document in documents:
        at = np.arange(len(document.tokens))
        learn.append((at >= document.start - 1) & (at < len(at) - 1))
    text = np.concatenate([document.tokens for document in documents])
    return torch.from_numpy(text.astype(np.int64)), torch.from_numpy(np.concatenate(learn))


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
