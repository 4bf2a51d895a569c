"""The model card of a trained speculator: what it is, what it learned from, how it was made, what it gives."""

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from foretell.train.data.dataset import Dataset
from foretell.train.loop.trainer import Trainer

CARD = "README.md"
_WIDTH = 100
"""Columns of Markdown prose."""


def write(trainer: Trainer, command: str) -> None:
    """Write the card beside the weights."""
    (trainer.out / CARD).write_text(card(trainer, command), "utf-8")


def card(trainer: Trainer, command: str) -> str:
    """The card as Markdown."""
    task, rows = trainer.task, trainer.rows
    config, settings = task.shadow.config, task.settings
    parameters = sum(p.numel() for p in task.shadow.network.parameters() if p.requires_grad)
    facts = [
        ("Kind", f"`{config.kind}`"),
        ("Target", f"`{config.target.name}`, fingerprint `{config.target.fingerprint}`"),
        ("Parameters", f"{parameters:,}, beside the target's embedding and head, which it shares"),
        (
            "Drafts",
            "every token of the target"
            if config.draft_vocab is None
            else f"the {config.draft_vocab:,} most frequent tokens",
        ),
        ("Tokens per pass", _gain(trainer)),
        (
            "Trained",
            f"{trainer.step:,} steps, {rows[-1].tokens:,} tokens (repeats included), {_span(rows[-1].seconds)}",
        ),
        ("Precision", "bfloat16 autocast over float32 weights" if settings.precision == "bf16" else "float32"),
        ("Seed", str(settings.seed)),
    ]
    lines = [f"# {task.recipe.name} for {config.target.name}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""]
    lines += ["## Command", "", "```", command, "```", ""]
    lines += ["## Data", "", *_data(task.data), ""]
    lines += ["## Course", "", "![Loss and tokens per pass against tokens trained on](curve.png)", ""]
    measured = [r for r in rows if r.tokens_per_pass is not None]
    lines += ["| step | tokens | loss | tokens per pass |", "|---:|---:|---:|---:|"]
    lines += [f"| {r.step:,} | {r.tokens:,} | {r.loss:.4f} | {r.tokens_per_pass:.3f} |" for r in measured]
    return "\n".join([*lines, *_before(task.origin)]) + "\n"


def _before(origin: Path | None) -> list[str]:
    """What the card of the speculator that the training began from says of how that one was made."""
    if origin is None or not (path := origin / CARD).is_file():
        return []
    sections = re.split(r"^(?=## )", path.read_text("utf-8", errors="replace"), flags=re.MULTILINE)
    kept = "".join(s for s in sections if s.startswith(("## Command", "## Data", "## Course", "## Begun from")))
    # Its curve is not here.
    text = re.sub(r"^!\[.*\n+", "", kept, flags=re.MULTILINE)
    # Markdown knows six levels.
    lower = re.sub(r"^(?=#{1,5} )", "#", text, flags=re.MULTILINE)
    return ["", f"## Begun from `{path.parent.name}`", "", lower.rstrip()]


def _gain(trainer: Trainer) -> str:
    settings = trainer.task.settings
    return (
        f"**{trainer.best:.3f}** on {len(trainer.task.prompts)} held-out prompts, {settings.measure_tokens} greedy "
        f"tokens each, "
        f"the target's own token included (best of the course, step {trainer.best_step:,})"
    )


def _data(data: Sequence[Dataset]) -> list[str]:
    lines = []
    for one in data:
        known = one.manifest
        origin = {
            "self": f"`{known.model}` wrote the prompts and answered them itself",
            "prompts": f"`{known.model}` answered given prompts",
            "text": "plain text",
        }[known.kind]
        facts = [
            f"`{RankPath(one.folder).name}`: {len(one):,} texts, {one.learnable:,} tokens to learn; {origin}; seed "
            f"{known.seed}."
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


def _span(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
