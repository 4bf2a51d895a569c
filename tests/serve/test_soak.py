"""`foretell bench soak` and `bench serve --identity` against a server that is right, and one that is not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import Server, running_server
from typer.testing import CliRunner

from foretell.bench import soak_histories
from foretell.bench.identity import (
    IdentityResult,
    check_identity,
    expected_answers,
    identity_requests,
    identity_table,
)
from foretell.bench.load_test import Server as Target
from foretell.bench.soak import Soak, SoakPlan, SoakReport, SoakSample, verdict
from foretell.bench.soak_client import BusyError, KnownAnswers, SoakClient, SoakError, find_target
from foretell.bench.soak_load import _KINDS, act
from foretell.cli.bench import app
from foretell.engine.request import Update

PROMPTS = ("abc", "abcabc", "xyz")


def test_every_kind_of_client_gets_what_it_should(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownAnswers()
    client = SoakClient(find_target(server.url, "", 6), known, 1)
    for name in (*_KINDS, *_KINDS, *["send nonsense"] * 20):
        monkeypatch.setattr(client.rng, "choices", lambda names, *w, name=name, **k: [name] if w else list(names)[:3])
        assert act(client) == name
    server.wait_until_idle()
    assert not known.differences


@pytest.mark.exhaustive
def test_a_soak_passes_and_draws_a_curve(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "report"
    command = ["soak", server.url, "--minutes", "0.03", "--clients", "4", "--max-growth", "9", "--output", str(path)]
    result = CliRunner().invoke(app, [*command, "--max-new-tokens", "4"])
    assert result.exit_code == 0, result.output
    assert "\npassed: " in result.stdout and path.read_text() in result.stdout
    assert result.stdout.count("\n| 0.0 |") > 1 and "| stream greedy |" in result.stdout


def test_a_soak_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose engine gives other texts now and then, and forgets no row."""
    with running_server() as server:
        step, steps = type(server.engine).step, list[int]()

        def wrong(self: Any) -> list[Update]:
            steps.append(1)
            return [replace(u, text=u.text + "x" * (len(steps) % 7 == 0)) for u in step(self)]

        monkeypatch.setattr(type(server.engine), "step", wrong)
        monkeypatch.setattr(type(server.engine._scheduler.rows), "unowned", 2)
        report = Soak(find_target(server.url, "", 6), SoakPlan(1.5, clients=4, samples=6, max_growth=9.0)).run()
        monkeypatch.undo()
    found = " ".join(report.problems())
    assert report.differences and "answers differ" in found and "2 rows of the cache" in found
    assert verdict(report).startswith("FAILED: ")


def test_the_speed_after_each_hostile_history_is_printed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_histories, "_PAUSE", 0.0)
    monkeypatch.setattr(soak_histories, "_BURST", 4)
    asked = list[dict[str, Any]]()
    post = SoakClient.post

    def note(self: SoakClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        return post(self, path, body)

    monkeypatch.setattr(SoakClient, "post", note)
    command = ["soak", server.url, "--minutes", "0.01", "--clients", "1", "--max-growth", "9", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, [*command, "--histories", "3"])
    assert "after / before" in result.stdout, result.output
    names = ("answers of one or two tokens", "greedy, then sampled", "a burst of 64", "a pause")
    assert all(f"\n| {name} |" in result.stdout for name in names)
    ordinary = [body for body in asked if "cache_salt" in body and body.get("temperature") == 0]
    assert len(ordinary) == 6 * 10 and len({body["cache_salt"] for body in ordinary}) == 6
    assert [body["max_tokens"] for body in asked[-6 * 10 - 13 :] if body["max_tokens"] < 4] == [1, 2, 1]


def test_the_verdict_names_growth_files_errors_and_what_is_left() -> None:
    def sample(i: int, **fields: float) -> SoakSample:
        start = SoakSample(float(i), i, 1e9 + 1e7 * i, 1e6 * i, 10.0, 0.0, 0.0, 0.0)
        return replace(start, **fields)  # type: ignore[arg-type]

    report = SoakReport(SoakPlan(60), samples=[sample(i) for i in range(30)])
    assert report.growth == pytest.approx((1e9 + 9e6 * 27) / (1e9 + 9e6 * 12) - 1, rel=0.01)
    report.last = sample(30, files=40.0, waiting=1.0)
    report.errors, report.engine_errors = ["stream greedy: x", "stream greedy: y"], 3.0
    found = report.problems()
    words = ("2 errors (2 in stream greedy)", "3 requests ended", "1 waiting", "10 at the start, 40", "grew by")
    assert len(found) == len(words) and all(w in f for w, f in zip(words, found, strict=True)), found
    steady = SoakReport(SoakPlan(60), samples=[sample(0)] * 30, last=sample(0))
    assert not steady.problems() and verdict(steady).startswith("passed")


def test_a_server_that_refuses_or_breaks_off_is_told_apart() -> None:
    with running_server() as server:
        client = SoakClient(find_target(server.url, "", 30), KnownAnswers(), 0)
        server.service.admit_request = lambda: server.service.admit_tokens(1 << 60, 1 << 60)  # type: ignore[method-assign]
        with pytest.raises(SoakError, match="status 200, found 400"):
            client.post("/v1/completions", {"prompt": "x"})
        server.signal()
        with pytest.raises((BusyError, OSError)):
            client.post("/v1/completions", {"prompt": "x"})
    with pytest.raises(ValueError, match="start the server first"):
        find_target("127.0.0.1:9", "", 8)


def checked(server: Server, prompts: tuple[str, ...], tokens: int, streams: tuple[int, ...]) -> list[IdentityResult]:
    target, requests = Target("ours", server.url), identity_requests(prompts)
    expected = expected_answers(target, requests, tokens)
    return check_identity(target, requests, tokens, expected, streams)


def test_answers_under_load_are_compared_with_plain_ones(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(server, PROMPTS, 12, (1, 3))
    cases = [(n, drafts, warm) for n in (1, 3) for drafts in (False, True) for warm in (False, True)]
    assert [(r.case.concurrency, r.case.drafts, r.case.warm) for r in found] == cases
    assert all((r.greedy, r.sampled, r.share(False), r.share(True)) == (3, 3, 1.0, 1.0) for r in found)
    cached = [r.cached for r in found]
    assert min(cached[1::2]) > 0.5 and max(cached[::2]) == 0
    assert identity_table(found).markdown().count("100.0% | 100.0% |") == 8
    # A target that answers otherwise where it may draft.
    step = type(server.engine).step

    def wrong(self: Any) -> list[Update]:
        return [replace(u, text=u.text.upper() + "?" if u.drafted else u.text) for u in step(self)]

    monkeypatch.setattr(type(server.engine), "step", wrong)
    found = checked(server, ("abcabcabc" * 4,), 40, (1,))
    assert [r.share(False) < 1 for r in found] == [False, False, True, True]
    assert found[2].differences[0].text != found[2].differences[0].expected


def test_requests_are_as_many_and_as_different_as_asked() -> None:
    requests = identity_requests(PROMPTS, 20)
    assert len(requests) == len(set(requests)) == 20
    assert sum(r.seed is None for r in requests) == 10 and identity_requests(PROMPTS) == requests[: 2 * len(PROMPTS)]


@pytest.mark.exhaustive
def test_the_command_checks_identity(server: Server, tmp_path: Path) -> None:
    prompts, saved = tmp_path / "prompts.txt", tmp_path / "saved.jsonl"
    prompts.write_text("\n".join(PROMPTS))
    command = ["serve", f"ours={server.url}", "--identity", "--concurrency", "2", "--tasks", str(prompts)]
    command += ["--requests", "5", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, [*command, "--save", str(saved)])
    assert result.exit_code == 0 and "| ours, 2, drafts, warm | 5 |" in result.output, result.output
    # The answers of another run: equal, then not.
    assert CliRunner().invoke(app, [*command, "--against", str(saved)]).exit_code == 0
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [line["seed"] is None for line in lines] == [True, False, True, False, True]
    lines[1]["text"] += "!"
    saved.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(app, [*command, "--against", str(saved)])
    assert result.exit_code == 1 and result.output.count("100.0% | 50.0% |") == 4
    for more, words in (
        (["--against", str(saved), "--max-new-tokens", "9"], "lacks 5 of the 5 requests"),
        (["--against", str(tmp_path / "none")], "no answers can be read"),
        (["--save", str(tmp_path / "no" / "folder")], "there is no directory"),
    ):
        assert words in CliRunner().invoke(app, [*command, *more]).output
    plain = [word for word in command if word != "--identity"]
    assert "would have no effect: they belong to --identity" in CliRunner().invoke(app, plain).output
