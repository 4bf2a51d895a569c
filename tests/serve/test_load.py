"""`foretell bench serve` against a running server."""

import json
from pathlib import Path

import pytest
from serving import Server
from typer.testing import CliRunner

from foretell.bench.load_test import Server as Target
from foretell.bench.load_test import Workload, run_load
from foretell.cli.bench import app


def test_every_prompt_is_answered_and_counted(server: Server) -> None:
    found = run_load(Target("ours", server.url), Workload(("abc", "abcabc", "xyz"), 12), 2)
    assert [a.tokens for a in found.answers] == [12] * 3
    assert found.tokens_per_second == pytest.approx(36 / found.seconds)
    assert all(0 < a.first <= a.last <= found.seconds for a in found.answers)


def test_the_command_compares_servers_in_turn(server: Server, tmp_path: Path) -> None:
    prompts, words = tmp_path / "prompts.jsonl", ("abc", "bca", "cab", "acb")
    mixes = ("low_entropy", "mixed", "low_entropy", "high_entropy")
    lines = [{"prompt": f"{word} " * 20, "category": mix} for word, mix in zip(words, mixes, strict=True)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = ["serve", f"ours={server.url}", f"plain={server.url}", "--concurrency", "1,3", "--repeats", "2"]
    command += [
        "--max-new-tokens",
        "6",
        "--tasks",
        str(prompts),
        "--categories",
        "low_entropy,mixed",
        "--fields",
        'plain={"speculative": {"max_drafts": 0}}',
        "--json",
        str(tmp_path / "results.json"),
    ]
    output = CliRunner().invoke(app, command).output
    rows = [line for line in output.splitlines() if line.startswith("| ")]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(r["server"], r["concurrency"]) for r in results[:4]] == [
        ("ours", 1), ("plain", 1), ("ours", 3), ("plain", 3),
    ]  # fmt: skip
    assert [a["category"] for a in results[3]["answers"]] == ["low_entropy", "mixed", "low_entropy"]
    # Neither has read what the other has: each one's first prompts are new to the cache.
    first = {r["server"]: [a["cached_tokens"] for a in r["answers"]] for r in reversed(results)}
    assert first["ours"] == first["plain"]
    assert sum(first["plain"]) < sum(a["prompt_tokens"] for a in results[0]["answers"]) / 2
    assert [row.split("|")[1].strip() for row in rows[1:]] == ["ours, 1", "plain, 1", "ours, 3", "plain, 3"]
    assert all(row.endswith("| 100% |") for row in rows[1:])
    printed = CliRunner().invoke(app, [*command[:-1], "-"]).stdout
    assert {r["server"] for r in json.loads(printed)} == {"ours", "plain"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["http://127.0.0.1:1"], "NAME=VALUE was expected"),
        (["ours=http://127.0.0.1:1"], "start the server first"),
        (["ours=http://127.0.0.1:1", "--fields", "other={}"], "'other', which is not among the servers"),
        (["ours=http://127.0.0.1:1", "--fields", "ours=[]"], "a JSON object was expected"),
    ],
)
def test_wrong_servers_and_fields_are_named(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())
