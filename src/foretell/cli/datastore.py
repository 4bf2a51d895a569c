"""`foretell datastore`: index a corpus for drafting by retrieval."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from foretell.cli import options
from foretell.load import load_codec
from foretell.retrieval.corpus import NotTextError, find_files, read_documents, tokenize_documents
from foretell.retrieval.datastore import DEFAULT_DEPTH, Manifest, read_manifest, write_datastore

app = options.group("Index a corpus for drafting by retrieval (method rest).")


@app.command()
def build(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Text files (one document each), .jsonl files (one document per line: its field `text`, else all its "
            "strings), or directories."
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="Model whose tokenizer is used: alias, directory, .gguf file or hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write, which is new or empty.")],
    depth: Annotated[int, typer.Option(min=1, max=64, help="Longest n-gram that is found, in tokens.")] = DEFAULT_DEPTH,
) -> None:
    """Index files for targets with one tokenizer.

    Files below a directory that are not UTF-8 text are left out.
    """
    console = Console(stderr=True)
    codec = load_codec(tokenizer)
    skipped = list[Path]()
    with Progress(console=console, transient=True) as progress:
        documents = tokenize_documents(_texts(files, progress, skipped), codec)
        manifest = write_datastore(out, documents, codec, tokenizer, depth)
    if skipped:
        console.print(f"left out {len(skipped)} files that are not UTF-8 text, the first {skipped[0]}")
    typer.echo(_summary(out, manifest))


@app.command()
def show(path: Annotated[Path, typer.Argument(help="Directory of the datastore.")]) -> None:
    """Print the size and the tokenizer of a datastore."""
    typer.echo(_summary(path, read_manifest(path)))


def _texts(paths: Sequence[Path], progress: Progress, skipped: list[Path]) -> Iterator[str]:
    """All documents; `skipped` collects the files below directories that are not UTF-8 text."""
    files = find_files(paths)
    sizes = [f.stat().st_size for f in files]
    task = progress.add_task("tokenising", total=sum(sizes))
    for file, size in zip(files, sizes, strict=True):
        try:
            yield from read_documents(file)
        except NotTextError:
            if file in paths:
                raise
            skipped.append(file)
        progress.advance(task, size)
    progress.add_task("sorting", total=None)


def _summary(path: Path, manifest: Manifest) -> str:
    size = sum(f.stat().st_size for f in path.iterdir())
    return (
        f"{path}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {size / 1e6:,.1f} MB, "
        f"matches of up to {manifest.depth} tokens, for the tokenizer of {manifest.tokenizer}"
    )
