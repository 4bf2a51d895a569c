"""`foretell demo`: three prompts on the embedded model, plainly and speculatively, and what that gained."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from foretell.api import Answer, Model

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt of the demo and the lossless method that suits it, by the benchmarks of `docs/benchmarks.md`."""

    title: str
    prompt: str
    method: str
    tokens: int


def demo_prompts() -> tuple[DemoPrompt, ...]:
    """Code, a summary of the bundled text, and a chat."""
    text = (files("foretell.cli") / "lighthouse.txt").read_text(encoding="utf-8")
    code = (
        "Write a Python class Stack with the methods push, pop, peek, is_empty and size, "
        "each with a docstring, then a short test for every method."
    )
    return (
        DemoPrompt("code", code, "hybrid_model", 256),
        DemoPrompt("summary", f"Summarize the following text in a few sentences.\n\n{text}", "hybrid_model", 160),
        DemoPrompt(
            "chat",
            "What is the difference between a comet and an asteroid? Explain it to a child, with an example of each.",
            "hybrid_model",
            256,
        ),
    )


@dataclass(frozen=True)
class Comparison:
    """One scene, decoded plainly and by its method."""

    prompt: DemoPrompt
    plain: "Answer"
    speculative: "Answer"

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.plain.tokens == self.speculative.tokens

    @property
    def speedup(self) -> float:
        """Speed over plain decoding."""
        return self.speculative.statistics.tokens_per_second / self.plain.statistics.tokens_per_second


@app.command()
def demo(
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = "bfloat16",
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw the closing table as a chart.")
    ] = None,
) -> None:
    """Answer three built-in prompts by plain decoding, then by the best lossless method, and show the gain.

    On a terminal, text that was drafted and accepted is green.
    """
    from rich.console import Console

    import foretell

    console = Console(highlight=False)
    loaded = foretell.load(model, dtype)
    # Touches every weight, so that the first scene is not charged for it.
    loaded.generate("Hello.", max_new_tokens=4)
    takes = []
    for scene in demo_prompts():
        console.rule(f"[bold]{scene.title}[/]: {scene.prompt.splitlines()[0]}", align="left")
        takes.append(Comparison(scene, decode(loaded, scene, "autoregressive"), decode(loaded, scene, scene.method)))
    console.print(summary_table(takes, f"{model}, {dtype}: the same text in fewer passes of the model"))
    if picture is not None:
        draw_chart(picture, takes, f"{model}, {dtype}")
    if not all(t.identical for t in takes):
        raise ValueError("a lossless method changed the text; please run `foretell verify` and report what it says")


def decode(model: "Model", scene: DemoPrompt, method: str) -> "Answer":
    """Decode a scene by one method, streaming, with a closing line."""
    from foretell.api import Answer
    from foretell.cli.show import AnswerWriter, DraftHighlighter, print_status, summary_line

    engine = model.engine(method, rows=1)
    stream = AnswerWriter(DraftHighlighter(model.codec.detokenizer()))
    (done,) = engine.complete([model.request(scene.prompt, max_new_tokens=scene.tokens)], stream.write)
    stream.finish()
    answer = Answer.from_completion(done, engine)
    print_status(summary_line([answer], 0.0))
    return answer


def summary_table(takes: "list[Comparison]", title: str) -> "Table":
    """The closing table."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("prompt", "method", "tokens/s", "tokens/pass", "gain", "text"):
        table.add_column(heading, justify="left" if heading in ("prompt", "method", "text") else "right", no_wrap=True)
    for t in takes:
        for answer, gain, text in (
            (t.plain, 1.0, ""),
            (t.speculative, t.speedup, "identical" if t.identical else "DIFFERENT"),
        ):
            s = answer.statistics
            speed, passes = f"{s.tokens_per_second:.1f}", f"{s.tokens_per_pass:.2f}"
            table.add_row(
                t.prompt.title if answer is t.plain else "", answer.method, speed, passes, f"{gain:.2f}", text
            )
    return table


def draw_chart(path: Path, takes: "list[Comparison]", title: str) -> None:
    """A bar chart of tokens per second, plain and fast.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the picture needs matplotlib; run: pip install foretell[plot]") from error
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for i, t in enumerate(takes):
        plain, fast = (a.statistics.tokens_per_second for a in (t.plain, t.speculative))
        axes.barh(i - 0.2, plain, 0.38, color="#9aa5b1", label="plain decoding" if i == 0 else None)
        axes.barh(i + 0.2, fast, 0.38, color="#2f855a", label="best lossless method" if i == 0 else None)
        axes.text(plain, i - 0.2, f" {plain:.0f}", va="center")
        axes.text(fast, i + 0.2, f" {fast:.0f}   {t.speedup:.1f}\u00d7, {t.speculative.method}, same text", va="center")
    axes.set_yticks(range(len(takes)), [t.prompt.title for t in takes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.7 * max(t.speculative.statistics.tokens_per_second for t in takes))
    axes.set_xlabel("tokens per second")
    axes.set_title(title, loc="left")
    figure.legend(loc="outside upper right", frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
