"""`foretell evaluate`: how far the numbers of a dtype are from the model's exact ones."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.core.target_options import PLAIN_TARGET

if TYPE_CHECKING:
    import torch

    from foretell.api import Model

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@options.with_settings(PLAIN_TARGET, "target", ("kv_cache_dtype", "kv_cache_policy", "sparsity"))
def evaluate(
    ctx: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    dtype: Annotated[
        str, typer.Option(metavar="NAMES", help="Dtypes to compare, with commas between; see `generate`.")
    ] = "auto",
    target: options.Target = options.NO_TARGET,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="N",
            min=1,
            help="With --kv-cache-policy: tokens of a sequence that are its prompt; the others are decoded and "
            "compared. Default: half of them.",
        ),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="NAME", help="Dtype of the exact model; its cache is as it computes.")
    ] = "float32",
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to compare on; repeatable. Default: the model writes it."),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to compare on.")] = 4096,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of a sequence.")] = 512,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the text that the model writes.")] = 0,
    device: options.Device = "cpu",
    as_json: options.Json = False,
) -> None:
    """Compare the next-token distributions of a dtype, and of a KV cache, with the model's exact ones.

    Prints the KL divergence, the share of positions with the same most probable token, and the perplexities. Both
    models are in memory; take `--against bfloat16` where float32 does not fit.

        foretell evaluate --dtype int8,int8-activations --kv-cache-dtype int8 --text notes.txt

        foretell evaluate --against auto --kv-cache-policy snapkv@512 --length 2048 --from 1024 --text notes.txt
    """
    from foretell.cli.setup import spinner
    from foretell.lab.cli.quantize import format_comparison
    from foretell.load import load
    from foretell.verify.precision import compare_precision

    refuse_unused(ctx, ("start",), "it is read with --kv-cache-policy only", target["kv_cache_policy"] is None)
    refuse_unused(ctx, ("seed",), "--text names the text", bool(text))
    with spinner(f"loading {model}"):
        exact = load(model, against, device)
    sequences, origin = _sequences(exact, text or [], tokens, min(length, exact.config.context), seed)
    reports = []
    for name in options.split_commas(dtype):
        with spinner(f"comparing {name} on {sequences.numel():,} tokens"):
            other = load(model, name, device, **target)
            first = None if target["kv_cache_policy"] is None else sequences.shape[1] // 2 if start is None else start
            compared = compare_precision(exact, other, sequences, first)
        label = {"dtype": other.precision, "backend": str(other.runner().backend), "against": exact.precision}
        reports.append({**label, **target, **asdict(compared)})
        if not as_json:
            typer.echo("{dtype} ({backend}) beside {against}".format(**label), nl=False)
            typer.echo(f", {compared.tokens:,} positions of {origin}:\n{format_comparison(compared)}")
    if as_json:
        typer.echo(json.dumps(reports, indent=1, default=str))


def _sequences(model: "Model", files: list[Path], tokens: int, length: int, seed: int) -> tuple["torch.Tensor", str]:
    """Sequences of the user's files, or of what the model writes; and where they come from."""
    from foretell.lab.quantize.calibration import generated_documents, split_text, text_documents
    from foretell.retrieval.corpus import find_files

    if files:
        documents, origin = text_documents(find_files(files), model.codec, length), ", ".join(map(str, files))
    elif model.codec.chat_template is None:
        raise ValueError(f"{model.name}: a model without a chat template writes no text to compare on; give --text")
    else:
        documents, origin = generated_documents(model, 2 * max(tokens, length), seed), "the model's text"
    return split_text(documents, 0, tokens, length, origin).held_back, origin
