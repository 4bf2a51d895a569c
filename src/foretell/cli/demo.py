"""`foretell demo`: three prompts on the embedded model, by plain and by speculative decoding, and the speed-up."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options
from foretell.cli.errors import print_error
from foretell.cli.language import translated
from foretell.utils.paths import require_file_place

if TYPE_CHECKING:
    from rich.table import Table

    from foretell.api import Answer, Model
    from foretell.cli.comparison import Comparison
    from foretell.engine.method import AnyMethod

app = typer.Typer(pretty_exceptions_enable=False)

METHOD = "hybrid_model"
"""The fastest lossless method on all three prompts by docs/benchmarks.md."""


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt of the demo, and the most tokens of its answer."""

    title: str
    text: str
    max_new_tokens: int


def demo_prompts() -> tuple[DemoPrompt, ...]:
    """Code, a summary of the bundled text, and a chat."""
    document = (files("foretell.cli") / "lighthouse.txt").read_text(encoding="utf-8")
    code = (
        "Write a Python class Stack with the methods push, pop, peek, is_empty and size, "
        "each with a docstring, then a short test for every method."
    )
    chat = "What is the difference between a comet and an asteroid? Explain it to a child, with an example of each."
    return (
        DemoPrompt("code", code, 256),
        DemoPrompt("summary", f"Summarize the following text in a few sentences.\n\n{document}", 160),
        DemoPrompt("chat", chat, 256),
    )


@app.command()
def demo(
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw the closing table as a chart.")
    ] = None,
) -> None:
    """Answer three built-in prompts by plain decoding, then by the fastest lossless method, and compare the speed.

    On a terminal, the text of accepted draft tokens is green.
    """
    from rich.console import Console

    from foretell.cli.comparison import Comparison, difference, warm_up
    from foretell.cli.setup import load_model

    require_file_place(picture)
    console = Console(highlight=False)
    target = load_model(model, dtype)
    missing = missing_speculator(target)
    if missing:
        print_error(missing)
    warm_up(target)
    methods = [target.method(name) for name in ("autoregressive", METHOD)]
    comparisons = list[tuple[DemoPrompt, Comparison]]()
    for prompt in demo_prompts():
        console.rule(f"[bold]{translated(prompt.title)}[/]: {prompt.text.splitlines()[0]}", align="left")
        plain, speculative = (decode(target, prompt, method) for method in methods)
        comparisons.append((prompt, Comparison(plain, speculative)))
    outcome = translated("the same text in fewer passes of the model")
    console.print(summary_table(comparisons, f"{model}, {target.precision}: {outcome}"))
    if picture is not None:
        draw_chart(picture, comparisons, f"{model}, {target.precision}\n{measured_on()}")
    for _, compared in comparisons:
        if reason := difference(compared, methods[-1]):
            print_error(reason)


def measured_on() -> str:
    """The processor with its number of cores, and the instructions of the kernels."""
    from foretell.bench.machine import describe_machine

    facts = describe_machine()
    return f"{facts['cores']} cores, {facts['processor']}, {facts.get('kernels', 'no kernels')}"


def missing_speculator(model: "Model") -> str:
    """One sentence where no trained speculator is installed for the model, so that the demo's method falls back to
    another drafter; else an empty string.
    """
    from foretell.speculator.installed import find_all_installed, install_hint

    fingerprint = model.checkpoint.fingerprint()
    if any(s.fingerprint == fingerprint for s in find_all_installed().speculators):
        return ""
    drafter = model.method(METHOD).drafter_label
    return (
        f"no trained speculator is installed for {model.name}, so {METHOD} drafts with {drafter}, which is slower; "
        f"{install_hint('eagle3', fingerprint)}"
    )


def decode(model: "Model", prompt: DemoPrompt, method: "AnyMethod") -> "Answer":
    """Answer a prompt by one method: the text as it comes, then a line with its speed."""
    from foretell.api import Answer
    from foretell.cli.show import AnswerWriter, DraftHighlighter, print_status, summary_line

    engine = model.engine(method, rows=1)
    writer = AnswerWriter(DraftHighlighter(model.codec.detokenizer()))
    (completion,) = engine.complete([model.request(prompt.text, max_new_tokens=prompt.max_new_tokens)], writer.write)
    writer.finish()
    answer = Answer.from_completion(completion, engine)
    print_status(summary_line([answer], 0.0))
    return answer


def summary_table(comparisons: "list[tuple[DemoPrompt, Comparison]]", title: str) -> "Table":
    """Speed of both methods on every prompt."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("prompt", "method", "tokens/s", "tokens/pass", "speed-up", "text"):
        left = heading in ("prompt", "method", "text")
        table.add_column(translated(heading), justify="left" if left else "right", no_wrap=True)
    for prompt, c in comparisons:
        compared = translated("identical" if c.identical else "DIFFERENT")
        for name, answer, speedup, text in (
            (translated(prompt.title), c.plain, 1.0, ""),
            ("", c.speculative, c.speedup, compared),
        ):
            s = answer.statistics
            numbers = (f"{s.tokens_per_second:.1f}", f"{s.tokens_per_pass:.2f}", f"{speedup:.2f}")
            table.add_row(name, answer.method, *numbers, text)
    return table


def draw_chart(path: Path, comparisons: "list[tuple[DemoPrompt, Comparison]]", title: str) -> None:
    """Draw a bar chart of tokens per second, plain and speculative.

    Raises:
        ValueError: matplotlib is not installed.
    """
    from foretell.bench.charts import canvas, png

    figure, axes = canvas()
    axes.grid(visible=False)
    for i, (_, c) in enumerate(comparisons):
        plain, fast = (a.statistics.tokens_per_second for a in (c.plain, c.speculative))
        axes.barh(i - 0.2, plain, 0.38, color="#9aa5b1", label="plain decoding" if i == 0 else None)
        axes.barh(i + 0.2, fast, 0.38, color="#2f855a", label="speculative decoding" if i == 0 else None)
        axes.text(plain, i - 0.2, f" {plain:.0f}", va="center")
        axes.text(fast, i + 0.2, f" {fast:.0f}   {c.speedup:.1f}\u00d7, {c.speculative.method}, same text", va="center")
    axes.set_yticks(range(len(comparisons)), [prompt.title for prompt, _ in comparisons])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.7 * max(c.speculative.statistics.tokens_per_second for _, c in comparisons))
    axes.set_xlabel("tokens per second")
    axes.set_title(title, loc="left")
    figure.legend(loc="outside upper right", frameon=False, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(figure))
