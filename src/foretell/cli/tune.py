"""`foretell tune`: searches whose results are saved and used again."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.load import EMBEDDED, load
from foretell.model.skip import SkipTrial, kept_share
from foretell.tune import Drafting, Objective, answers, tune_skip
from foretell.validation import Fields, parse_object

_EXAMPLE = 'write for example {"prompt": "Why is the sky blue?"}'
app = typer.Typer(
    no_args_is_help=True, help="Search for settings of a method on your prompts.", pretty_exceptions_enable=False
)


@app.callback()
def main() -> None:
    """Search for settings of a method on your prompts."""


@app.command()
def skip(
    prompts: Annotated[
        Path, typer.Option(help="Prompts: JSON lines with `prompt` or `turns`, or one prompt per line of text.")
    ],
    out: Annotated[Path, typer.Option(help="Skip set to write, or to go on with.")],
    model: Annotated[str, typer.Option(help="Model: alias, directory, GGUF file or hub id.")] = EMBEDDED,
    trials: Annotated[int, typer.Option(min=1, help="Trials that the file shall hold in the end.")] = 100,
    objective: Annotated[
        Objective,
        typer.Option(
            help="counts: tokens per weights read, the same on every machine; time: measured tokens per second."
        ),
    ] = "counts",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    draft_length: Annotated[int, typer.Option(min=1, help="Most tokens of a draft.")] = Drafting.length,
    confidence: Annotated[
        float, typer.Option(min=0, max=1, help="A draft ends after a token less probable than this.")
    ] = Drafting.confidence,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
) -> None:
    """Find the sub-layers that self-speculation leaves out; use the result with `--method self_speculative` and `skip_set`."""
    console = Console()
    try:
        texts = read_prompts(prompts)
        target = load(model, dtype)
        samples = answers(target.network, [target.tokens(t) for t in texts], new_tokens, target.eos)

        def told(trial: SkipTrial) -> None:
            share = kept_share(target.config, trial.skip)
            console.print(
                f"{trial.value:8.3f}  without {len(trial.attention):2} attention and {len(trial.mlp):2} feed-forward parts, "
                f"{share:.0%} of the weights"
            )

        found = tune_skip(
            target.network,
            target.source.fingerprint(),
            samples,
            out,
            trials,
            objective,
            Drafting(draft_length, confidence),
            seed,
            told,
        )
    except (ValueError, OSError) as error:
        typer.echo(f"foretell tune skip: {error}", err=True)
        raise typer.Exit(1) from None
    unit = "times plain decoding, by weights read" if objective == "counts" else "tokens per second"
    console.print(f"best of {len(found.trials)}: {found.best.value:.3f} {unit}, saved in {out}")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file.

    Raises:
        ValueError: a line that is not a prompt, or no prompts at all.
    """
    lines = [(i, line) for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: no prompts here; write one per line")
    return [_prompt(path, i, line) for i, line in lines] if path.suffix == ".jsonl" else [line for _, line in lines]


def _prompt(path: Path, number: int, line: str) -> str:
    value = parse_object(line, f"{path}, line {number}", _EXAMPLE)
    found = value.get("prompt") or next(iter(Fields(value, "").texts("turns")), "")
    if not isinstance(found, str) or not found:
        raise ValueError(f"{path}, line {number}: not a prompt; {_EXAMPLE}")
    return found
