"""Values that readers of several formats need: contexts, head widths, end-of-sequence tokens."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from foretell.model.config.model import ModelConfig
from foretell.model.config.rope import RopeConfig
from foretell.utils.validation import Fields

MAX_LAYERS = 10_000
MAX_CONTEXT = 2**24
"""Tokens; the longest context of a published model is 10 million."""
GGUF_EOS = tuple(f"tokenizer.ggml.{key}" for key in ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids"))
"""Keys of end-of-sequence tokens in GGUF files."""


def contexts_of(rope: RopeConfig, trained: int) -> dict[str, int]:
    """The context and the longest context of a model that was trained for so many positions."""
    context, longest = rope.default_context(trained), rope.longest_context(trained)
    return {"context": context, "longest_context": longest if longest != context else 0}


def known_architectures(name: str, known: Iterable[str]) -> str:
    """Where the architectures are listed that are read, and the one with the nearest name."""
    near = get_close_matches(name, list(known), n=1)
    return (f"did you mean {near[0]}? " if near else "") + "docs/models.md lists those that it knows"


def eos_token_ids(read: Fields, *names: str) -> tuple[int, ...]:
    """End-of-sequence tokens under these keys (default: `eos_token_id`); each holds one or a list, -1 none."""
    return tuple(
        dict.fromkeys(token for name in names or ("eos_token_id",) for token in read.integers(name) if token >= 0)
    )


def checked_config(source: str, **values: Any) -> ModelConfig:
    """The configuration of these values; errors name the source."""
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def read_head_dim(read: Fields, names: tuple[str, ...], default: int) -> int:
    """Width of a head under one of these keys, which is even.

    Raises:
        ValueError: it is odd, or no number.
    """
    width = read.integer(*names, default=default, least=1)
    if width % 2:
        raise read.wrong(names[0], "even, for rotary positions", width)
    return width
