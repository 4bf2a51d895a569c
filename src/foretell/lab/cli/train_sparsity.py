"""`foretell train sparsity`: fit predictors of the neurons and heads that a token needs."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.training import interruptible
from foretell.lab.cli.quantize import CalibrationTokens, HeldBackTokens, Text
from foretell.lab.cli.sparsity import fingerprint, open_source, read_calibration_text, save_with_comparison
from foretell.lab.sparsify.predictors import (
    FittedPredictor,
    PredictorSettings,
    check_settings,
    fit_predictors,
    save_predictors,
)
from foretell.model.load.network import runs_on_kernels
from foretell.model.offload.sparsity_file import SparsityFile
from foretell.train.exits.checkpoints import digest
from foretell.train.loop.checkpoint import FOLDER
from foretell.utils.paths import require_empty


@options.with_settings(PredictorSettings())
def sparsity(
    ctx: typer.Context,
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; fitting resumes in it.")],
    settings: options.Settings = options.NO_SETTINGS,
    text: Text = None,
    calibration_tokens: CalibrationTokens = 8192,
    held_back_tokens: HeldBackTokens = 2048,
    dtype: options.Dtype = "auto",
    save_minutes: options.SaveMinutes = 10.0,
) -> None:
    """Fit predictors per layer of the neurons and heads that a token needs (Deja Vu), and measure what that costs.
    Lossy as a target, lossless as a draft of the dense model. The same command resumes interrupted gradient steps.

    foretell train sparsity smollm2-135m --sparsity 0.5 --out predicted

    foretell generate "Why is the sky blue?" --sparsity predicted
    """
    asked = PredictorSettings(**settings)
    refuse_unused(ctx, ("save_minutes",), "there are no gradient steps with --steps 0", not asked.steps)
    require_empty(out, FOLDER)
    console, source = Console(stderr=True), open_source(model, "made sparse")
    check_settings(source.config, asked)
    if asked.look_ahead and not runs_on_kernels(source.config, torch.device("cpu")):
        raise ValueError("--look-ahead needs a model that the CPU kernels run, and they do not run this one here")
    calibration_text = read_calibration_text(source, text, calibration_tokens, held_back_tokens, asked.seed, console)
    tokens = calibration_text.calibration
    read = {"the text": digest(tokens), "the model": fingerprint(source)}
    with console.status("fitting") as status, ExitStack() as stack:
        checkpoints = stack.enter_context(interruptible(ctx, out, save_minutes, read)) if asked.steps else None
        fitted = fit_predictors(source.config, source.weights, tokens, asked, status.update, checkpoints)
    save_predictors(out, [each.rule for each in fitted])
    file = SparsityFile(
        method="deja_vu", model=fingerprint(source), layers=source.config.layers, sparsity=asked.sparsity,
        thresholds=tuple((each.rule.threshold,) for each in fitted), text=calibration_text.origin,
        tokens=tokens.numel(), recall=tuple(each.neurons.own for each in fitted),
        recall_ahead=tuple(each.neurons.ahead for each in fitted if each.neurons.ahead is not None),
        recall_of_fixed_set=tuple(each.neurons.chance for each in fitted),
        block=asked.block, look_ahead=asked.look_ahead, **_of_heads(fitted, asked.head_sparsity),
    )  # fmt: skip
    save_with_comparison(file, out, model, dtype, calibration_text, console)
    shutil.rmtree(out / FOLDER, ignore_errors=True)


def _of_heads(fitted: Sequence[FittedPredictor], sparsity: float) -> dict[str, Any]:
    """The fields of `SparsityFile` for the heads."""
    rules_and_recalls = [(each.rule.heads, each.heads) for each in fitted if each.rule.heads and each.heads]
    return {
        "head_sparsity": sparsity,
        "head_thresholds": tuple(rule.threshold for rule, _ in rules_and_recalls),
        "head_recall": tuple(recall.own for _, recall in rules_and_recalls),
        "head_recall_ahead": tuple(recall.ahead for _, recall in rules_and_recalls if recall.ahead is not None),
        "head_recall_of_fixed_set": tuple(recall.chance for _, recall in rules_and_recalls),
    }
