"""Prompts of many kinds and subjects from texts that come with packages, for `foretell data generate --prompts`.

What a small model makes up itself is short and turns round few subjects, and a speculator trained on that alone knows
little of long passages, facts, other languages and second turns. The wording stands in prompts.toml, the subjects come
from WordNet, the passages from plain text.

.venv/bin/python tools/prompts.py OUT.jsonl --count 14000 --wordnet data.noun --passages DIR --german DIR --talks SET
"""

import json
import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.train.data.dataset import Dataset

PERSON, PLACE, EVENT, THING = "18", "15", "11", "06"
"""Lexicographer files of WordNet's nouns."""
COUNTED = (THING, "13", "20")
SUBJECTS = ("03", "04", "05", "06", "07", "08", "09", "10", "11", "13", "14", "17", "19", "20", "21", "22", "26", "27")
KINDS = {
    "fact": 16, "explain": 12, "create": 8, "play": 5, "count": 9, "code": 6, "shorten": 9, "work": 6, "documents": 9,
    "translate": 6, "follow": 14,
}  # fmt: skip
"""What prompts ask for, and how often. Each is a method of `Maker`."""
NUMBERS = {"a": (30, 300), "b": (11, 60), "c": (2, 12), "d": (100, 1000), "e": (3, 9), "f": (2, 8)}
"""Ranges of the numbers in sums."""


class Words:
    """WordNet's nouns by lexicographer file: common ones, and names."""

    def __init__(self, data: Path) -> None:
        self.common, self.named = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for line in data.read_text().splitlines():
            if not line.startswith(" "):
                entry = line.split(" | ")[0]
                _, kind, _, count, *rest = entry.split(" ")
                words = [w.replace("_", " ") for w in rest[: 2 * int(count, 16) : 2]]
                if " @i " in entry:
                    self.named[kind].append(max(words, key=len))
                else:
                    self.common[kind].append(words[0])


class Maker:
    """Draws prompts: a text, or a question, its answer and what is asked next."""

    def __init__(self, draw: random.Random, words: Words, passages: Path, german: Path, talks: Path | None) -> None:
        self._draw, self._words = draw, words
        self._form = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
        self._jobs = [f"{verb} {thing}" for verb in self._form["verbs"] for thing in self._form["objects"]]
        self._passages = list(documents(passages))
        self._german = list(sentences(german))
        self._talks = [] if talks is None else list(talked(talks))
        self._kinds = {kind: count for kind, count in KINDS.items() if self._talks or kind != "follow"}

    def one(self) -> str | list[str]:
        """A prompt of any kind."""
        kind = self._draw.choices(list(self._kinds), list(self._kinds.values()))[0]
        made: str | list[str] = getattr(self, kind)()
        return made

    def fact(self) -> str:
        """On a name, or on how a thing is made."""
        kind = self._draw.choice((PERSON, PLACE, EVENT, THING))
        form = self._draw.choice(self._form["facts"][kind])
        return str(form.format(self._draw.choice((self._words.common if kind == THING else self._words.named)[kind])))

    def explain(self) -> str:
        """A subject, explained or compared."""
        return self._about("explain")

    def create(self) -> str:
        """A piece of writing."""
        return self._about("create")

    def play(self) -> str:
        """A part to be played."""
        return self._about("play")

    def count(self) -> str:
        """A sum in words."""
        name, other = self._draw.sample(self._form["names"], 2)
        numbers = {key: self._draw.randint(*bounds) for key, bounds in NUMBERS.items()}
        thing = self._draw.choice(self._words.common[self._draw.choice(COUNTED)])
        return str(self._draw.choice(self._form["count"]).format(name=name, other=other, things=thing + "s", **numbers))

    def code(self) -> str:
        """A program."""
        job, form = self._draw.choice(self._jobs), self._draw.choice(self._form["code"])
        language = self._draw.choice(self._form["languages"])
        return str(form.format(job=job, language=language, thing=self._subject(), name=job.split()[0].rstrip("s")))

    def shorten(self) -> str:
        """A summary of a long passage."""
        return str(self._draw.choice(self._form["shorten"]).format(self._passage(80, 550)))

    def work(self) -> str:
        """Something else to be done with a passage."""
        return str(self._draw.choice(self._form["work"]).format(self._passage(30, 220)))

    def documents(self) -> str:
        """A question with documents to answer it from."""
        found = [self._passage(60, 130) for _ in range(self._draw.randint(1, 5))]
        names = re.findall(r"(?<=[a-z] )(?:[A-Z]\w+ ?)+", " ".join(found)) or [self._subject()]
        asked = self._draw.choice(self._form["asked"]).format(self._draw.choice(names).strip())
        numbered = "\n".join(f"[{i}] {text}" for i, text in enumerate(found, 1))
        texts = numbered if self._draw.random() < 0.5 else "\n\n".join(found)
        return str(self._draw.choice(self._form["documents"]).format(texts, asked))

    def translate(self) -> str:
        """German into English."""
        return str(self._draw.choice(self._form["translate"]).format(self._draw.choice(self._german)))

    def follow(self) -> list[str]:
        """A second turn."""
        return [*self._draw.choice(self._talks), self._draw.choice(self._form["follow"])]

    def _subject(self) -> str:
        return self._draw.choice(self._words.common[self._draw.choice(SUBJECTS)])

    def _about(self, kind: str) -> str:
        people = [self._draw.choice(self._words.common[PERSON]) for _ in range(2)]
        some = [f"an {p}" if p[0].lower() in "aeiou" else f"a {p}" for p in people]
        return str(self._draw.choice(self._form[kind]).format(self._subject(), self._subject(), *some))

    def _passage(self, low: int, high: int) -> str:
        """Sentences of one document, of about so many words in all."""
        wanted, document = self._draw.randint(low, high), self._draw.choice(self._passages)
        begin = self._draw.randrange(len(document))
        words = " ".join(document[begin : begin + 12]).split(" ")
        text = " ".join(words[:wanted])
        return text if len(words) <= wanted or "." not in text else text[: text.rindex(".") + 1]


def documents(folder: Path) -> Iterator[list[str]]:
    """The paragraphs of every text file, those of some length."""
    for file in sorted(folder.rglob("*.txt")):
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", file.read_text(errors="replace"))]
        if kept := [p for p in paragraphs if len(p) > 150]:
            yield kept


def sentences(folder: Path) -> Iterator[str]:
    """Sayings and sentences, one a paragraph."""
    for file in sorted(folder.rglob("*.txt")):
        for paragraph in re.split(r"\n%?\s*\n|\n%\n", file.read_text(errors="replace")):
            text = " ".join(paragraph.split("--")[0].split())
            if 40 < len(text) < 400 and text[0].isupper() and text[-1] in ".!?":
                yield text


def talked(folder: Path) -> Iterator[tuple[str, str]]:
    """Questions and answers of a set, as far as they were written to the end."""
    model = load(DEFAULT_MODEL)
    for text in Dataset.open(folder):
        if text.start and text.tokens[-1] in model.eos and text.greedy and len(text.tokens) < 330:
            words = model.codec.decode(text.tokens[: text.start].tolist()).rsplit("user\n", 1)[-1]
            answer = model.codec.decode(text.tokens[text.start : -1].tolist())
            yield words.removesuffix("assistant\n").strip(), answer.strip()


def main(
    out: Path,
    wordnet: Annotated[Path, typer.Option(help="WordNet's data.noun.")],
    passages: Annotated[Path, typer.Option(help="Folder of text files, paragraphs apart by blank lines.")],
    german: Annotated[Path, typer.Option(help="Folder of German text files.")],
    talks: Annotated[
        Path | None, typer.Option(help="A set of `data generate --self`: second turns go on from its answers.")
    ] = None,
    count: int = 14000,
    seed: int = 0,
) -> None:
    """Write as many prompts, no two alike."""
    maker = Maker(random.Random(seed), Words(wordnet), passages, german, talks)
    made = dict[str, None]()
    while len(made) < count:
        one = maker.one()
        turns = zip(("user", "assistant", "user"), [one] if isinstance(one, str) else one, strict=False)
        messages = [{"role": role, "content": text} for role, text in turns]
        made[json.dumps({"messages": messages}, ensure_ascii=False)] = None
    out.write_text("\n".join(made) + "\n")
    typer.echo(f"{out}: {len(made):,} prompts")


if __name__ == "__main__":
    typer.run(main)
