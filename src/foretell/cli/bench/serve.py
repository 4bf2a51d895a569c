"""`foretell bench serve`: servers under load."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.identity import IdentityResult, check_identity, expected_answers, identity_requests, identity_table
from foretell.bench.load_test import LoadResult, Server, Workload, load_table, run_all, with_own_salts
from foretell.bench.questions import BUILT_IN
from foretell.bench.saved_answers import read_answers, save_answers
from foretell.cli.bench.inputs import Categories, load_selected_questions, parse_counts, print_or_write
from foretell.cli.given import refuse_unused
from foretell.utils.assignments import split_assignment
from foretell.utils.paths import require_file_place
from foretell.utils.validation import parse_json

_SHOWN_DIFFERENCES = 5


def serve_(
    ctx: typer.Context,
    servers: Annotated[
        list[str],
        typer.Argument(metavar="NAME=URL", help="Servers of OpenAI's chat completions; they are loaded in turn."),
    ],
    questions: Annotated[str, typer.Option("--tasks", metavar="FILE", help="Prompts; see bench run.")] = BUILT_IN,
    per_category: Annotated[int | None, typer.Option(metavar="N", help="Prompts per category.")] = None,
    categories: Categories = "",
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Streams at a time.")] = "1,4,16",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="New tokens per answer.")] = 128,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Repetitions.")] = 3,
    fields: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Further fields of a server's requests; repeatable."),
    ] = None,
    identity: Annotated[
        bool,
        typer.Option(
            "--identity",
            help="Compare answers, greedy and with seeds, with and without drafts, with a cold and a warm cache, at "
            "every number of streams, with that of the same request alone, without drafts and with a cold cache; "
            "status 1 if one of the first server differs. No speed is measured.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write every answer's numbers to this file; - prints them, no table."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="--identity: requests of every case (default: two per prompt)."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="--identity: write the answers of the first server without drafts."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="--identity: compare with answers that --save wrote, of another server."),
    ] = None,
) -> None:
    """Measure servers under load: tokens per second, time to the first token and between tokens, greedy.

    The first server is compared with the others. Two names of one server keep their prompts apart in its cache.

        foretell bench serve ours=http://127.0.0.1:8000 peer=http://127.0.0.1:8080

        foretell bench serve ours=http://127.0.0.1:8000 --identity --requests 500 --concurrency 1,32
    """
    extra = dict(split_assignment(each, "--fields", "ours='{}'") for each in fields or ())
    named = [Server(*split_assignment(each, "a server", "ours=http://127.0.0.1:8000")) for each in servers]
    if missing := set(extra) - {s.name for s in named}:
        raise ValueError(f"--fields names {sorted(missing)[0]!r}, which is not among the servers")
    for text in extra.values():
        if not isinstance(parse_json(text, "--fields"), dict):
            raise ValueError(f"--fields: a JSON object was expected, found {text!r}")
    named = with_own_salts([replace(s, fields=extra.get(s.name, "{}")) for s in named])
    require_file_place(json_file)
    selected = load_selected_questions(questions, per_category, categories)[1]
    workload = Workload(tuple(q.turns[0] for q in selected.questions), max_new_tokens)

    counts = parse_counts(concurrency, "--concurrency")
    refuse_unused(ctx, ("repeats", "json_file"), "--identity compares answers and measures no speed", identity)
    refuse_unused(ctx, ("requests", "save", "against"), "they belong to --identity", not identity)
    if identity:
        _check_identity(named, workload, counts, _IdentityOptions(requests, save, against))
        return

    def report(result: LoadResult) -> None:
        speed = f"{result.tokens_per_second:.1f} tokens/s"
        typer.echo(f"{result.server}, {result.concurrency} streams: {speed}", err=True)

    results = run_all(named, workload, counts, repeats, report)
    asked = [q.category for q in selected.questions]
    print_or_write(
        lambda: typer.echo(load_table(results).markdown(), nl=False),
        json_file,
        lambda: json.dumps([_record(r, asked) for r in results], indent=1),
    )


def _record(result: LoadResult, categories: Sequence[str]) -> dict[str, object]:
    """All numbers of a result, with the category of each prompt."""
    answers = [{"category": c, **asdict(a)} for c, a in zip(categories, result.answers, strict=True)]
    return {**asdict(result), "answers": answers}


@dataclass(frozen=True)
class _IdentityOptions:
    requests: int | None
    save: Path | None
    against: Path | None


def _check_identity(
    servers: Sequence[Server], workload: Workload, concurrencies: Sequence[int], options: _IdentityOptions
) -> None:
    """Print the shares of equal answers, and end with status 1 if one of the first server differs."""
    require_file_place(options.save)
    requests = identity_requests(workload.prompts, options.requests)
    most = workload.max_tokens

    def report(result: IdentityResult) -> None:
        shares = f"{result.share(False):.1%} equal at temperature 0, {result.share(True):.1%} with seeds"
        typer.echo(f"{result.server}, {result.case}: {shares}", err=True)
        for difference in result.differences[:_SHOWN_DIFFERENCES]:
            typer.echo(f"  {difference}", err=True)

    results = list[IdentityResult]()
    saved = read_answers(options.against, requests, most) if options.against is not None else None
    for server in servers:
        if saved is None or (server is servers[0] and options.save is not None):
            own = expected_answers(server, requests, most)
            if server is servers[0] and options.save is not None:
                save_answers(options.save, requests, own, most)
        results += check_identity(server, requests, most, own if saved is None else saved, concurrencies, report)
    typer.echo(identity_table(results).markdown(), nl=False)
    if any(result.differences for result in results if result.server == servers[0].name):
        raise typer.Exit(1)
