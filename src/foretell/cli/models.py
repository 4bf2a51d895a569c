"""`foretell models`: the models on this machine, and the published speculators that fit them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from foretell.cli import options

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
def models(
    speculators: Annotated[
        bool, typer.Option("--speculators", help="List the published speculators that are known, by their targets.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the models in the caches of the hub, Ollama, LM Studio and llama.cpp, and the speculators that fit them.

    Each is named as --model takes it, with its size, family, bits per weight, and whether it runs. Headers are read, no
    weights. The speculators come from a table of published pairs; nothing is downloaded.
    """
    rows = _known_speculators() if speculators else list(_models_here())
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not rows:
        typer.echo("no models in the caches of the hub, Ollama, LM Studio and llama.cpp")
    for row in rows:
        if speculators:
            typer.echo(f"{row['target']}\n  {_in_words(row)}")
        else:
            _print_model(row)


def _known_speculators() -> list[dict[str, Any]]:
    from foretell.speculator.pairs import known_pairs

    return [vars(pair) for pair in known_pairs()]


def _in_words(pair: dict[str, Any]) -> str:
    return f"--method {pair['kind']} --draft-model {pair['speculator']} (licence: {pair['licence'] or 'see its page'})"


def _models_here() -> Iterator[dict[str, Any]]:
    from foretell.cli.description import describe
    from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
    from foretell.model.load.stores import OLLAMA, StoredModel, ollama_blob, stored_models
    from foretell.speculator.pairs import pairs_for

    here = list(stored_models())
    with suppress(ValueError):
        here.insert(0, StoredModel(DEFAULT_MODEL, "installed", resolve_reference(DEFAULT_MODEL)))
    for model in here:
        row: dict[str, Any] = {"reference": model.reference, "store": model.store, "path": str(model.path)}
        if model.unfinished:
            size = model.path.stat().st_size
            yield row | {"bytes": size, "runs": False, "reason": "its download is not finished", "speculators": []}
            continue
        try:
            path = ollama_blob(model.reference) if model.reference.startswith(OLLAMA) else model.path
            said = describe(path)
        except (ValueError, OSError) as error:
            yield row | {"bytes": None, "runs": False, "reason": str(error), "speculators": []}
            continue
        fits = [vars(pair) for pair in pairs_for((model.reference, path.name, said.name))]
        yield row | {
            "path": str(path), "bytes": said.bytes, "family": said.architecture, "bits": round(said.bits, 2),
            "runs": not said.refusal, "reason": said.refusal or said.runs_on, "speculators": fits,
        }  # fmt: skip


def _print_model(row: dict[str, Any]) -> None:
    size = [] if row["bytes"] is None else [f"{row['bytes'] / 1e9:.2f} GB"]
    bits = [f"{row['bits']:.1f} bits"] if row.get("bits") else []
    runs = "runs" if row["runs"] else f"does not run: {row['reason']}"
    facts = ", ".join([*size, *filter(None, [row.get("family")]), *bits, row["store"]])
    typer.echo(f"{row['reference']}\n  {facts}: {runs}")
    for pair in row["speculators"]:
        typer.echo(f"  {_in_words(pair)}")
