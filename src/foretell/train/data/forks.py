"""Training texts of APAR (arXiv 2401.06761): answers with lists or paragraphs, cut into a main text and details.

Answers are a model's own, or made of the lists of documentation by rules.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from foretell.plan.control_tokens import ControlTokens
from foretell.tokenizer.codec import TextCodec
from foretell.train.data.dataset import Document, DocumentRecord

MAX_HEAD_WORDS, MAX_SENTENCE_WORDS = 12, 30
"""A longer head of an item, or first sentence of a paragraph, does not introduce a detail."""
MIN_DETAIL_WORDS = 6
"""A shorter detail is not worth a stream of its own."""
_ITEM = re.compile(r"^(?P<head>[ ]{0,3}(?:\d{1,2}[.)]|[-*•])[ ]+[^\n:]+?:\**)(?=[ ]|\n[ ]{0,3}\S)")
_BEGINS_ITEM = re.compile(r"^ {0,3}(?:\d{1,2}[.)]|[-*•]) +")
_PARAGRAPH = re.compile(r"(?:^|(?<=\n\n))(?![ ]*(?:\d|[-*•#]))(?P<head>[^\n]+?[.!?])(?= +[A-Z])[^\n]+(?=\n\n|\n?$)")
"""A paragraph of two sentences or more."""
_MOST_ITEMS = 8
"""Of a list of documentation; the further ones are left out."""
_TITLE = re.compile(
    r"^(?:#{1,6} +(?P<markdown>[^\n]+?) *#*|(?P<rest>[^\s\-*#|.][^\n]*)\n(?P<line>[=\-~^\"*+#.])(?P=line){2,} *)$", re.M
)
"""A heading of Markdown or reStructuredText."""
_BULLETS = re.compile(
    r"^(?:[ ]{0,3}(?:[-*•]|\d{1,2}[.)]|#\.) +\S[^\n]*\n(?:[ \t]+\S[^\n]*\n|\n(?=[ ]{0,3}\S))*){2,}", re.M
)
"""Items of a list, one after the other."""
_BULLET = re.compile(r"^[ ]{0,3}(?:[-*•]|\d{1,2}[.)]|#\.) +", re.M)
_DOCUMENTED = re.compile(r"(?P<head>[^\W\d][^\n:]{1,80}?)(?:: | +[-–—]{1,3} +)(?P<detail>[^\n]+)")
_MARKUP = re.compile(
    r":[\w:+-]+:(?=`)|`_{0,2}|(?<!\w)\*{1,2}(?=\S)|(?<=\S)\*{1,2}(?!\w)|__|(?<=\w) ?<[^<>\n]+>"
    r"|\[(?=[^\]\n]*\]\()|\]\([^)\n]*\)|\\(?=\W)"
)
"""Roles, links and emphasis, of which the text stays."""
_FOREIGN = re.compile(r"```|\$\$|\\\(|https?://|\|---")
"""Code, formulas, links and tables: such answers are left out, as in the paper."""


@dataclass(frozen=True)
class Fork:
    """A stretch of the main text that ends with a fork, and the detail that it introduces."""

    text: str
    detail: str


@dataclass(frozen=True)
class ForkedText:
    """The forks of a text in order, and the main text after the last one."""

    forks: tuple[Fork, ...]
    rest: str

    @property
    def whole(self) -> str:
        """The text as it was."""
        return "".join(fork.text + fork.detail for fork in self.forks) + self.rest


def documented_answers(text: str) -> Iterator[tuple[str, str]]:
    """Questions and answers of a text in Markdown or reStructuredText: a section that has a list whose items have heads
    and details, and the list as chat models write them, with its introduction where that ends in a colon.
    """
    text = text.replace("\r\n", "\n") + "\n"
    titles = [*_TITLE.finditer(text)]
    bounds = [*(title.start() for title in titles), len(text)]
    for title, end in zip(titles, bounds[1:], strict=True):
        name = _plain(title["markdown"] or title["rest"])
        for found in _BULLETS.finditer(text, title.end(), end):
            items = [_DOCUMENTED.fullmatch(_plain(item)) for item in _BULLET.split(found[0])[1:]]
            known = [item for item in items if item is not None][:_MOST_ITEMS]
            lines = [f"{i}. **{item['head']}**: {item['detail']}" for i, item in enumerate(known, 1)]
            before = _plain(text[title.end() : found.start()].rstrip().rpartition("\n\n")[2])
            answer = "\n".join([f"{before}\n"] * before.endswith(":") + lines)
            if len(lines) >= 2 and fork_text(answer) is not None:
                yield f"What should I know about {name}?", answer


def read_documented(files: Iterable[Path], codec: TextCodec, eos: Sequence[int]) -> Iterator[Document]:
    """Documents of `documented_answers`, each answer once; files that are no text are left out."""
    seen, end = set[str](), (codec.eos_ids or eos)[0]
    for file in files:
        for question, answer in documented_answers(file.read_text("utf-8", errors="ignore")):
            if answer not in seen:
                seen.add(answer)
                prompt = codec.chat([{"role": "user", "content": question}])
                tokens = [*prompt, *codec.encode(answer, add_special_tokens=False), end]
                yield Document(np.array(tokens, dtype=np.int32), len(prompt))


def _plain(text: str) -> str:
    """One line without markup."""
    return " ".join(_MARKUP.sub("", text).split())


def fork_text(text: str) -> ForkedText | None:
    """The structure of a text: the items of its lists with a head before a colon; without such a list its paragraphs,
    whose first sentence is the head. None: fewer than two of them, or code, formulas, links or tables.

    An item goes to the next one or a blank line; the text ends where a head comes again, as with small models it does.
    """
    if _FOREIGN.search(text):
        return None
    paragraphs = ((m.start(), m.end("head"), m.end()) for m in _PARAGRAPH.finditer(text))
    return _cut(text, _items(text), MAX_HEAD_WORDS) or _cut(text, paragraphs, MAX_SENTENCE_WORDS)


def _cut(text: str, parts: Iterable[tuple[int, int, int]], most: int) -> ForkedText | None:
    """The forks at parts (begin, end of the head, end) whose heads have `most` words at most."""
    forks, begin, known = list[Fork](), 0, set[str]()
    for start, head, end in parts:
        detail, name = text[head:end], text[start:head].lstrip("0123456789.)-*• ").lower()
        if name in known:
            text = text[:start].rstrip()
            break
        known.add(name)
        if len(text[start:head].split()) <= most and len(detail.split()) >= MIN_DETAIL_WORDS:
            forks.append(Fork(text[begin:head], detail))
            begin = end
    return ForkedText(tuple(forks), text[begin:]) if len(forks) >= 2 else None


def _items(text: str) -> Iterator[tuple[int, int, int]]:
    """Begin of every item with a head, end of its head, and end of the item."""
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    for i, line in enumerate(lines):
        item = _ITEM.match(text[offsets[i] :]) if _BEGINS_ITEM.match(line) else None
        if item is None:
            continue
        last = i + 1
        while last < len(lines) and lines[last].strip() and not _BEGINS_ITEM.match(lines[last]):
            last += 1
        end = offsets[last]
        while text[end - 1] == "\n":  # The line end belongs to the main text.
            end -= 1
        yield offsets[i], offsets[i] + item.end("head"), end


def forked_documents(
    document: Document, number: int, codec: TextCodec, tokens: ControlTokens, eos: Sequence[int]
) -> list[DocumentRecord]:
    """The main text of a document and one sequence per detail, from `number` on; without structure, the document.

    In the main text, what follows a fork does not see its detail; a detail sees the main text up to its fork. An answer
    that the limit of its length cut ends before its last line.
    """
    prompt, answer = document.tokens[: document.start].tolist(), document.tokens[document.start :].tolist()
    ended = bool(answer) and answer[-1] in eos
    text = codec.decode(answer[: len(answer) - ended], skip_special_tokens=False)
    record = partial(DocumentRecord, greedy=document.greedy)
    forked = fork_text(text if ended else text.rstrip()[: text.rstrip().rfind("\n") + 1].rstrip())
    if forked is None:
        return [record(number=number, tokens=document.tokens.tolist(), start=document.start)]
    main, end, details = prompt, [answer[-1] if ended else (codec.eos_ids or eos)[0]], list[DocumentRecord]()
    for fork in forked.forks:
        main = [*main, *codec.encode(fork.text, add_special_tokens=False), tokens.fork]
        detail = codec.encode(fork.detail, add_special_tokens=False)
        whole = [*main, tokens.child, *detail, *end]
        details.append(record(number=number + len(details) + 1, tokens=whole, start=len(main) + 1))
    whole = [*main, *codec.encode(forked.rest, add_special_tokens=False), *end]
    return [record(number=number, tokens=whole, start=document.start), *details]
