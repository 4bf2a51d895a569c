"""What the commands on sparse models share: calibration text, the comparison with the dense model, and the report."""

from pathlib import Path

import typer
from rich.console import Console

from foretell.api import Model
from foretell.lab.cli.quantize import calibration_text
from foretell.lab.quantize.calibration import CalibrationText
from foretell.lab.quantize.job import Source
from foretell.load import load
from foretell.model.block.sparsity import FirstNeurons, check_sparse
from foretell.model.load.checkpoint import model_fingerprint
from foretell.model.load.reference import resolve_reference
from foretell.model.offload.sparsity_file import SparsityFile, SparsityLoss
from foretell.verify.precision import compare_precision

LEAST_TOKENS = 512
"""Fewest tokens of calibration."""


def open_source(model: str, what: str) -> Source:
    """Open the model that becomes sparse; `what`: what is done with it.

    Raises:
        ValueError: it cannot have sparse feed-forward networks.
    """
    source = Source.open(model, resolve_reference(model), what)
    check_sparse(source.config, [FirstNeurons(source.config.ffn_of(i)) for i in range(source.config.layers)])
    return source


def read_calibration_text(
    source: Source, text: list[Path] | None, calibration: int, held_back: int, seed: int, console: Console
) -> CalibrationText:
    """The text to calibrate on and the text held back.

    Raises:
        ValueError: there is too little of it, or too little was asked for.
    """
    if calibration < LEAST_TOKENS:
        raise ValueError(
            f"--calibration-tokens {calibration}: too short a text to calibrate on; give at least {LEAST_TOKENS} tokens"
        )
    return calibration_text(source, text or [], calibration, held_back, seed, console)


def save_with_comparison(
    file: SparsityFile, folder: Path, model: str, dtype: str, text: CalibrationText, console: Console
) -> SparsityFile:
    """Write the description, run the sparse model on the text held back, and write it again with the comparison."""
    file.save(folder)
    with console.status("comparing the sparse model with the dense one"):
        dense, sparse = load(model, dtype), load(model, dtype, sparsity=folder)
        comparison = compare_precision(dense, sparse, text.held_back)
    loss = SparsityLoss(
        tokens=comparison.tokens,
        kl=comparison.kl,
        same_top=comparison.same_top,
        perplexity=comparison.perplexity,
        sparse_perplexity=comparison.quantized_perplexity,
    )
    compared = file.model_copy(update={"loss": loss})
    compared.save(folder)
    typer.echo(_report(compared, folder, sparse))
    return compared


def fingerprint(source: Source) -> str:
    """The fingerprint of a model; see `Checkpoint.fingerprint`."""
    return model_fingerprint(source.config, source.weights)


def _report(file: SparsityFile, folder: Path, sparse: Model) -> str:
    assert file.loss is not None
    counts = getattr(sparse.network, "neuron_counts", None)
    chosen = 0.0 if counts is None else counts.chosen_share()
    lines = [f"{folder}: {file.method} of {sparse.name}, {file.tokens:,} tokens of {file.text}"]
    heads = getattr(sparse.network, "head_counts", None)
    if chosen:
        lines.append(f"a token reads {chosen:.1%} of the neurons")
    if file.head_thresholds and heads is not None:
        lines[-1] += f" and {heads.chosen_share():.1%} of the query heads"
    if file.recall:
        lines.append(_recall("neurons", file.recall, file.recall_ahead, file.recall_of_fixed_set))
    if file.head_recall:
        lines.append(_recall("heads", file.head_recall, file.head_recall_ahead, file.head_recall_of_fixed_set))
    p = file.loss
    lines += [
        f"LOSSY, on {p.tokens:,} positions held back: KL {p.kl:.4f} nats, {p.same_top:.1%} equal top tokens, "
        f"perplexity {p.perplexity:.3f} -> {p.sparse_perplexity:.3f}",
        f"as the target: foretell generate ... --sparsity {folder}",
        "as a lossless draft: foretell generate ... --method sparse_mlp_draft --speculative-config "
        f'\'{{"sparsity": "{folder}"}}\'',
    ]
    return "\n".join(lines)


def _recall(what: str, own: tuple[float, ...], ahead: tuple[float, ...], fixed: tuple[float, ...]) -> str:
    return (
        f"recall of the {what} to read: {_mean(own)} (from the layer before: {_mean(ahead)}; of a fixed set: "
        f"{_mean(fixed)})"
    )


def _mean(shares: tuple[float, ...]) -> str:
    return f"{sum(shares) / len(shares):.1%}" if shares else "none"
