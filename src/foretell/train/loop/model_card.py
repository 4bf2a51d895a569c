"""The model card of a trained speculator: command, data, training curve and result."""

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import torch

from foretell.train.data.dataset import Dataset
from foretell.train.loop.job import dtype_of
from foretell.train.loop.trainer import Trainer

CARD = "README.md"
_WIDTH = 100
"""Columns of Markdown prose."""


def write_card(trainer: Trainer, command: str) -> None:
    """Write the card beside the weights."""
    (trainer.out / CARD).write_text(render_card(trainer, command), "utf-8")


def render_card(trainer: Trainer, command: str) -> str:
    """The card as Markdown."""
    job, curve = trainer.job, trainer.curve
    config, settings = job.measured_recipe.config, job.settings
    parameters = sum(p.numel() for p in job.measured_recipe.network.parameters() if p.requires_grad)
    drafted = "every token of the target"
    if config.draft_vocab is not None:
        drafted = f"the {config.draft_vocab:,} most frequent tokens"
    duration = _format_duration(curve[-1].seconds)
    facts = [
        ("Kind", f"`{config.kind}`"),
        ("Target", f"`{config.target.name}`, fingerprint `{config.target.fingerprint}`"),
        ("Parameters", f"{parameters:,}, beside the target's embedding and head, which it shares"),
        ("Drafts", drafted),
        ("Tokens per pass", _result(trainer)),
        ("Trained", f"{trainer.step:,} steps, {curve[-1].tokens:,} tokens (repeats included), {duration}"),
        ("Precision", "bfloat16 autocast over float32 weights" if dtype_of(settings) == torch.bfloat16 else "float32"),
        ("Seed", str(settings.seed)),
    ]
    lines = [f"# {job.recipe.name} for {config.target.name}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""]
    lines += ["## Command", "", "```", command, "```", ""]
    lines += ["## Data", "", *_describe_data(job.data), ""]
    lines += ["## Training curve", "", "![Loss and tokens per pass against tokens trained on](curve.png)", ""]
    measured = [r for r in curve if r.tokens_per_pass is not None]
    lines += ["| step | tokens | loss | tokens per pass |", "|---:|---:|---:|---:|"]
    lines += [f"| {r.step:,} | {r.tokens:,} | {r.loss:.4f} | {r.tokens_per_pass:.3f} |" for r in measured]
    return "\n".join([*lines, *_previous_card(job.init_folder)]) + "\n"


def _previous_card(init_folder: Path | None) -> list[str]:
    """Sections of the card of the speculator that training started from."""
    if init_folder is None or not (path := init_folder / CARD).is_file():
        return []
    sections = re.split(r"^(?=## )", path.read_text("utf-8", errors="replace"), flags=re.MULTILINE)
    kept = "".join(
        s
        for s in sections
        if s.startswith(("## Command", "## Data", "## Training curve", "## Course", "## Started from", "## Begun from"))
    )
    # Its picture is in another folder.
    text = re.sub(r"^!\[.*\n+", "", kept, flags=re.MULTILINE)
    # Markdown has six levels of headings.
    lower = re.sub(r"^(?=#{1,5} )", "#", text, flags=re.MULTILINE)
    return ["", f"## Started from `{path.parent.name}`", "", lower.rstrip()]


def _result(trainer: Trainer) -> str:
    settings = trainer.job.settings
    return (
        f"**{trainer.best:.3f}** on {len(trainer.job.prompts)} held-out prompts, {settings.measure_tokens} greedy "
        f"tokens each, the target's own token included (best measurement, step {trainer.best_step:,})"
    )


def _describe_data(data: Sequence[Dataset]) -> list[str]:
    lines = []
    for one in data:
        known = one.manifest
        origin = {
            "self": f"`{known.model}` wrote the prompts and answered them itself",
            "prompts": f"`{known.model}` answered given prompts",
            "text": "plain text",
        }[known.kind]
        facts = [
            f"`{Path(one.folder).name}`: {len(one):,} documents, {one.num_learned_tokens:,} tokens to learn; {origin}; "
            f"seed {known.seed}."
        ]
        if known.kind != "text":
            share, temperature = f"{known.greedy_share:.0%}", f"{known.temperature:g}"
            facts.append(
                f"Answers in {known.precision}, {share} greedy, the rest sampled at temperature {temperature}."
            )
        facts += [f"Source: `{s}`." for s in known.sources]
        lines.append(
            fill(
                " ".join(facts), _WIDTH, initial_indent="- ", subsequent_indent="  ",
                break_long_words=False, break_on_hyphens=False,
            )
        )  # fmt: skip
    return lines


def _format_duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
