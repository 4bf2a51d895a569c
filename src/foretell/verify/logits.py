"""The target read without the engine: in one pass, or one token at a time as plain decoding does."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.tree import root_tree
from foretell.model.runner import Runner


def target_logits(runner: Runner, tokens: Sequence[int], last: int, single_pass: bool) -> Float[torch.Tensor, "last v"]:
    """Scores of what follows each of the `last` tokens of a text.

    `at_once`: all of it read in one pass; else the tokens before these in one pass and these one by one. In exact
    arithmetic the two agree.
    """
    runner.truncate(0, 0)
    head = len(tokens) if single_pass else len(tokens) - last
    pieces = [tokens[:head]] if head else []
    pieces += [] if single_pass else [[t] for t in tokens[head:]]
    read = [_read(runner, piece, min(last, len(piece))) for piece in pieces]
    return torch.cat(read)[-last:]


def _read(runner: Runner, piece: Sequence[int], last: int) -> Float[torch.Tensor, "last v"]:
    tree = root_tree([piece[-1]]).with_prefix([piece])
    scored = np.zeros(tree.valid.shape, bool)
    scored[:, -last:] = True
    output = runner.forward([0], tree, scored=scored)
    runner.commit(0, range(len(piece)))
    return output.logits
