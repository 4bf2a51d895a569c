"""Plain text for `tools/prompts.py` from packages: articles, news and handbooks, and German sentences.

GENSIM is the unpacked source package of gensim, whose test data hold articles of an encyclopaedia and news; DEBIAN a
folder that the Debian packages anarchism, debian-handbook and fortunes-de were unpacked into.

.venv/bin/python tools/passages.py GENSIM DEBIAN --passages DIR --german DIR
"""

import bz2
import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

LEAST = 150
"""Characters of a line of an article that is a paragraph."""
PAGES = 40, 60
"""Of the questions and of the handbook, in English."""
LONGEST = 60_000


def articles(dump: Path) -> Iterator[str]:
    """The paragraphs of an encyclopaedia's articles without their mark-up."""
    pages = bz2.decompress(dump.read_bytes()).decode()
    for text in re.findall(r"<text[^>]*>(.*?)</text>", pages, re.S):
        if not text.startswith("#"):
            lines = bare(text).split("\n")
            yield "\n\n".join(line for line in lines if len(line) > LEAST and line[0] not in "=*#:;|{}!")


def bare(text: str) -> str:
    """Wiki text without comments, notes, templates, tables and pictures; of links what is read."""
    text = re.sub(r"<!--.*?-->", "", html.unescape(text), flags=re.S)
    text = re.sub(r"<ref.*?</ref>", "", re.sub(r"<ref[^>/]*/>", "", text), flags=re.S)
    for _ in range(6):
        text = re.sub(r"\{\{[^{}]*\}\}", "", text)
    text = re.sub(r"\{\|.*?\|\}", "", text, flags=re.S)
    for _ in range(3):
        text = re.sub(r"\[\[(?:File|Image|Category)[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    return re.sub(r"<[^>]+>", "", re.sub(r"'{2,}", "", text))


def page(path: Path) -> list[str]:
    """The paragraphs of a web page."""
    text = re.sub(r"<(script|style|pre).*?</\1>", "", path.read_text(errors="replace"), flags=re.S)
    found = re.findall(r"<p[^>]*>(.*?)</p>", text, re.S)
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", "", p)).split()) for p in found]


def split(paragraph: str) -> list[str]:
    """Sentences of a German paragraph, without references."""
    return [re.sub(r"\(siehe.*?\)", "", s) for s in re.split(r"(?<=[a-z]{3}[.!?]) (?=[A-ZÄÖÜ])", paragraph)]


def write(folder: Path, kind: str, texts: Iterable[str], least: int = 0) -> None:
    """Number the texts that are long enough."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(t for t in texts if len(t) >= least):
        (folder / f"{kind}{number:03}.txt").write_text(text)


def main(
    gensim: Path,
    debian: Path,
    passages: Annotated[Path, typer.Option(help="Folder for English texts.")],
    german: Annotated[Path, typer.Option(help="Folder for German sentences.")],
) -> None:
    """Write text files, paragraphs apart by blank lines."""
    samples = gensim / "gensim" / "test" / "test_data"
    write(passages, "wiki", articles(next(samples.glob("enwiki-latest-pages-articles1*.bz2"))), 300)
    write(passages, "news", (samples / "lee_background.cor").read_text().splitlines())
    questions, handbook = sorted(debian.rglob("anarchism/**/sec*.html")), sorted(debian.rglob("en-US/*.html"))
    english = ("\n\n".join(page(p))[:LONGEST] for p in [*questions[: PAGES[0]], *handbook[: PAGES[1]]])
    write(passages, "web", english, 500)
    guide = ("\n\n".join(s for p in page(path) for s in split(p)) for path in sorted(debian.rglob("de-DE/*.html")))
    write(german, "handbook", guide)
    sayings = (p for p in sorted(debian.rglob("fortunes/de/*.u8")) if p.stem != "asciiart")
    write(german, "sayings", (p.read_text(errors="replace") for p in sayings))


if __name__ == "__main__":
    typer.run(main)
