"""Pairs of sequences as tab-separated text, a source and one reference or several, and the tokens of a side."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foretell.model.load.transformers import quiet

PAD, BEGIN, END, MASK, UNKNOWN = range(5)
"""Ids of special tokens, the same in every vocabulary."""
_SPECIAL = ("<pad>", "<s>", "</s>", "<mask>", "<unk>")
_TOO_LONG_SHOWN = 40
_WORD_END = "</w>"


@dataclass(frozen=True)
class Pair:
    """A source and its references, as words with spaces between them."""

    source: str
    references: tuple[str, ...]


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of lines `source TAB reference [TAB reference …]`.

    Raises:
        ValueError: the file is not UTF-8, there is no pair, or a line has no reference or an empty one.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from error
    out = list[Pair]()
    for number, line in enumerate(text.splitlines(), 1):
        source, *references = (" ".join(cell.split()) for cell in line.split("\t"))
        if not source or not references or not all(references):
            raise ValueError(
                f"{path}, line {number}: a line is a source, a tab and its reference (or several, with tabs between), "
                f"found {line[:_TOO_LONG_SHOWN]!r}"
            )
        out.append(Pair(source, tuple(references)))
    if not out:
        raise ValueError(f"{path}: no pairs here; foretell nat data writes such a file")
    return out


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """Write pairs as `read_pairs` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join((p.source, *p.references)) + "\n" for p in pairs), "utf-8")


class Vocabulary:
    """Words of one side, numbered after the special tokens."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._id = {word: i for i, word in enumerate(self.words, len(_SPECIAL))}

    @staticmethod
    def of(texts: Iterable[str]) -> "Vocabulary":
        """All words of some texts, sorted."""
        return Vocabulary(sorted({word for text in texts for word in text.split()}))

    def __len__(self) -> int:
        return len(_SPECIAL) + len(self.words)

    def encode(self, text: str) -> list[int]:
        """Ids of the words; `UNKNOWN` for a word that is not known."""
        return [self._id.get(word, UNKNOWN) for word in text.split()]

    def unknown_words(self, text: str) -> list[str]:
        """The words of a text that are not known, or have a part that is not."""
        return [word for word in dict.fromkeys(text.split()) if UNKNOWN in self.encode(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """The words of ids; special tokens other than padding are shown by name."""
        names = (*_SPECIAL, *self.words)
        return " ".join(names[i] for i in ids if i != PAD)


class Subwords(Vocabulary):
    """Parts of words by byte-pair encoding (Sennrich et al., arXiv 1508.07909), after the same special tokens; `table`:
    the tokenizer as JSON.
    """

    def __init__(self, table: str) -> None:
        self._tokenizer = Tokenizer.from_str(table)
        special = len(_SPECIAL)
        super().__init__(
            [str(self._tokenizer.id_to_token(i)) for i in range(special, self._tokenizer.get_vocab_size())]
        )

    @staticmethod
    def learn(texts: Iterable[str], size: int) -> "Subwords":
        """The vocabulary of at most `size` tokens that writes these texts in the fewest."""
        tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL[UNKNOWN], end_of_word_suffix=_WORD_END))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder(_WORD_END)
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(_SPECIAL), end_of_word_suffix=_WORD_END, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return Subwords(tokenizer.to_str())

    @property
    def table(self) -> str:
        """The tokenizer as JSON."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Ids of the parts of the words; `UNKNOWN` for a letter that is not known."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The words of ids; special tokens other than padding are shown by name."""
        names = [(_SPECIAL[i] + _WORD_END) if i < len(_SPECIAL) else self.words[i - len(_SPECIAL)] for i in ids if i]
        return " ".join("".join(names).replace(_WORD_END, " ").split())


def pad(sequences: Sequence[Sequence[int]], width: int = 0) -> Int[torch.Tensor, "b s"]:
    """Sequences as rows of the longest one's length, or of `width` if that is longer, padded at the end."""
    width = max(width, *(len(s) for s in sequences))
    return torch.tensor([[*s, *[PAD] * (width - len(s))] for s in sequences])


class MarianWords(Vocabulary):
    """The parts of words of a Marian checkpoint, of its source or its target side."""

    def __init__(self, folder: str, of_target: bool) -> None:
        import transformers

        with quiet(transformers):
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._side = "text_target" if of_target else "text"
        pad, end, unknown = (getattr(self._tokenizer, f"{name}_token_id") for name in ("pad", "eos", "unk"))
        others = [i for i in range(len(self._tokenizer)) if i not in (pad, end, unknown)]
        self.ids = [pad, pad, end, unknown, unknown, *others]
        """The checkpoint's id of every token; its padding begins a target, and it has no mask."""
        self._own = {theirs: ours for ours, theirs in enumerate(self.ids)} | {pad: PAD}
        super().__init__(self._tokenizer.convert_ids_to_tokens(others))

    def encode(self, text: str) -> list[int]:
        """Ids of the parts of the words; those of a source end with `END`, as its encoder expects."""
        ids = [self._own[i] for i in self._tokenizer(**{self._side: text})["input_ids"]]
        return ids[:-1] if self._side == "text_target" else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._tokenizer.decode([self.ids[i] for i in ids], skip_special_tokens=True))
