"""Answers on the terminal: drafted tokens in colour as they stream, then a line with their speed."""

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from foretell.api import Answer
from foretell.engine.request import Update
from foretell.model.block.backend import Backend
from foretell.model.cache.policy import Quest
from foretell.model.kernels.expert_cache import ExpertReads
from foretell.plan import PlanReport
from foretell.tokenizer.stream import Detokenizer

DRAFTED_STYLE = "green"
"""Style of the text of accepted draft tokens."""
_CONTROL_CHARACTERS = {i: None for i in (*range(32), 127, *range(128, 160)) if chr(i) not in "\n\t"}


class DraftHighlighter:
    """Finds which characters of an answer come from accepted draft tokens.

    The engine's text may come in other pieces than the tokens (characters of several tokens, held-back stop strings),
    so each character belongs to the token that completed it.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._drafted: list[bool] = []

    def segments(self, update: Update) -> Iterator[tuple[str, bool]]:
        """The update's text in segments, each with whether it was drafted."""
        for i, token in enumerate(update.tokens):
            self._drafted += [i < update.accepted] * len(self._detokenizer.push([token]))
        drafted = self._drafted[: len(update.text)]
        del self._drafted[: len(update.text)]
        drafted += [False] * (len(update.text) - len(drafted))
        for is_drafted, run in groupby(zip(update.text, drafted, strict=True), key=lambda pair: pair[1]):
            yield "".join(character for character, _ in run), is_drafted


def coloured(highlighter: DraftHighlighter, update: Update) -> Text:
    """The update's text for a terminal, without control characters; drafted parts have `DRAFTED_STYLE`."""
    text = Text(tab_size=4)
    for segment, drafted in highlighter.segments(update):
        text.append(segment.translate(_CONTROL_CHARACTERS), DRAFTED_STYLE if drafted else None)
    return text


class AnswerWriter:
    """Writes an answer to standard output as it comes: coloured on a terminal, unchanged elsewhere."""

    def __init__(self, highlighter: DraftHighlighter) -> None:
        self._highlighter, self._console = highlighter, Console(highlight=False, soft_wrap=True)
        self._plain = not self._console.is_terminal

    def write(self, update: Update) -> None:
        """Write the text of one update."""
        if self._plain:
            sys.stdout.write(update.text)
            sys.stdout.flush()
            return
        self._console.print(coloured(self._highlighter, update), end="")

    def finish(self) -> None:
        """End the line."""
        sys.stdout.write("\n")
        sys.stdout.flush()


def summary_line(answers: Sequence[Answer], seconds: float, reads: ExpertReads | None = None) -> Text:
    """One line on speed and method; `seconds` is the time that several answers took together, `reads` those of an
    offloaded mixture of experts.
    """
    if len(answers) == 1:
        rate = answers[0].statistics.tokens_per_second
    else:
        rate = sum(a.statistics.new_tokens for a in answers) / seconds if seconds else 0.0
    passes = sum(a.statistics.target_passes for a in answers)
    mean = sum(a.statistics.new_tokens for a in answers) / passes if passes else 0.0
    methods = ", ".join(dict.fromkeys(a.method for a in answers))
    # An answer of one token comes from the pass over its prompt, which is not counted as decoding.
    speed = f"{rate:.1f} tokens/s · " if rate else ""
    line = Text.assemble((speed, "bold"), f"{mean:.2f} tokens per pass · {methods} · ", style="dim")
    if len(answers) > 1:
        line = Text(f"{len(answers)} answers · ", style="dim") + line
    plans = [a.plan for a in answers if a.plan is not None]
    backend = answers[0].backend
    if backend.lossy:
        line.append("LOSSY", "bold red not dim").append(f" · {_lossy_target(backend)}", "dim")
    elif plans:
        line.append("LOSSY", "bold red not dim").append(f" · {_plan_summary(plans)}", "dim")
    elif all(a.lossless for a in answers):
        line.append("lossless" if all(a.exact for a in answers) else "lossless up to rounding", "dim")
    else:
        line.append("LOSSY", "bold red not dim").append(f" · {_fidelity_loss(answers)}", "dim")
    if reads is not None:
        line.append(
            f" · experts: {reads.memory_share:.0%} in memory, {reads.ahead_share:.0%} of the others read ahead", "dim"
        )
    line.append(f" · {answers[0].backend}", "dim")
    cut = sum(a.finish_reason == "length" for a in answers)
    if cut:
        which = "cut" if len(answers) == 1 else f"{cut} cut"
        line.append(f" · {which} at the most new tokens (--max-new-tokens), or at the end of the context", "dim")
    return line


def _lossy_target(backend: Backend) -> str:
    """What is lossy about the target itself, with its price where it is known."""
    policy, sparse = backend.cache_policy, backend.sparsity
    fate = "left unread" if policy.startswith(f"{Quest.name}@") else "evicted"
    cached = (
        f"keys and values were {fate} beyond {policy}; foretell evaluate --kv-cache-policy measures the price"
        if policy
        else ""
    )
    return "; ".join(filter(None, [cached, f"tokens read a part of the neurons, {sparse}" if sparse else ""]))


def _fidelity_loss(answers: Sequence[Answer]) -> str:
    """What a lossy method changed, per decided token."""
    losses = [a.statistics.fidelity for a in answers]
    if not any(loss.tokens for loss in losses):
        return "changes are not known here"
    tokens = max(1, sum(loss.tokens for loss in losses))
    changed = sum(loss.changed for loss in losses) / tokens
    variation = sum(loss.variation for loss in losses) / tokens
    divergence = sum(loss.divergence for loss in losses) / tokens
    return f"{changed:.0%} of tokens changed, total variation {variation:.3f}, KL {divergence:.3f} per token"


def _plan_summary(plans: Sequence[PlanReport]) -> str:
    """What plans did: one in words, several by their outcomes."""
    if len(plans) > 1:
        return f"plan {plans[0].type}, {sum(p.outcome == 'expanded' for p in plans)} of {len(plans)} answers expanded"
    plan = plans[0]
    how = f"{plan.parts} parts" if plan.outcome == "expanded" else f"answered plainly: {plan.reason}"
    return f"plan {plan.type}, {how}, {plan.passes} passes"


def print_status(line: Text) -> None:
    """Print a line on standard error, apart from the answer."""
    Console(file=sys.stderr, highlight=False, soft_wrap=True).print(line)
