"""`foretell verify`: proof on your own model and machine."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options

if TYPE_CHECKING:
    from rich.text import Text

    from foretell.verify import Company, Divergence, Identity, LawTest, Report

_INDENT = " " * 8
app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
def verify(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD ...]", help="Methods to check; none: all that can be built from what is given."
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft_model: options.DraftModel = None,
    reference: options.Reference = None,
    speculative_config: options.SpeculativeJson = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Prompts of your own for the greedy comparison, as `generate` takes them."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each compared answer.")] = 48,
    samples: Annotated[
        int, typer.Option(metavar="N", help="Samples of the law test; more see smaller differences.")
    ] = 1500,
    seed: Annotated[int, typer.Option(metavar="N", help="First seed of the samples.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail for methods that say they are lossy, too.")] = False,
    as_json: options.Json = False,
) -> None:
    """Check on your model and machine that a method changes nothing.

    Three checks a method. Greedy answers equal those of plain decoding; where they do not, a tie within rounding is
    told from a bug. Sampled answers follow the target's own law, by a chi-squared test that says how small a difference
    it would have seen. Answers do not depend on who shares the batch. Exits with 1 if a method that claims to be
    lossless fails.

        foretell verify sam_recycling

        foretell verify draft_model --model big/ --draft-model small/ --samples 20000
    """
    from foretell.cli.setup import load_models, parse_method, spinner
    from foretell.verify import Settings, Verifier, buildable
    from foretell.verify.prompts import PROMPTS

    wish = parse_method(None, speculative_config, draft_model, methods or ())
    chosen = methods or ([wish.name] if wish.config.method else [])
    texts = PROMPTS if prompts is None else _texts(prompts)
    settings = Settings(texts, max_new_tokens, samples, seed)
    ready = load_models(model, dtype, device, wish, reference)
    verifier, reports = Verifier(ready.model, settings), list["Report"]()
    names = [ready.method(n).name for n in chosen] or buildable(ready.model, ready.drafts, ready.references)
    for i, name in enumerate(names):
        with spinner(f"checking {name}, {i + 1} of {len(names)}"):
            reports.append(verifier.check(lambda: ready.method(name)))  # noqa: B023 (called before the loop goes on)
        if not as_json:
            show(reports[-1])
    if as_json:
        typer.echo(json.dumps([record(r) for r in reports], indent=1, ensure_ascii=False))
    failed = [r.method for r in reports if not r.passed and (r.lossless or strict)]
    conclude(reports, failed, as_json)


def _texts(path: Path) -> tuple[str, ...]:
    """The prompts of a file, which must all be good here."""
    from foretell.cli.prompts import LineError, PromptDefaults, read_prompts
    from foretell.core.sampling import SamplingParams

    found = [line for _, line in read_prompts(path, PromptDefaults(SamplingParams(), 1, (), False, None))]
    bad = next((line for line in found if isinstance(line, LineError)), None)
    if bad is not None:
        raise ValueError(f"{path}, line {bad.number}: {bad.reason}")
    return tuple(
        t.prompt if isinstance(t.prompt, str) else t.prompt[-1]["content"]
        for t in found
        if not isinstance(t, LineError)
    )


def show(report: "Report") -> None:
    """Print a report."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    claim = ("claims to be lossless", "dim") if report.lossless else ("says it is LOSSY", "red")
    console.print(Text.assemble((report.method, "bold"), "  ", claim, (f", {report.seconds:.0f} s", "dim")))
    lines = (
        (report.identity.passed, identity_line(report.identity)),
        (report.distribution.passed, law_line(report.distribution)),
    )
    for passed, text in (*lines, (report.company.passed, company_line(report.company))):
        console.print(verdict(passed, report.lossless).append(text))
    for divergence in (*report.identity.divergences, *report.company.divergences):
        console.print(
            Text(f"{_INDENT}{divergence_line(divergence)}", style="yellow" if divergence.verdict == "tie" else "red")
        )


def verdict(passed: bool, lossless: bool) -> "Text":
    """The word before a check."""
    from rich.text import Text

    word, style = ("pass", "green") if passed else ("FAIL", "bold red") if lossless else ("price", "red")
    return Text(f"  {word:5} ", style=style)


def identity_line(i: "Identity") -> str:
    """The first check in a line."""
    differ = f"{len(i.divergences)} part" if i.divergences else "all equal to plain decoding"
    return f"same greedy answers: {i.prompts} prompts, {i.tokens} tokens, {i.tokens_per_pass:.2f} per pass; {differ}"


def law_line(t: "LawTest") -> str:
    """The second check in two lines."""
    drafts = f"{t.accepted} of {t.drafted} drafts accepted" if t.drafted else "nothing was drafted, so this says little"
    found = f"chi² {t.statistic:.1f} on {t.freedom} degrees of freedom, p {t.p_value:.2g}"
    distance = f"total variation {t.variation:.3f}, chance alone gives {t.floor:.3f}"
    rounding = f", rounding {t.rounding:.3f}" if t.rounding else ""
    sight = f"a variation of {t.effect:g} would be seen with a chance of {t.power:.0%}, {t.detectable:.3f} with 90%"
    return f"same law: {found}; {distance}{rounding}\n{_INDENT}{t.samples} samples, {drafts}; {sight}"


def company_line(c: "Company") -> str:
    """The third check in a line."""
    parts = len(c.divergences) + c.sampled_differ
    differ = (
        f"{parts} part" + (f" (p {c.p_value:.2g} for the sampled ones)" if c.sampled_differ else "")
        if parts
        else "all equal"
    )
    return f"same in company: {c.greedy} greedy and {c.sampled} sampled answers, alone and {c.rows} at a time; {differ}"


def divergence_line(d: "Divergence") -> str:
    """Where two answers part, and why."""
    why = "a tie that rounding decides" if d.verdict == "tie" else "rounding does not explain it"
    return (
        f"prompt {d.prompt + 1}, token {d.position + 1}: {d.expected_text!r} became {d.found_text!r}; margin "
        f"{d.margin:.3g} in logits, "
        f"rounding noise {d.noise:.3g}: {why}"
    )


def record(report: "Report") -> dict[str, object]:
    """A report as `--json` prints it."""

    def judged(check: "Identity | LawTest | Company") -> dict[str, object]:
        return asdict(check) | {"passed": check.passed}

    return {
        "method": report.method,
        "lossless": report.lossless,
        "passed": report.passed,
        "identity": judged(report.identity),
        "law": judged(report.distribution),
        "company": judged(report.company),
        "seconds": report.seconds,
    }


def conclude(reports: "list[Report]", failed: list[str], as_json: bool) -> None:
    """The last line, and the exit status."""
    if failed:
        raise ValueError(f"{', '.join(failed)} changed what the model says; see the checks above")
    lossless = [r for r in reports if r.lossless]
    if lossless and not as_json:
        typer.echo(f"{len(lossless)} {'method changes' if len(lossless) == 1 else 'methods change'} nothing here.")
