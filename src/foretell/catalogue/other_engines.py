"""Methods that draft beside another engine's target, for plug-ins of that engine."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from foretell.catalogue.build_context import BuildContext
from foretell.catalogue.registry import build, find
from foretell.core.context import Context, ModelOutput, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.core.tree import TokenTree
from foretell.draft.base import Retriever
from foretell.engine.method import AnyMethod
from foretell.model.load.reference import resolve_reference
from foretell.tokenizer.codec import from_directory

_UNKNOWN = SamplingParams(), CounterRNG(0)
"""How requests are sampled of which the engine does not say it."""


def retrieval_method(options: Mapping[str, object], vocab: int, tokenizer: str) -> AnyMethod:
    """The method that `options` name: `method` (default: sam_recycling), `references` (text files), and its own
    options. `tokenizer`: a directory or a model of the hub, which is read where texts are.

    Raises:
        ValueError: the method is unknown or needs parts of the target, or an option is wrong.
    """
    own = dict(options)
    name, files = str(own.pop("method", "sam_recycling")), own.pop("references", ())
    if not issubclass(find(name).drafter, Retriever):
        raise ValueError(
            f"{name} does not draft by retrieval; beside another engine ngram, llma, suffix, recycling, sam_recycling, "
            "hybrid and rest draft"
        )
    if not isinstance(files, list | tuple):
        raise ValueError(f"references is a list of text files, found {files!r}")
    codec = from_directory(resolve_reference(tokenizer)) if files or "datastore" in own else None
    references = tuple(tuple(codec.encode(_text(file), False)) for file in files) if codec else ()
    return build(name, BuildContext(vocab, None, references=references, codec=codec), own or None)


def free_row(used: Collection[int]) -> int:
    """The lowest row that no request has."""
    return next(row for row in range(len(used) + 1) if row not in used)


def context_of_texts(rows: Sequence[int], texts: Sequence[TokenBuffer], max_depth: Sequence[int]) -> Context:
    """The context of requests of which the texts are known, and not how they are sampled."""
    parameters, rng = _UNKNOWN
    return Context(
        rows=tuple(rows),
        sequences=tuple(texts),
        sampling_params=(parameters,) * len(rows),
        rngs=(rng,) * len(rows),
        max_depth=np.array(max_depth, np.int64),
    )


def output_without_logits(tree: TokenTree, vocab: int) -> ModelOutput:
    """The output of a pass over a tree of which no logits are known."""
    none = np.full(tree.token.shape, -1, np.int64)
    return ModelOutput(_no_logits(vocab), none, hidden_index=none)


@cache
def _no_logits(vocab: int) -> torch.Tensor:
    return torch.empty(0, vocab)


def _text(file: object) -> str:
    try:
        return Path(str(file)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"reference {file} cannot be read: {error}") from error
