"""What the documents say works."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.main import get_command

from exact import Chooser, distance, random_distribution, sequence_distribution, tree_of
from foretell.accept import Match
from foretell.catalogue import BUILT_IN, BuildContext, Entry, find
from foretell.cli.commands import commands
from foretell.core.tree import TokenTree
from foretell.draft import Predictor
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Completion, Request
from foretell.lab.reproduce.claims import CLAIMS
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree, Shape
from foretell.testing import TINY, tiny_decoder

ROOT = Path(__file__).parent.parent
PROSE, CODE = 100, 120
"""Most columns of a line of Markdown prose, and of code."""
FOLDERS = ("docs", "examples", "src", "tests", "tools")


def _files(*suffixes: str) -> Iterator[Path]:
    """Files of the repository with these suffixes."""
    for folder in FOLDERS:
        yield from (p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in suffixes)
    yield from (p for p in sorted(ROOT.iterdir()) if p.suffix in suffixes)


def _example(name: str) -> dict[str, Any]:
    """The names that an example of the page on drafters defines."""
    text = (ROOT / "docs" / "howto" / "add-a-drafter.md").read_text(encoding="utf-8")
    code = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    space: dict[str, Any] = {}
    exec(code[1], space)
    return space


def test_the_drafter_of_the_documents_is_lossless() -> None:
    decoder, entry = tiny_decoder(), _example("drafter")["ENTRY"]
    assert isinstance(entry, Entry)

    def generate(method: str) -> tuple[list[int], float]:
        made = (entry if method == entry.name else plain).build(BuildContext(TINY.vocab, decoder))
        engine = Engine(DecoderRunner(decoder), made)
        (done,) = engine.complete([Request([1, 2, 3, 1, 2], max_new_tokens=60)])
        return list(done.tokens), done.statistics.tokens_per_pass

    plain = find("autoregressive")
    expected, _ = generate("autoregressive")
    found, tokens_per_pass = generate(entry.name)
    assert found == expected
    assert tokens_per_pass > 1


@pytest.mark.parametrize(
    "shape",
    [Chain(3), DynamicTree(depth=4, width=2, budget=8), _example("shape")["Fork"](3)],
    ids=["chain", "tree", "the documents' fork"],
)
def test_the_predictor_of_the_documents_is_lossless(shape: Shape[Predictor]) -> None:
    requests = [Request(prompt, max_new_tokens=40) for prompt in ([1, 2, 3, 1, 2], [6], [4, 4, 4])]

    def generate(method: AnyMethod) -> list[Completion]:
        return Engine(DecoderRunner(tiny_decoder()), method, rows=2).complete(requests)

    plain = find("autoregressive").build(BuildContext(TINY.vocab, tiny_decoder()))
    found = generate(Method(_example("predictor")["PairCounts"](TINY.vocab), shape, Match()))
    assert [done.tokens for done in found] == [done.tokens for done in generate(plain)]
    assert sum(done.statistics.tokens_per_pass for done in found) > len(found)


@pytest.mark.parametrize("seed", range(4))
def test_the_acceptor_of_the_documents_is_exact(seed: int) -> None:
    p, q = random_distribution(3, seed), random_distribution(3, seed + 100)

    def grow(chooser: Chooser) -> TokenTree:
        """Two samples of the first token, and one of the second below the first of them."""
        first, other = (chooser.choose(q(()).tolist()) for _ in range(2))
        below = q((first,))
        nodes = {1: (0, first, 0), 2: (0, other, 0), 3: (1, chooser.choose(below.tolist()), 1)}
        return tree_of(nodes, [q(()), below])

    assert distance(sequence_distribution(_example("acceptor")["OneTrial"](), grow, p, 3), p) < 1e-12


def _tool(name: str) -> ModuleType:
    """A module of `tools/`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", ["README.md", "docs/methods.md"])
def test_what_the_catalogue_says_of_methods_is_generated(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert _tool("documents").generate(text) == text, "run: python tools/documents.py --write"


def test_the_file_of_methods_says_what_the_catalogue_does() -> None:
    tool = _tool("documents")
    assert tool.FILE.read_text("utf-8") == tool.methods_file(), "run: python tools/documents.py --write"


def _command_lines(text: str) -> Iterator[str]:
    """The calls of `foretell` in blocks of code, without what a shell does around them."""
    for block in re.findall(r"^```(?:console|sh|bash)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            call = re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?foretell (.*)", line.strip())
            if call is not None:
                yield re.split(r" [|<>&;#] ?", call[1] + " ")[0].strip()


def _problem(arguments: list[str]) -> str | None:
    """What is wrong with a call, apart from files that do not exist here."""
    name, *rest = arguments
    module = next((c.module for c in commands() if c.name == name), None)
    if module is None:
        return None if name.startswith("-") else "no such command"
    command: Any = get_command(import_module(module).app)
    try:
        while hasattr(command, "resolve_command") and rest:
            context = command.context_class(command, info_name=name)
            name, command, rest = command.resolve_command(context, rest)
        command.params = [p for p in command.params if p.name not in ("install_completion", "show_completion")]
        command.make_context(name, rest)
    except typer.BadParameter as error:
        return str(error) if type(error).__name__ == "MissingParameter" else None
    except typer.Exit:
        return None
    except Exception as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("目标\n模型", "目标模型"),
        ("目标\n[模型](a.md)", "目标[模型](a.md)"),
        ("目标\n**模型**，\n*目标*", "目标**模型**，*目标*"),
        ("- 目标，\n  `target`", "- 目标，`target`"),
        ("`target`\n（目标）", "`target`（目标）"),
        ("用 vLLM\n的键名", "用 vLLM\n的键名"),
        ("一。\n- 二。\n1. 三。\n\n四", "一。\n- 二。\n1. 三。\n\n四"),
        ("plain\nwords", "plain\nwords"),
    ],
)
def test_lines_of_chinese_are_joined_without_a_blank(text: str, joined: str) -> None:
    pytest.importorskip("mkdocs")
    page: Any = None
    assert _tool("site_pages").on_page_markdown(text, page, page, page) == joined


def _page(path: Path) -> Any:
    """A page; `make docs` checks that a translation has the commands of its original."""
    return pytest.param(path, id=str(path), marks=pytest.mark.exhaustive if path.name.endswith(".zh.md") else ())


MARKDOWN = sorted(p.relative_to(ROOT) for p in _files(".md") if p.name != "CHANGELOG.md")


@pytest.mark.parametrize("path", [_page(p) for p in MARKDOWN])
def test_every_command_of_the_documents_is_one_that_the_command_line_takes(path: Path) -> None:
    wrong = []
    for line in _command_lines((ROOT / path).read_text(encoding="utf-8")):
        problem = _problem(shlex.split(line))
        if problem:
            wrong.append(f"foretell {line}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("line", ["generate hi --no-such-option", "no-such-command", "train eagle3 --data x"])
def test_a_wrong_command_would_be_found(line: str) -> None:
    assert _problem(shlex.split(line))


def test_every_method_has_its_section() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)\n\n<!-- method: (\w+) -->$", text, re.MULTILINE)
    assert sections == [(e.name, e.name) for e in BUILT_IN]
    assert "<!-- table: methods -->" in text


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of Markdown that are prose: no code, table or picture; targets of links do not count."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        if not (fenced or fence or line.lstrip().startswith(("|", "!["))):
            yield number, re.sub(r"\]\([^)]*\)|https?://\S+", "]", line)
        fenced ^= fence


def test_prose_is_wrapped_at_100_columns() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in _files(".md")
        for number, line in _prose(path.read_text("utf-8"))
        if len(line) > PROSE
    ]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("word " * 21, True),
        ("- " + "word " * 20, True),
        ("| " + "word " * 30, False),
        ("```\n" + "word " * 30 + "\n```\n", False),
        ("```\ncode\n```\n" + "word " * 30, True),
        ("see [the page](https://example.org/" + "x" * 120 + ")", False),
    ],
)
def test_what_counts_as_prose(text: str, wide: bool) -> None:
    assert any(len(line.rstrip()) > PROSE for _, line in _prose(text)) is wide


def test_code_is_wrapped_at_120_columns() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in _files(".py", ".sh", ".h", ".cpp", ".js", ".css", ".html")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(re.sub(r"\s*# (type: ignore|noqa|fmt:).*$", "", line)) > CODE
    ]
    assert not wide, "\n".join(wide)


def test_a_translation_is_old_by_paragraphs_and_not_by_line_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    mkdocs = pytest.importorskip("mkdocs.exceptions")
    pages = _tool("site_pages")
    assert pages.paragraphs("one\ntwo\n\n```\ncode\n```\nthree\n") == pages.paragraphs("one two\n\nthree")
    record = {"README.md": pages.paragraphs("nothing of it")}
    monkeypatch.setattr(pages, "translations", lambda: record)
    with pytest.raises(mkdocs.PluginError, match=r"README.zh.md: \d+ paragraphs of README.md changed"):
        pages.check_translations()


def test_a_translation_is_recorded_by_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pages = _tool("site_pages")
    monkeypatch.setattr(pages, "RECORD", tmp_path)
    pages.record_translations(["README.md", "docs/howto/verify.md"])
    assert {name: set(hashes) for name, hashes in pages.translations().items()} == {
        name: set(pages.paragraphs((ROOT / name).read_text("utf-8"))) for name in ("README.md", "docs/howto/verify.md")
    }


@pytest.mark.parametrize(
    ("translation", "wrong"), [("| `a` | 一 |\n| `b` | 二 |", []), ("| `a` | 一 |", ["rows of tables"])]
)
def test_a_translation_has_the_rows_of_its_tables(translation: str, wrong: list[str]) -> None:
    pytest.importorskip("mkdocs")
    different = _tool("site_pages").differences("| `a` | one |\n| `b` | two |", translation)
    assert [what for what, *_ in different] == wrong


def test_every_property_of_a_method_names_its_test() -> None:
    lines = (ROOT / "tests" / "README.md").read_text("utf-8").splitlines()
    rows = [re.fullmatch(r"\|.*\| `(.+)` \| `(.+)` \|", line) for line in lines if line.startswith("|")][2:]
    assert rows and all(rows)
    for row in rows:
        assert row is not None and f"def test_{row[2]}(" in (ROOT / "tests" / row[1]).read_text("utf-8"), row


def test_every_claim_has_a_verdict_and_a_broken_method_and_a_paragraph_if_it_is_not_reproduced() -> None:
    text = (ROOT / "docs" / "howto" / "reproduce.md").read_text("utf-8")
    verdicts, broken = text.split("## Broken methods")
    for name in (claim.method for claim in CLAIMS):
        row = re.search(rf"^\| `{name}` \|.*\| ([a-z ]+) \|$", verdicts, re.MULTILINE)
        assert row is not None and f"| `{name}` |" in broken, name
        assert row[1] != "not reproduced" or f"**`{name}`**" in verdicts, name
