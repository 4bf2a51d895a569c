"""Logits of the target without the engine: in one pass, or token by token as plain decoding computes them."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.tree import root_tree
from foretell.model.run.runner import Runner


def target_logits(runner: Runner, tokens: Sequence[int], last: int, single_pass: bool) -> Float[torch.Tensor, "last v"]:
    """Logits after each of the `last` tokens of a sequence.

    `single_pass`: read everything in one pass; else the earlier tokens in one pass and the last ones one by one. The
    two are equal up to rounding.
    """
    runner.truncate(0, 0)
    head = len(tokens) if single_pass else len(tokens) - last
    chunks = [tokens[:head]] if head else []
    chunks += [[t] for t in tokens[head:]]
    return torch.cat([read_chunk(runner, chunk, min(last, len(chunk))) for chunk in chunks])[-last:]


def read_chunk(runner: Runner, chunk: Sequence[int], last: int) -> Float[torch.Tensor, "last v"]:
    """Read tokens after those of row 0, and keep them; logits after each of the `last` ones."""
    tree = root_tree([chunk[-1]]).with_prefix([chunk])
    scored = np.zeros(tree.valid.shape, bool)
    scored[:, -last:] = True
    output = runner.forward([0], tree, scored=scored)
    runner.commit(0, range(len(chunk)))
    return output.logits
