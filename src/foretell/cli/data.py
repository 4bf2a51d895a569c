"""`foretell data`: data sets for training speculators."""

import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.api import Model
from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.options import Device, Dtype
from foretell.cli.options import Model as ModelReference
from foretell.cli.progress import progress
from foretell.cli.prompts import read_all_prompts
from foretell.cli.setup import load_model
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.plan.control_tokens import choose_control_tokens
from foretell.retrieval.corpus import find_files, read_documents
from foretell.train.data.dataset import Dataset, DatasetManifest, DatasetWriter, Document
from foretell.train.data.features import parse_hidden_layers
from foretell.train.data.forks import forked_documents, read_documented
from foretell.train.data.generate import continue_answers, write_text_chunks
from foretell.train.loop.job import check_data

app = options.group("Make data sets for training speculators.")


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="Folder of the data set; an interrupted or smaller one is continued.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to learn (answers, plain text) of the finished data set.")],
    model: ModelReference = DEFAULT_MODEL,
    own: Annotated[bool, typer.Option("--self", help="The model writes prompts and answers them.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts to answer: JSON lines with `prompt`, `messages` or `turns`.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Plain text instead of answers: files or directories; repeatable.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    rows: Annotated[int, typer.Option(min=1, help="Batch size: sequences that are generated together.")] = 32,
    greedy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers that are greedy; the others are sampled.")
    ] = 0.8,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of sampled answers.")] = 0.8,
    max_question: Annotated[int, typer.Option(min=8, help="Longest prompt that the model writes, in tokens.")] = 320,
    max_answer: Annotated[int, typer.Option(min=1, help="Longest answer, or chunk of plain text, in tokens.")] = 384,
    seed: Annotated[int, typer.Option(min=0, help="Document n depends on the seed and n alone.")] = 0,
    states: Annotated[
        str,
        typer.Option(help="Layers whose hidden states are stored for training, as 2,15,27,31."),
    ] = "",
    ctx: typer.Context = None,  # type: ignore[assignment]  # None: another command writes its data with this function
) -> None:
    """Write a data set: prompts answered by the target, or plain text.

    Repeat the command to continue an interrupted run, with more --tokens to enlarge a data set.
    """
    if [own, prompts is not None, bool(text)].count(True) != 1:
        raise ValueError("give one source of documents: --self, --prompts FILE or --text FILE")
    answering = "rows", "greedy_share", "temperature", "max_question", "seed", "states"
    refuse_unused(ctx, answering, "the model does not answer plain text", bool(text))
    refuse_unused(ctx, ("max_question",), "--prompts names the prompts", prompts is not None)
    target = load_model(model, dtype, device)
    hidden_layers = parse_hidden_layers(states, target.config.layers + 1, "--states")
    sources = [prompts] if prompts else find_files(text or ())
    manifest = DatasetManifest.of(
        target,
        "self" if own else "prompts" if prompts else "text",
        seed=seed,
        precision=target.precision,
        greedy_share=greedy_share,
        temperature=temperature,
        max_question=max_question if own else 0,
        max_answer=max_answer,
        sources=tuple(f"{p.name} {_digest(p)}" for p in sources),
    )
    with DatasetWriter(out, manifest) as writer:
        if text:
            work = write_text_chunks(
                target, (t for f in sources for t in read_documents(f)), writer, max_answer, tokens
            )
        else:
            given = None if prompts is None else [target.tokens(t.prompt, t.raw) for t in read_all_prompts(prompts)]
            work = continue_answers(target, manifest, writer, rows, tokens, given, hidden_layers)
        _show_progress(work, writer, tokens)
        writer.seal()
    made = Dataset.open(out)
    (out / "README.md").write_text(_card(made, sys.argv[1:]))
    typer.echo(_summary(made))


def open_or_generate(folder: Path | None, own: Path, target: Model, **settings: Any) -> Dataset:
    """The data set in a folder; None: one of the target's own answers in the folder `own`, which is written, or
    continued. `settings`: further arguments of `generate`.

    Raises:
        ValueError: it is no data set, or one of another model.
    """
    if folder is None:
        generate(out=own, own=True, **settings)
    dataset = Dataset.open(folder or own)
    check_data(dataset, target)
    return dataset


@app.command()
def fork(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the new set.")],
    path: Annotated[Path | None, typer.Argument(help="Folder of a set of answers.")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Documentation in Markdown or reStructuredText, whose lists become answers: files or directories; "
            "repeatable.",
        ),
    ] = None,
    model: ModelReference = DEFAULT_MODEL,
) -> None:
    """Cut the answers of a data set, or lists of documentation, at their items or paragraphs, for `foretell train
    apar`.

    An answer whose list has heads and details, or whose paragraphs have two sentences or more, becomes a main text with
    forks, and a text per detail; other answers stay. Of documentation only such lists are taken.
    """
    target = load_model(model)
    tokens = choose_control_tokens(target.codec, target.eos)
    if path is None and not text:
        raise ValueError("give a data set of answers, or documentation with --text PATH, or both")
    documents, manifest = list[Document](), DatasetManifest.of(target, "text")
    if path is not None:
        data = Dataset.open(path)
        check_data(data, target)
        documents, manifest = list(data), data.manifest
    files = [f for f in find_files(text or ()) if f.suffix in (".md", ".rst", ".txt") or f.name == "METADATA"]
    documents += read_documented(files, target.codec, target.eos)
    made = [*([] if path is None else [f"{path.name}, forked"]), *(f"{f.name} {_digest(f)}" for f in files)]
    manifest = manifest.model_copy(update={"sources": (*manifest.sources, *made)})
    number = forked = 0
    with DatasetWriter(out, manifest) as writer:
        for document in documents:
            records = forked_documents(document, number, target.codec, tokens, target.eos)
            number, forked = number + len(records), forked + (len(records) > 1)
            for record in records:
                if record.number not in writer.known_numbers:
                    writer.add(record)
        writer.seal()
    typer.echo(
        f"{forked:,} of {len(documents):,} answers have forks, {number - len(documents):,} in all\n"
        f"{_summary(Dataset.open(out))}"
    )


@app.command()
def show(path: Annotated[Path, typer.Argument(help="Folder of the set.")]) -> None:
    """Show the contents of a data set."""
    typer.echo(_summary(Dataset.open(path)))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:12]


def _show_progress(work: Iterator[int], writer: DatasetWriter, num_tokens: int) -> None:
    """Run the generator to its end; show tokens and speed."""
    started, new = time.perf_counter(), 0
    with progress("") as show:
        for decoded in work:
            new += decoded
            done, speed = min(writer.num_learned_tokens, num_tokens), new / (time.perf_counter() - started)
            show(done / num_tokens, f"{done:,} of {num_tokens:,} tokens  {speed:,.0f} tokens/s")


def _summary(data: Dataset) -> str:
    m, greedy = data.manifest, sum(d.greedy for d in data) / len(data)
    what = "chunks of plain text" if m.kind == "text" else f"answers of {m.model} ({greedy:.0%} greedy)"
    learned = f"{data.num_learned_tokens:,} of them to learn"
    return f"{data.folder}: {len(data):,} {what}, {data.num_tokens:,} tokens, {learned}"


def _card(data: Dataset, arguments: Sequence[str]) -> str:
    """The README of the data set."""
    m = data.manifest
    origin = {
        "self": f"Prompts sampled from the model's own chat template (temperature 1), up to {m.max_question} tokens; "
        f"unusable ones and duplicates left out.",
        "prompts": f"Prompts from {', '.join(m.sources)}.",
        "text": f"Plain text from {len(m.sources)} files.",
    }[m.kind]
    lines = [
        f"# Data set from {m.model}",
        "",
        _summary(data).split(": ", 1)[1] + ".",
        "",
        origin,
        "",
        "| | |",
        "|---|---|",
        f"| model | {m.model} ({m.precision}) |",
        f"| fingerprint | {m.fingerprint or '-'} |",
        f"| tokenizer | {m.tokenizer[:16]} |",
        f"| seed | {m.seed} |",
        f"| greedy answers | {m.greedy_share:.0%}, the others at temperature {m.temperature:g} |",
        f"| longest answer | {m.max_answer} tokens |",
        "",
        "```",
        f"foretell {' '.join(arguments)}",
        "```",
        "",
    ]
    return "\n".join(lines)
