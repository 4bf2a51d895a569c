"""`foretell verify`: check on your own model and machine that methods keep the target's output."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options

if TYPE_CHECKING:
    from rich.text import Text

    from foretell.verify import BatchInvariance, DistributionTest, GreedyEquality, TokenDivergence, VerifyReport

_INDENT = " " * 8
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@options.with_target()
def verify(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD ...]", help="Methods to check; default: all that can be built."),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft_model: options.DraftModel = None,
    reference: options.Reference = None,
    target: options.Target = options.NO_TARGET,
    speculative_config: options.SpeculativeJson = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Prompts of your own for the greedy comparison, as `generate` takes them."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each compared answer.")] = 48,
    samples: Annotated[
        int,
        typer.Option(metavar="N", help="Samples of the distribution test; more samples detect smaller differences."),
    ] = 1500,
    seed: Annotated[int, typer.Option(metavar="N", help="First seed of the samples.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail for lossy methods, too.")] = False,
    as_json: options.Json = False,
) -> None:
    """Check on your model and machine that a method changes nothing.

    Three checks. Greedy answers equal those of plain decoding; where they differ, a tie within rounding is
    distinguished from a bug. Sampled answers follow the target's distribution, by a chi-squared test that reports its
    power. Answers do not depend on the other requests of the batch. Exits with 1 if a method that claims to be lossless
    fails.

        foretell verify sam_recycling

        foretell verify draft_model --model big/ --draft-model small/ --samples 20000
    """
    from foretell.cli.prompts import read_texts
    from foretell.cli.setup import load_models, parse_method, spinner
    from foretell.core.target_options import TargetOptions
    from foretell.verify import Verifier, VerifySettings, buildable_methods
    from foretell.verify.prompts import PROMPTS

    selection = parse_method(None, speculative_config, draft_model, methods or ())
    chosen = methods or ([selection.name] if selection.config.method else [])
    texts = PROMPTS if prompts is None else read_texts(prompts)
    settings = VerifySettings(texts, max_new_tokens, samples, seed)
    target_options = TargetOptions(**target)
    ready = load_models(model, dtype, device, selection, reference, target_options=target_options)
    verifier, reports = Verifier(ready.model, settings), list["VerifyReport"]()
    inputs = {m.name: m.inputs for m in map(ready.shared_method, chosen)} or buildable_methods(
        ready.model, ready.drafts, ready.references
    )
    for note in ready.inputs.use(inputs):
        typer.echo(note, err=True)
    for i, name in enumerate(inputs):
        with spinner(f"checking {name}, {i + 1} of {len(inputs)}"):
            reports.append(verifier.check(partial(ready.shared_method, name)))
        if not as_json:
            print_report(reports[-1])
    if as_json:
        typer.echo(json.dumps([report_json(r) for r in reports], indent=1, ensure_ascii=False))
    failed = [r.method for r in reports if not r.passed and (r.lossless or strict)]
    print_conclusion(reports, failed, as_json)


def print_report(report: "VerifyReport") -> None:
    """Print one line per check, and the divergences."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    claim = ("claims to be lossless", "dim") if report.lossless else ("is LOSSY", "red")
    console.print(Text.assemble((report.method, "bold"), "  ", claim, (f", {report.seconds:.0f} s", "dim")))
    for passed, text in (
        (report.greedy_equality.passed, format_greedy_equality(report.greedy_equality)),
        (report.distribution.passed, format_distribution(report.distribution)),
        (report.batch_invariance.passed, format_batch_invariance(report.batch_invariance)),
    ):
        console.print(verdict_label(passed, report.lossless).append(text))
    for divergence in (*report.greedy_equality.divergences, *report.batch_invariance.divergences):
        style = "yellow" if divergence.verdict == "tie" else "red"
        console.print(Text(f"{_INDENT}{format_divergence(divergence)}", style=style))


def verdict_label(passed: bool, lossless: bool) -> "Text":
    """The word before a check: a lossy method is expected to differ."""
    from rich.text import Text

    word, style = ("pass", "green") if passed else ("FAIL", "bold red") if lossless else ("lossy", "red")
    return Text(f"  {word:5} ", style=style)


def format_greedy_equality(g: "GreedyEquality") -> str:
    """The first check in one line."""
    difference = f"{len(g.divergences)} differ" if g.divergences else "all equal to plain decoding"
    return (
        f"same greedy answers: {g.prompts} prompts, {g.tokens} tokens, {g.tokens_per_pass:.2f} per pass; {difference}"
    )


def format_distribution(d: "DistributionTest") -> str:
    """The second check in two lines."""
    drafts = f"{d.accepted} of {d.drafted} drafts accepted" if d.drafted else "nothing was drafted: a weak test"
    test = f"chi² {d.statistic:.1f} on {d.degrees_of_freedom} degrees of freedom, p {d.p_value:.2g}"
    distance = f"total variation {d.total_variation:.3f}, chance alone gives {d.expected_total_variation:.3f}"
    rounding = f", rounding {d.rounding_variation:.3f}" if d.rounding_variation else ""
    power = (
        f"a total variation of {d.effect_size:g} is detected with a power of {d.power:.0%}, "
        f"{d.detectable_effect:.3f} with 90%"
    )
    return f"same distribution: {test}; {distance}{rounding}\n{_INDENT}{d.samples} samples, {drafts}; {power}"


def format_batch_invariance(b: "BatchInvariance") -> str:
    """The third check in one line."""
    count = len(b.divergences) + b.sampled_differences
    sampled = f" (p {b.p_value:.2g} for the sampled ones)" if b.sampled_differences else ""
    difference = f"{count} differ{sampled}" if count else "all equal"
    answers = f"{b.greedy} greedy and {b.sampled} sampled answers"
    return f"same in a batch: {answers}, alone and {b.rows} at a time; {difference}"


def format_divergence(d: "TokenDivergence") -> str:
    """Where two answers diverge, and why."""
    why = "a tie that rounding decides" if d.verdict == "tie" else "rounding does not explain it"
    return (
        f"prompt {d.prompt + 1}, token {d.position + 1}: {d.expected_text!r} became {d.actual_text!r}; margin "
        f"{d.margin:.3g} in logits, rounding noise {d.noise:.3g}: {why}"
    )


def report_json(report: "VerifyReport") -> dict[str, object]:
    """A report as `--json` prints it: all fields, and whether each check passed."""
    checks = {
        name: asdict(check) | {"passed": check.passed}
        for name, check in (
            ("greedy_equality", report.greedy_equality),
            ("distribution", report.distribution),
            ("batch_invariance", report.batch_invariance),
        )
    }
    return asdict(report) | {"passed": report.passed} | checks


def print_conclusion(reports: "list[VerifyReport]", failed: list[str], as_json: bool) -> None:
    """Print the last line.

    Raises:
        ValueError: methods failed.
    """
    if failed:
        raise ValueError(f"{', '.join(failed)} changed the target's output; see the checks above")
    lossless = [r for r in reports if r.lossless]
    if lossless and not as_json:
        typer.echo(f"{len(lossless)} {'method changes' if len(lossless) == 1 else 'methods change'} nothing here.")
