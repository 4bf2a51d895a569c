"""Average the weights of a speculator and of one that was fine-tuned from it (WiSE-FT, arXiv 2109.01903).

.venv/bin/python tools/average.py EARLIER_DIR LATER_DIR --share 0.5 --out DIR
"""

import shutil
from pathlib import Path
from typing import Annotated

import typer

import foretell
from foretell.speculator.checkpoint import load_own, save
from foretell.train.loop.model_card import CARD


def main(
    earlier: Path,
    later: Path,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    share: Annotated[float, typer.Option(help="Weight of the later one.", min=0.0, max=1.0)] = 0.5,
    model: str = "smollm2-135m",
) -> None:
    """Write the average, with the card and the curve of the later one."""
    ends = foretell.load(model).checkpoint.embedding_and_head()
    first, second = load_own(earlier, ends), load_own(later, ends)
    weights, other = second.state_dict(), first.state_dict()
    if first.config != second.config or any(not mine.equal(other[n]) for n, mine in weights.items() if n == "token_of"):
        raise SystemExit(f"{later} was not fine-tuned from {earlier}: sizes or draft vocabularies differ")
    for name, mine in weights.items():
        if mine.is_floating_point():
            mine.lerp_(other[name].to(mine), 1 - share)
    save(out, second, second.config)
    for file in (CARD, "curve.csv", "curve.png"):
        shutil.copyfile(later / file, out / file)
    note = (
        f"Weights: {share:g} times the trained ones plus {1 - share:g} times the initial ones (`tools/average.py`).\n"
    )
    card = (out / CARD).read_text()
    (out / CARD).write_text(card.replace("\n## Command", f"\n{note}\n## Command", 1))


if __name__ == "__main__":
    typer.run(main)
