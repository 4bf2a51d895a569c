"""Hook of MkDocs: pages that are made from files outside `docs/` and from the command line's help, and a check of the
translations.

`README.md` is the start page, so that text stands once. Links between it and `docs/` are rewritten to pages.
"""

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import typer.cli
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from typer.main import get_command

from foretell.cli.commands import commands

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
}
"""Files of the repository's root, and the pages that they become."""
RECORD = ROOT / "tools" / "translations"
"""For each file that has a Chinese translation with the same headings, code, links and figures: its paragraphs as they
were translated, one a line, so that changes of several branches merge. `python tools/site_pages.py FILE.md ...` writes
them after a translation.
"""
MOST_CHANGES = 8
"""Paragraphs that may have changed since."""
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_COMPLETION = re.compile(r"^\* `--(install|show)-completion`: .*\n", re.MULTILINE)
_LANGUAGES = re.compile(r"^\[English\]\(.*\)$\n", re.MULTILINE)
_MARKUP = re.compile(r"\[/?(?:dim|bold|i)?\]")
_HAN, _MARK = "\u4e00-\u9fff", "\u3001-\u303f\uff01-\uff5e"
_CHINESE_BREAK = re.compile(
    rf"(?<=[{_HAN}])\n *(?=(?:\[|\*\*)?[{_HAN}])|(?<=[{_MARK}])\n *(?=[\w`(\[]|\*\S)(?!\d+\. )|(?<=\S)\n *(?=[{_MARK}])"
)
"""A line's end where Chinese has no blank: between two characters, or beside a punctuation mark of full width."""


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the pages in `build/docs`: those of `docs/`, and the generated ones."""
    check_translations()
    folder = ROOT / "build" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for source, page in PAGES.items():
        (folder / page).write_text(root_links((ROOT / source).read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "reference" / "cli.md").write_text(command_line(), encoding="utf-8")
    config.docs_dir = str(folder)
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository's root into links to their pages, and leave out those between languages,
    for which the site has a menu. Join lines of Chinese, between which a browser would show a blank.
    """
    markdown = re.sub(r"\.zh\.md(?=[)#])", ".md", _CHINESE_BREAK.sub("", _LANGUAGES.sub("", markdown)))
    for source, target in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}").replace(f"](../../{source}", f"](../{target}")
    return markdown


def root_links(text: str) -> str:
    """Markdown of a file in the repository's root, with its links seen from `docs/`."""
    text = re.sub(r"\]\(docs/", "](", text)
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text


def command_line() -> str:
    """The help of every command, as a page."""
    parts = ["# Command line\n\nThe help of every command, as `foretell COMMAND --help` prints it.\n"]
    for entry in (c for c in commands() if not c.is_of_group):
        command: Any = get_command(import_module(entry.module).app)
        context = command.context_class(command, info_name=f"foretell {entry.name}")
        text = typer.cli.get_docs_for_click(obj=command, ctx=context, name=f"foretell {entry.name}")
        parts.append("\n".join(_deeper(_MARKUP.sub("", _COMPLETION.sub("", text)))))
    return "\n".join(parts)


def _deeper(text: str) -> Iterator[str]:
    """Lines with headings one level deeper, outside of code."""
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        yield "#" + line if line.startswith("#") and not fenced else line


def check_translations() -> None:
    """Raise `PluginError` where a translation is missing, differs from its source in structure, or is old."""
    for name, translated in translations().items():
        source = ROOT / name
        translation = source.with_suffix(".zh.md")
        if not translation.is_file():
            raise PluginError(f"{name} has no translation {translation.name}")
        text = source.read_text("utf-8")
        for what, found, expected in differences(text, translation.read_text("utf-8")):
            raise PluginError(f"{translation.name}: {what} {found}, but {name} has {expected}; translate the change")
        changed = len(set(paragraphs(text)) - set(translated))
        if changed > MOST_CHANGES:
            raise PluginError(
                f"{translation.name}: {changed} paragraphs of {name} changed since its translation, at most "
                f"{MOST_CHANGES} may; translate them, then run python tools/site_pages.py {name}"
            )


def translations() -> dict[str, list[str]]:
    """The record of translations."""
    record = {path.relative_to(RECORD): path.read_text("utf-8").split() for path in sorted(RECORD.rglob("*.txt"))}
    return {name.with_suffix(".md").as_posix(): hashes for name, hashes in record.items()}


def paragraphs(text: str) -> list[str]:
    """Paragraphs of prose, each by a hash that does not depend on its line breaks."""
    parts = re.split(r"\n\s*\n", _LANGUAGES.sub("", _CODE.sub("", text)))
    return [sha256(" ".join(part.split()).encode()).hexdigest()[:8] for part in parts if part.strip()]


def record_translations(names: Sequence[str]) -> None:
    """Record that these files are translated as they are."""
    for name in names:
        path = (RECORD / name).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        hashes = sorted(set(paragraphs((ROOT / name).read_text("utf-8"))))
        path.write_text("\n".join(hashes) + "\n", "utf-8")


def differences(source: str, translation: str) -> Iterator[tuple[str, Any, Any]]:
    """How a translation differs in structure: levels of headings, blocks of code, links, figures, rows of tables."""
    parts = ("levels of headings", _levels), ("code", _CODE.findall), ("links", _targets), ("figures", _figures)
    for what, structure in (*parts, ("rows of tables", _rows)):
        expected, found = structure(source), structure(translation)
        if found != expected:
            odd = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            if odd is None:
                yield what, f"of which there are {len(found)}", len(expected)
            else:
                yield f"{what} number {odd + 1}:", repr(found[odd]), repr(expected[odd])


def _levels(text: str) -> list[int]:
    return [len(m) for m in _HEADING.findall(_CODE.sub("", text))]


def _rows(text: str) -> list[list[str]]:
    """The code in the first cell of every row of a table, such as the name of an option."""
    first_cells = re.findall(r"^ *\|([^|]*)\|", _CODE.sub("", text), re.MULTILINE)
    return [sorted(re.findall(r"`[^`]+`", cell)) for cell in first_cells]


def _figures(text: str) -> list[str]:
    """Numbers with a decimal point, sorted: prose may have them in another order."""
    return sorted(re.findall(r"\d+\.\d+", _CODE.sub("", text)))


def _targets(text: str) -> list[str]:
    """Targets of links, sorted, without anchors; the languages' links to each other are left out."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", _CODE.sub("", text))
    return sorted({target.replace(".zh.md", ".md") for target in found} - {"", "README.md", "tour.md"})


if __name__ == "__main__":
    record_translations(sys.argv[1:])
