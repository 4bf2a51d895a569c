"""Texts to assess on: those of the package, one per domain, or the user's files."""

from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

import torch
from jaxtyping import Int

from foretell.api import Model
from foretell.lab.quantize.calibration import split_text, text_documents
from foretell.retrieval.corpus import find_files

_LEAST = 32
"""Tokens of the shortest sequence."""


def domain_texts(
    model: Model, given: Sequence[Path], length: int, tokens: int
) -> Mapping[str, Int[torch.Tensor, "b s"]]:
    """Sequences of at most `length` tokens by domain, at most `tokens` of each: the package's texts, or the files of
    every given path, which is a domain of its own.

    Raises:
        ValueError: a file is no text, or too short.
    """
    if given:
        return {str(path): _sequences(model, find_files([path]), str(path), length, tokens) for path in given}
    with as_file(files("foretell.lab.assess").joinpath("texts")) as folder:
        return {p.stem: _sequences(model, [p], p.stem, length, tokens) for p in sorted(folder.glob("*.txt"))}


def _sequences(model: Model, paths: Sequence[Path], name: str, length: int, tokens: int) -> Int[torch.Tensor, "b s"]:
    """Sequences of one length: `length`, or the whole text where it is shorter."""
    length = min(length, model.config.context)
    text_tokens = [t for document in text_documents(paths, model.codec, length) for t in document]
    if len(text_tokens) < _LEAST:
        raise ValueError(
            f"{name}: {len(text_tokens)} tokens of text were found, and {_LEAST} are needed; give more text"
        )
    return split_text([text_tokens], 0, tokens, min(length, len(text_tokens)), name).held_back
