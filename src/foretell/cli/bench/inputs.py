"""Options that several commands of `foretell bench` have, and what is read from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.questions import QuestionSet, load_questions
from foretell.cli.errors import print_error
from foretell.cli.options import split_commas

ModelName = Annotated[str, typer.Option("--model", help="Alias, directory, GGUF file or hub id.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of every runtime (default: torch's own choice).")]
Device = Annotated[str, typer.Option(help="cpu or cuda; other runtimes are measured on the CPU only.")]
Folder = Annotated[
    Path | None,
    typer.Option("--gguf-cache", help="Folder for files converted for peers (default: ~/.cache/foretell/gguf)."),
]


Tasks = Annotated[
    str,
    typer.Option(
        help="'builtin', or a file of questions: JSONL or parquet (Spec-Bench, SPEED-Bench, HumanEval, prompts), or "
        "plain text."
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        help="Comma-separated; name@8 drafts 8 tokens, where the method reads such a number. Plain decoding always "
        "takes part."
    ),
]
Categories = Annotated[str, typer.Option(help="Comma-separated; default: all of the file.")]
PerCategory = Annotated[int | None, typer.Option(min=1, help="Questions of each category; default: all.")]
Length = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
DraftModel = Annotated[str | None, typer.Option(help="Reference of a draft model, for methods that need one.")]
References = Annotated[
    list[Path] | None, typer.Option("--reference", help="Text file that methods may copy from; repeat for more.")
]
REPLAYED_METHODS = "ngram,suffix,recycling,sam_recycling"
"""Replayed unless the user names others: lossless, and needing nothing but the model."""
METHODS = f"auto,eagle3,{REPLAYED_METHODS}"
"""Measured unless the user names others, as far as the model can run them. `auto` is `hybrid_model` where a speculator
or a draft model is there.
"""
QUICK_METHODS = "auto,eagle3,sam_recycling,ngram"
"""The same of `--quick`."""


def parse_counts(text: str, option: str) -> list[int]:
    """Parse positive whole numbers of a comma-separated option.

    Raises:
        ValueError: something else is among them.
    """
    try:
        counts = [int(w) for w in split_commas(text)]
    except ValueError as error:
        raise ValueError(f"{option}: comma-separated whole numbers were expected, found {text!r}") from error
    if not counts or min(counts) < 1:
        raise ValueError(f"{option}: at least one number, each 1 or more, was expected, found {text!r}")
    return counts


def load_selected_questions(source: str, per_category: int | None, categories: str) -> tuple[QuestionSet, QuestionSet]:
    """All questions of a file, and the selected ones; broken lines are reported."""
    all_questions = load_questions(source)
    for problem in all_questions.problems:
        print_error(problem)
    return all_questions, all_questions.select(per_category, split_commas(categories))


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """On an interruption, say that finished work is kept."""
    try:
        yield
    except KeyboardInterrupt:
        print_error(f"interrupted; what was finished is kept in {out}: give the same command again to go on")
        raise typer.Exit(130) from None


def check_peer_device(names: Sequence[str], device: str) -> None:
    """Check that peers are measured on the CPU.

    Raises:
        ValueError: there are peers, and the device is another one.
    """
    if names and device != "cpu":
        raise ValueError(f"peers are measured on the CPU only: leave out --peers, or --device {device}")


def print_or_write(table: Callable[[], None], json_file: Path | None, numbers: Callable[[], str]) -> None:
    """Print a command's table, and write its numbers as JSON to a file if one was named; '-' prints them in place of
    the table.
    """
    if json_file == Path("-"):
        typer.echo(numbers())
        return
    table()
    if json_file is not None:
        json_file.write_text(numbers(), "utf-8")
