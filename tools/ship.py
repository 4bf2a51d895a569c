"""Put a trained speculator into the package of its target: weights in few bits, card, course, and what it gains on
questions that it never saw.

.venv/bin/python tools/ship.py TRAINED_DIR --name eagle3 --results RESULTS.json --contender eagle3/bfloat16
"""

import json
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

import foretell
from foretell.speculator.checkpoint import CONFIG, WEIGHTS, load_own, save

HEADING = "## Questions that it never saw"
LIMIT = 40_000_000
"""Bytes that all weights of a package may take."""
PACKAGES = Path(__file__).parent.parent / "packages"


def main(
    trained: Path,
    name: Annotated[str, typer.Option(help="Folder in the package.")],
    results: Annotated[Path | None, typer.Option(help="What `foretell bench run` wrote.")] = None,
    contender: Annotated[str, typer.Option(help="Of the results.")] = "",
    four_bits: Annotated[bool, typer.Option(help="Four bits a weight instead of eight.")] = False,
    model: str = "smollm2-135m",
) -> None:
    """Copy, pack and describe."""
    project = PACKAGES / f"foretell-{model}"
    if not project.is_dir():
        raise SystemExit(f"{project}: no such package; make one as docs/shipped.md says")
    package = project / "src" / project.name.replace("-", "_")
    folder = package / name
    network = load_own(trained, foretell.load(model).checkpoint.embedding_and_head())
    save(folder, network, network.config, bits=4 if four_bits else 8)
    for file in ("README.md", "curve.csv", "curve.png"):
        shutil.copyfile(trained / file, folder / file)
    card = folder / "README.md"
    # Where the folders of the training stood says nothing to readers.
    text = re.sub(r"(?<=\s)/\S+/(\w+)", r"\1", card.read_text()).split(HEADING)[0].rstrip() + "\n"
    card.write_text(text if results is None else text + "\n" + table(results, contender))
    size = sum(f.stat().st_size for f in package.rglob(WEIGHTS))
    typer.echo(f"{folder}: {(folder / WEIGHTS).stat().st_size / 1e6:.1f} MB; the package: {size / 1e6:.1f} MB")
    if size > LIMIT or not (folder / CONFIG).is_file():
        raise SystemExit(f"more than {LIMIT / 1e6:.0f} MB in one package")


def table(results: Path, contender: str) -> str:
    """Tokens per pass and speed over plain decoding, by category."""
    run = json.loads(results.read_text())
    found = next(c for c in run["contenders"] if c["name"] == contender)
    settings = run["settings"]
    lines = [
        HEADING,
        "",
        f"Half of Spec-Bench, {found['pooled']['questions']} questions, greedy, at most {settings['max_new_tokens']} "
        f"tokens a turn, "
        f"`{contender.split('/')[0]}` in {contender.split('/')[1]}, {run['created'][:10]}; "
        f"{found['identical']} of {found['compared']} texts identical to plain decoding.",
        "",
        "| category | tokens per pass | over plain decoding |",
        "|---|---:|---:|",
    ]
    lines += [f"| {n} | {c['tokens_per_pass']:.2f} | {c['speedup']:.2f} |" for n, c in found["categories"].items()]
    mean = found["mean"]
    return "\n".join([*lines, f"| mean | {mean['tokens_per_pass']:.2f} | {mean['speedup']:.2f} |"]) + "\n"


if __name__ == "__main__":
    typer.run(main)
