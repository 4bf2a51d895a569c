"""`foretell assess`: what changed in a compressed model, and how far a model can be trusted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options
from foretell.cli.given import is_given, refuse_unused
from foretell.cli.progress import progress
from foretell.core.target_options import PLAIN_TARGET
from foretell.utils.assignments import split_assignment
from foretell.utils.paths import require_folder_place

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@options.with_settings(PLAIN_TARGET, "target", ("kv_cache_dtype", "kv_cache_policy", "sparsity"))
def assess(
    ctx: typer.Context,
    model: options.SourceModel = options.DEFAULT_MODEL,
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model to compare with; the same one in its exact numbers, or another."),
    ] = None,
    dtype: options.Dtype = "auto",
    target: options.Target = options.NO_TARGET,
    against_dtype: Annotated[str, typer.Option(metavar="NAME", help="Dtype of --against.")] = "float32",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="Text to read, each path a domain of its own; repeatable. Default: six short texts."
        ),
    ] = None,
    probes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Probes as JSON lines. Default: those of the package.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="About 40 % of the work: less text, every third probe, fewer answers; wider intervals."
        ),
    ] = False,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of a sequence of text.")] = 512,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens of a domain.")] = 2048,
    answers: Annotated[int, typer.Option(metavar="N", min=1, max=24, help="Greedy answers that are written.")] = 12,
    max_new_tokens: options.MaxNewTokens = 64,
    recall_facts: Annotated[int, typer.Option(metavar="N", help="Facts of a text that is asked about.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the noise and of the invented facts.")] = 0,
    budget: Annotated[
        str,
        typer.Option(
            metavar="NAME=MOST,…", help="End with status 1 if a measure is above, such as kl=0.02,new_errors=0."
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the report, its page and charts.")] = None,
    device: options.Device = "cpu",
    as_json: options.Json = False,
) -> None:
    """Assess a model on texts, probes and noise, alone or beside another: what did a compression change?

    Perplexity, calibration error, knowledge probes, recall from a text, robustness to noise in the prompt, and greedy
    answers; beside another model also KL divergence, total variation, same most probable token, and flips.

    foretell assess --dtype int8 --against smollm2-135m --quick

    foretell assess pruned --against smollm2-135m --budget kl=0.05,probe_flips=0.05 --out report
    """
    from foretell.bench.console import print_sections
    from foretell.lab.assess.probes import read_probes
    from foretell.lab.assess.report import broken_budgets, check_budgets, sections, title
    from foretell.lab.assess.run import AssessSettings, as_record, write_assessment
    from foretell.lab.assess.run import assess as run
    from foretell.load import load

    refuse_unused(ctx, ("against_dtype",), "no --against names a model to compare with", against is None)
    budgets = _budgets(budget)
    check_budgets(budgets, against is not None)
    require_folder_place(out)
    asked = read_probes(probes)
    settings = AssessSettings(
        length=length, tokens=tokens, answers=answers, max_new_tokens=max_new_tokens, recall_facts=recall_facts,
        seed=seed, decoded=target["kv_cache_policy"] is not None,
    )  # fmt: skip
    if quick:
        settings = settings.quick(tokens=not is_given(ctx, "tokens"), answers=not is_given(ctx, "answers"))
        asked = asked if probes is not None else asked[::3]
    with progress(f"loading {model}") as show:

        def update(what: str, share: float) -> None:
            show(share, f"{what}: {share:.0%} of the assessment done")

        subject = load(model, dtype, device, **target)
        other = None if against is None else load(against, against_dtype, device)
        assessment = run(subject, other, text or [], asked, settings, update)
    broken = broken_budgets(assessment.measures(), budgets)
    if as_json:
        typer.echo(json.dumps(as_record(assessment), indent=1))
    else:
        typer.echo(title(assessment))
        print_sections(sections(assessment))
    if out is not None:
        source = ", ".join(map(str, text)) if text else "the texts of the package"
        conditions = f"{source}; {len(asked)} probes; KV cache {target['kv_cache_dtype']}, "
        conditions += f"policy {target['kv_cache_policy'] or 'none'}, sparsity {target['sparsity'] or 'none'}."
        for path in write_assessment(out, assessment, conditions):
            typer.echo(str(path), err=True)
    if broken:
        raise ValueError("; ".join(broken))


def _budgets(text: str) -> dict[str, float]:
    """Most values by measure."""
    budgets = {}
    for part in options.split_commas(text):
        name, value = split_assignment(part, "--budget", "kl=0.02")
        try:
            budgets[name] = float(value)
        except ValueError as error:
            raise ValueError(f"--budget {name}: a number was expected, found {value!r}") from error
    return budgets
