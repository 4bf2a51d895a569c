"""`foretell tune`: search for settings of a method."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.prompts import read_all_prompts
from foretell.cli.setup import load_model, read_text
from foretell.lab.tune.skip import DraftingOptions, Objective, greedy_answers, tune_skip
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.model.run.skip import SkipTrial, kept_weight_share
from foretell.utils.paths import require_file_place

app = options.group("Search for settings of a method on your prompts.")


@app.command()
def skip(
    prompts: Annotated[
        Path,
        typer.Option(
            help="Prompts: JSON lines (.jsonl) with `prompt`, `messages` or `turns`, or one prompt per line of text."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Skip set to write, or to continue.")],
    model: options.Model = DEFAULT_MODEL,
    trials: Annotated[int, typer.Option(min=1, help="Total number of trials in the file.")] = 100,
    objective: Annotated[
        Objective,
        typer.Option(
            help="counts: tokens per weights read, the same on every machine; time: measured tokens per second."
        ),
    ] = "counts",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    draft_length: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of a draft.")
    ] = DraftingOptions.length,
    confidence: Annotated[
        float, typer.Option(min=0, max=1, help="A draft ends after a token less probable than this.")
    ] = DraftingOptions.confidence,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
) -> None:
    """Find the sub-layers that self-speculation skips; use the result with `--method self_speculative` and
    `skip_set`.
    """
    require_file_place(out)
    if prompts.suffix == ".jsonl":
        prompt_list = [(task.prompt, task.raw) for task in read_all_prompts(prompts)]
    else:
        prompt_list = [(line, False) for line in read_text(prompts).splitlines() if line.strip()]
    if not prompt_list:
        raise ValueError(f"{prompts}: no prompts here; write one per line")
    console = Console()
    target = load_model(model, dtype, device)
    samples = greedy_answers(
        target.network, [target.tokens(text, raw) for text, raw in prompt_list], new_tokens, target.eos
    )

    def print_trial(trial: SkipTrial) -> None:
        share = kept_weight_share(target.config, trial.skip_set)
        console.print(
            f"{trial.value:8.3f}  without {len(trial.attention):2} attention and {len(trial.mlp):2} feed-forward "
            f"parts, {share:.0%} of the weights"
        )

    drafting = DraftingOptions(draft_length, confidence)
    skip_file = tune_skip(
        target.network, target.checkpoint.fingerprint(), samples, out, trials, objective, drafting, seed, print_trial
    )
    unit = "times plain decoding, by weights read" if objective == "counts" else "tokens per second"
    console.print(f"best of {len(skip_file.trials)}: {skip_file.best.value:.3f} {unit}, saved in {out}")
