"""Questions for `foretell data generate --prompts` whose answers are lists, and others: what `foretell data fork` cuts.

python tools/list_questions.py questions.jsonl

They are made of the wordings and subjects of `tools/route_questions.toml`. None is in `tools/plan_questions.jsonl`, on
which plans are measured.
"""

import json
import random
import tomllib
from pathlib import Path
from typing import Annotated

import typer

_HERE = Path(__file__).parent


def main(
    out: Path,
    count: Annotated[int, typer.Option(help="Questions.")] = 1200,
    lists: Annotated[float, typer.Option(help="Share of questions whose answers have independent points.")] = 0.75,
    seed: int = 0,
) -> None:
    """Write as many questions, no two alike."""
    draw, made = random.Random(seed), dict[str, None]()
    tables = tomllib.loads((_HERE / "route_questions.toml").read_text("utf-8"))
    held_out = {json.loads(line)["prompt"] for line in (_HERE / "plan_questions.jsonl").read_text("utf-8").splitlines()}
    while len(made) < count:
        wording = draw.choice(tables["points"] if draw.random() < lists else [*tables["steps"], *tables["none"]])
        question = wording.format(*draw.sample(tables["subjects"], 2))
        if question not in held_out:
            made[question] = None
    out.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in made), "utf-8")
    typer.echo(f"{out}: {len(made):,} questions")


if __name__ == "__main__":
    typer.run(main)
