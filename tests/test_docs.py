"""What the documents say works."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell.catalogue import BUILT_IN, BuildContext, Entry, find
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.runner import DecoderRunner
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


def _example() -> Entry:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    code = re.search(r"<!-- example: drafter -->\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    space: dict[str, object] = {}
    exec(code[1], space)
    entry = space["ENTRY"]
    assert isinstance(entry, Entry)
    return entry


def test_the_drafter_of_the_design_page_is_lossless() -> None:
    decoder, entry = tiny_decoder(), _example()

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


@pytest.mark.parametrize("path", ["README.md", "docs/methods.md"])
def test_what_the_catalogue_says_of_methods_is_generated(path: str) -> None:
    spec = importlib.util.spec_from_file_location("readme_commands", ROOT / "tools" / "readme_commands.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = (ROOT / path).read_text(encoding="utf-8")
    assert tool.generate(text) == text, "run: python tools/readme_commands.py --write"


def test_every_method_has_its_section() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)\n\n<!-- method: (\w+) -->$", text, re.MULTILINE)
    assert sections == [(e.name, e.name) for e in BUILT_IN]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- table: methods -->" in readme


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
