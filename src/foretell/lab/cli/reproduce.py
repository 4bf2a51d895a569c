"""`foretell reproduce`: claims of papers, checked on a model here."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretell.cli import options
from foretell.cli.given import refuse_unused

if TYPE_CHECKING:
    from foretell.lab.reproduce import Claim, ClaimResult, Lab

app = typer.Typer(pretty_exceptions_enable=False)
_LEAST_FREE = 20_000_000
"""Bytes that a report and its runs may take."""
_LEAST_FREE_TRAINING = 4_000_000_000
"""The same with what is trained for it, for a model of 135M parameters."""
_STYLES = {"reproduced": "green", "direction only": "cyan", "not reproduced": "red", "not checked": "yellow"}


@app.command()
def reproduce(
    ctx: typer.Context,
    methods: Annotated[
        list[str] | None, typer.Argument(metavar="[METHOD ...]", help="Methods whose paper's claim is checked.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all claims.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the report here (index.html, claims.json), and the runs, with which the same command goes on "
            "after an interruption.",
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft_model: options.DraftModel = None,
    dtype: options.Dtype = "auto",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=8, help="Most tokens of an answer.")] = 64,
    per_category: Annotated[
        int, typer.Option(metavar="N", min=1, max=4, help="Built-in questions of each of six categories.")
    ] = 4,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts of your own in their place, as `generate` takes them."),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Make what methods need and nothing ships: texts of the model, and a few minutes of training each, "
            "kept in the folder of --out.",
        ),
    ] = False,
    train_data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Train on this set of `foretell data generate` instead of texts made now."),
    ] = None,
    train_steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps of every training. Default: those of its kind.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure numbers of papers on a model here: tokens per pass, acceptance, what one method has over another.

    Each gets an interval over the prompts, its ratio to the paper's number, and a verdict. Nothing is timed, so a busy
    machine changes no verdict. The exit status is 0 whatever the verdicts are.

        foretell reproduce eagle3 draft_model

        foretell reproduce --all --out report

        foretell reproduce dflash --train --out report
    """
    from foretell.cli.prompts import read_texts
    from foretell.lab.cli.reproduce_training import check_training, create_preparation
    from foretell.lab.reproduce import CLAIMS, Lab, LabRun, LabSettings, claim_of, mixed_prompts, write_report
    from foretell.load import load, load_draft
    from foretell.utils.store import RunStore

    if bool(methods) == every:
        raise ValueError("name the methods to check, or give --all: foretell reproduce eagle3")
    claims = CLAIMS if every else [claim_of(m) for m in methods or ()]
    refuse_unused(ctx, ("per_category",), "--prompts names the prompts", prompts is not None)
    check_training(train, out, draft_model, train_data, train_steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if out is None else _writable(out, _LEAST_FREE_TRAINING if train else _LEAST_FREE)
        texts = read_texts(prompts) if prompts is not None else mixed_prompts(per_category)
        settings = LabSettings(
            model=model, dtype=dtype, draft_models=tuple(draft_model or ()), new_tokens=max_new_tokens,
            prompts=sha256(json.dumps(texts).encode()).hexdigest()[:16],
        )  # fmt: skip
        loaded = load(model, dtype=dtype)
        drafts = [load_draft(reference, dtype) for reference in draft_model or ()]
        with RunStore(folder / "runs", settings, LabRun) as store:
            preparation = create_preparation(loaded, folder, train_data, train_steps, as_json) if train else None
            results = _check(Lab(loaded, store, settings, texts, drafts, preparation), claims, quiet=as_json)
            if preparation is not None:
                preparation.clean()
        if out is not None:
            index = write_report(out, results, {"model": model, "dtype": dtype, "new tokens": str(max_new_tokens)})
            Console(stderr=True, highlight=False).print(f"{index}: the report")
    if as_json:
        typer.echo(json.dumps([r.as_json() for r in results]))
    checked = [r for r in results if r.finding is not None]
    if draft_model and checked and not any(r.prepared for r in checked):
        raise ValueError(
            f"the draft model {', '.join(draft_model)} had no effect: no method of the claims that were checked drafts "
            "with it; leave --draft-model out, or name methods that do"
        )


def _writable(folder: Path, least: int) -> Path:
    """A folder with room for a report."""
    from foretell.lab.reproduce.reproduce import RESULTS

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{folder}: the report cannot be written there ({error.strerror}); choose another --out"
        ) from error
    if (folder / "index.html").exists() and not (folder / RESULTS).exists():
        raise ValueError(
            f"{folder}: it holds an index.html that is no report of `foretell reproduce` ({RESULTS} is missing), which "
            "would be overwritten; choose another --out"
        )
    free = shutil.disk_usage(folder).free
    if free < least:
        raise ValueError(
            f"{folder}: the report needs up to {least // 10**6:,} MB, and {free // 10**6} MB are free; make "
            "room, or choose another --out"
        )
    return folder


def _check(lab: "Lab", claims: "Sequence[Claim]", quiet: bool) -> "list[ClaimResult]":
    """Check the claims, and print each result when it is there."""
    from foretell.lab.reproduce import reproduce

    console, results = Console(highlight=False, quiet=quiet), []
    for result in reproduce(lab, claims):
        console.print(_panel(result))
        results.append(result)
    return results


def _panel(result: "ClaimResult") -> Table:
    """A result in a few lines."""
    table = Table.grid(padding=(0, 1))
    table.add_row(
        f"[bold]{result.claim.method}[/]", f"[{_STYLES[result.verdict]}]{result.verdict}[/]  {escape(result.summary)}"
    )
    for line in (result.claim.paper, result.reason, *result.prepared):
        if line:
            table.add_row("", f"[dim]{escape(line)}[/]")
    return table
