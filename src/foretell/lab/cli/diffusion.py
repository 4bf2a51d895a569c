"""`foretell diffusion`: masked diffusion language models."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.setup import set_threads, spinner
from foretell.lab.diffusion.evaluate import Document, evaluate
from foretell.lab.diffusion.generate import DiffusionSettings, generate
from foretell.lab.diffusion.load import DiffusionModel, load_diffusion
from foretell.load import load
from foretell.train.data.dataset import Dataset
from foretell.train.loop.job import check_tokenizer
from foretell.utils.validation import validate

app = options.group("Decode and measure masked diffusion language models.")

Model = Annotated[str, typer.Option(metavar="REF", help="Directory or hub id of a masked diffusion model.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32 or bfloat16.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads.")]


@app.command("generate")
@options.with_settings(DiffusionSettings())
def generate_command(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt.")],
    model: Model,
    settings: options.Settings = options.NO_SETTINGS,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    dtype: Dtype = "float32",
    device: options.Device = "cpu",
    threads: Threads = None,
    as_json: options.Json = False,
) -> None:
    """Answer a prompt with a masked diffusion model.

    foretell diffusion generate "Why is the sky blue?" --model my-diffusion/model --threshold 0.9 --cache dual
    """
    by_probability = settings["threshold"] is not None
    refuse_unused(ctx, ("steps",), "--threshold reveals tokens by their probability", by_probability)
    set_threads(threads)
    given = validate(DiffusionSettings, {**settings, "temperature": temperature, "seed": seed}, "options")
    with spinner(f"loading {model}"):
        diffusion_model = load_diffusion(model, dtype, device)
    plain = raw or diffusion_model.codec.chat_template is None
    tokens = (
        diffusion_model.codec.encode(prompt)
        if plain
        else diffusion_model.codec.chat([{"role": "user", "content": prompt}])
    )
    started = time.perf_counter()
    answer = generate(diffusion_model.predictor, tokens, given, diffusion_model.eos)
    seconds = time.perf_counter() - started
    text = diffusion_model.codec.decode(answer.tokens)
    if as_json:
        record = {"text": text, **asdict(answer), "seconds": seconds, "prompt_tokens": len(tokens)}
        typer.echo(json.dumps(record))
        return
    typer.echo(text)
    count = len(answer.tokens)
    typer.echo(
        f"{count} tokens · {answer.passes} passes · {answer.positions:,} positions computed · "
        f"{count / seconds:.1f} tokens/s",
        err=True,
    )


@app.command("evaluate")
def evaluate_command(
    ctx: typer.Context,
    model: Model,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Data set of `foretell data generate`.")],
    sibling: Annotated[
        str | None, typer.Option(metavar="REF", help="Autoregressive model with the same tokenizer, to compare with.")
    ] = None,
    documents: Annotated[int, typer.Option(metavar="N", min=1, help="Last documents of the set to measure on.")] = 16,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Noise levels per document.")] = 4,
    masks: Annotated[int, typer.Option(metavar="N", min=1, help="Masks behind a text.")] = 8,
    cuts: Annotated[int, typer.Option(metavar="N", min=1, help="Texts per document.")] = 8,
    seed: options.Seed = 0,
    dtype: Dtype = "float32",
    threads: Threads = None,
    as_json: options.Json = False,
) -> None:
    """Bound a model's perplexity on held-out answers, and compare its predictions with its sibling's.

    foretell diffusion evaluate --model my-diffusion/model --data answers --sibling smollm2-135m
    """
    refuse_unused(ctx, ("masks", "cuts"), "they compare with a --sibling, and none is named", sibling is None)
    set_threads(threads)
    with spinner(f"loading {model}"):
        diffusion_model = load_diffusion(model, dtype)
        other = None if sibling is None else load(sibling, dtype).checkpoint.decoder(torch.float32)
    if other is not None and other.config.vocab != diffusion_model.config.model.vocab:
        raise ValueError(
            f"--sibling {sibling}: its vocabulary has {other.config.vocab} tokens, and that of {model} "
            f"{diffusion_model.config.model.vocab}; a sibling has the same tokenizer"
        )
    report = evaluate(
        diffusion_model.predictor, _documents(data, diffusion_model, documents), other, samples, masks, cuts, seed
    )
    if as_json:
        typer.echo(json.dumps({"model": model, **asdict(report)}, indent=1))
        return
    typer.echo(f"{report.documents} documents, {report.tokens:,} tokens of answers")
    typer.echo(f"perplexity: at most {report.perplexity_bound:.2f}; masked tokens predicted: {report.accuracy:.1%}")
    if report.sibling_perplexity is not None:
        typer.echo(f"perplexity of {sibling}: {report.sibling_perplexity:.2f}")
        shares = ", ".join(f"{share:.1%}" for share in report.same_top)
        typer.echo(f"same top token as {sibling}, by mask: {shares}")


def _documents(folder: Path, model: DiffusionModel, count: int) -> list[Document]:
    """The last documents of a data set, cut to the model's context."""
    dataset = Dataset.open(folder)
    check_tokenizer(dataset, model.codec, model.config.model.vocab, model.name)
    context, out = model.config.model.context, list[Document]()
    for i in range(max(0, len(dataset) - count), len(dataset)):
        tokens, start = torch.from_numpy(dataset[i].tokens[:context].copy()).long(), max(dataset[i].start, 1)
        if start < len(tokens):
            out.append((tokens, start))
    if not out:
        raise ValueError(f"{folder}: no document has an answer within {context} tokens")
    return out
