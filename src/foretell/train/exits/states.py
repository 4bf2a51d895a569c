"""The states that exits are fitted on: the outputs of some layers at the tokens of a data set's answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.tree import root_tree
from foretell.model.network import Network
from foretell.model.runner import DecoderRunner
from foretell.train.data.dataset import Document

FIRST_POSITION = 4
"""Positions before this one are left out: their states are many times as large as others (attention sinks)."""


@dataclass(frozen=True)
class LayerStates:
    """States of `t` tokens, document after document.

    `layers[i]`: outputs of the `i`-th of the layers that were asked for. `final`: the last layer's after the final
    norm, the input of the target's head. All bfloat16. `lengths`: tokens of every document.
    """

    layers: tuple[Float[torch.Tensor, "t d"], ...]
    final: Float[torch.Tensor, "t d"]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.final)


@torch.inference_mode()
def collect_states(
    network: Network,
    documents: Sequence[Document],
    layers: Sequence[int],
    num_tokens: int,
    longest: int = 512,
    on_progress: Callable[[int], None] = lambda _: None,
) -> LayerStates:
    """Run documents, each up to `longest` tokens, and keep the states at the tokens whose successors are to be learned,
    of at most `num_tokens` in all.

    The target computes them as it does when it decodes. `on_progress` gets the number of tokens so far.

    Raises:
        ValueError: the documents have no token to learn.
    """
    wanted = (*layers, network.config.layers + 1)
    parts: list[list[torch.Tensor]] = [[] for _ in wanted]
    lengths, runner = list[int](), DecoderRunner(network)
    for document in documents:
        if (count := sum(lengths)) >= num_tokens:
            break
        tokens, first = document.tokens[:longest].tolist(), max(document.start - 1, FIRST_POSITION)
        if len(tokens) <= first:
            continue
        tree = root_tree([tokens[-1]]).with_prefix([tokens])
        output = runner.forward([0], tree, scored=np.zeros_like(tree.valid), hidden_layers=wanted)
        last = min(len(tokens), first + num_tokens - count)
        for part, states in zip(parts, output.hidden_states, strict=True):
            part.append(states[first:last].to(torch.bfloat16).cpu())
        runner.truncate(0, 0)
        lengths.append(last - first)
        on_progress(count + lengths[-1])
    if not lengths:
        raise ValueError("the data set has no answer of more than a few tokens; make one with foretell data generate")
    found = [torch.cat(part) for part in parts]
    return LayerStates(tuple(found[:-1]), found[-1], tuple(lengths))
