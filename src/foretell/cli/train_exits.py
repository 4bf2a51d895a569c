"""`foretell train exits`: fit output heads after some of a model's layers."""

import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from foretell.api import Model
from foretell.cli import options
from foretell.cli.data import open_or_generate
from foretell.cli.given import refuse_unused
from foretell.cli.setup import load_model
from foretell.cli.training import interruptible
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.train.data.features import parse_hidden_layers
from foretell.train.exits.checkpoints import digest
from foretell.train.exits.classifiers import HaltingSettings
from foretell.train.exits.job import ExitSettings, default_layers, fit_exits, quality_table, save_exits
from foretell.train.exits.joint import JointSettings, parse_weights
from foretell.train.loop.checkpoint import FOLDER
from foretell.utils.paths import require_empty

_DATA = "data"
"""Data set that is written in the folder of the exits where none is named."""


@options.with_settings(ExitSettings())
@options.with_settings(HaltingSettings(), "classifiers")
def exits(
    ctx: typer.Context,
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the exits; training resumes in it.")],
    data_folder: options.AnswersSet = None,
    layers: Annotated[
        str, typer.Option(metavar="LIST", help="Exits after so many layers, as 6,12,18. Default: every tenth.")
    ] = "",
    settings: options.Settings = options.NO_SETTINGS,
    blocks_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Begin the blocks as the last ones of this draft model, instead of the model's.",
        ),
    ] = None,
    joint: Annotated[
        bool,
        typer.Option("--joint", help="One such network for all exits, trained together."),
    ] = False,
    exit_weights: Annotated[
        str, typer.Option(metavar="LIST", help="Weights of their losses with --joint: uniform, linear, or numbers.")
    ] = "uniform",
    weight_warmup: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the steps in which the weights of all but the deepest exit rise from 0."
        ),
    ] = 0.0,
    classifiers: options.Settings = options.NO_SETTINGS,
    dtype: options.Dtype = "auto",
    save_minutes: options.SaveMinutes = 10.0,
) -> None:
    """Fit exits, heads after some of a model's layers, on its own answers: for the methods layer_skip and
    early_exit_lossy. The same command resumes interrupted gradient steps.

    foretell train exits smollm2-135m --out exits

    foretell generate "Why is the sky blue?" --method layer_skip --draft-model exits
    """
    steps, inner, blocks = settings["steps"], settings["inner"], settings["blocks"]
    refuse_unused(ctx, ("rate", "save_minutes"), "there are no gradient steps without --steps", not steps)
    refuse_unused(ctx, ("exit_weights", "weight_warmup"), "--joint trains the exits together", not joint)
    agreement = classifiers["halting"] == "agreement"
    refuse_unused(ctx, ("oracle", "penalty", "width"), "--halting agreement asks for no best depth", agreement)
    if inner and not steps:
        raise ValueError(f"--inner {inner}: a feed-forward network is trained by gradient; give --steps too")
    if joint and not inner:
        raise ValueError("--joint trains a feed-forward network that all exits share; give its width with --inner")
    if blocks and (inner or joint or settings["kind"] != "linear" or not steps):
        raise ValueError(
            f"--blocks {blocks}: decoder blocks are trained by gradient, with a linear map; give --steps, and neither "
            "--inner nor --kind shared"
        )
    require_empty(out, FOLDER, *((_DATA,) if data_folder is None else ()))
    console = Console(stderr=True)
    target = load_model(model, dtype)
    chosen = parse_hidden_layers(layers, target.config.layers, "--layers") if layers else ()
    if blocks_from is not None and not blocks:
        raise ValueError(f"--from {blocks_from}: a draft model begins decoder blocks; say how many with --blocks")
    if blocks and len(chosen) != 1:
        raise ValueError(f"--blocks {blocks}: one exit may have decoder blocks; name its layer, as --layers 6")
    dataset = open_or_generate(
        data_folder, out / _DATA, target, tokens=settings["tokens"], model=model, dtype=dtype, seed=settings["seed"]
    )
    which = chosen or default_layers(target.config.layers)
    exit_settings = ExitSettings(
        which,
        **settings,
        joint=JointSettings(parse_weights(exit_weights, which), weight_warmup) if joint else None,
        draft_model=None if blocks_from is None else _draft_model(target, blocks_from),
        halting=HaltingSettings(**classifiers),
    )
    read = {
        "the data": digest(torch.from_numpy(np.concatenate([dataset[i].tokens for i in range(len(dataset))]))),
        "the model": target.checkpoint.fingerprint(),
    }
    with console.status("reading the data set") as status, ExitStack() as stack:
        checkpoints = stack.enter_context(interruptible(ctx, out, save_minutes, read)) if steps else None
        fitted = fit_exits(target, dataset, exit_settings, status.update, checkpoints)
    save_exits(out, fitted, shlex.join(["foretell", *sys.argv[1:]]))
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    typer.echo("\n".join(quality_table(fitted.quality)))
    console.print(
        f"{out}: {len(fitted.quality)} exits, fitted on {fitted.tokens:,} tokens, measured on {fitted.held_out:,}; use "
        f"them with --method layer_skip --draft-model {out}", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _draft_model(target: Model, folder: Path) -> DraftNetwork:
    """The draft model whose blocks an exit begins with."""
    speculator = target.speculator(folder)
    if not isinstance(speculator, DraftNetwork):
        raise ValueError(
            f"--from {folder}: a speculator of kind {speculator.kind}; give one of `foretell train draft_model`"
        )
    return speculator
