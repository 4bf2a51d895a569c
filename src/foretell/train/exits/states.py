"""The states that exits are fitted on: the outputs of some layers at the tokens of a data set's answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.tree import root_tree
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.train.data.dataset import Document

_LONGEST = 512
"""Tokens of a document that are read at most."""
FIRST_POSITION = 4
"""Positions before this one are left out: their states are many times as large as others (arXiv 2309.17453)."""


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


@dataclass(frozen=True)
class SequenceStates:
    """States of whole documents: `exit` the outputs of a layer at all of their tokens, `final` those of the last layer
    after the final norm at the tokens from `first` on, whose successors are to be learned. All bfloat16.
    """

    exit: tuple[Float[torch.Tensor, "s d"], ...]
    final: tuple[Float[torch.Tensor, "t d"], ...]
    first: tuple[int, ...]


@torch.inference_mode()
def collect_states(
    network: Network,
    documents: Sequence[Document],
    layers: Sequence[int],
    num_tokens: int,
    blocks: Callable[[Float[torch.Tensor, "b s d"]], Float[torch.Tensor, "b s d"]] | None = None,
) -> LayerStates:
    """Run documents and keep the states at the tokens whose successors are to be learned, of at most `num_tokens` in
    all.

    The target computes them as it does when it decodes. `blocks`: what follows the layers, over a whole document; None:
    nothing.

    Raises:
        ValueError: the documents have no token to learn.
    """
    wanted = (*layers, network.config.layers + 1)
    parts: list[list[torch.Tensor]] = [[] for _ in wanted]
    lengths = list[int]()
    for _, first, layer_states in document_states(network, documents, wanted, num_tokens, _LONGEST):
        last = min(len(layer_states[0]), first + num_tokens - sum(lengths))
        if blocks is not None:
            layer_states = [*(blocks(states.float()[None])[0] for states in layer_states[:-1]), layer_states[-1]]
        for part, states in zip(parts, layer_states, strict=True):
            part.append(states[first:last].to(torch.bfloat16).cpu())
        lengths.append(last - first)
    joined = [torch.cat(part) for part in parts]
    return LayerStates(tuple(joined[:-1]), joined[-1], tuple(lengths))


@torch.inference_mode()
def collect_sequences(network: Network, documents: Sequence[Document], layer: int, num_tokens: int) -> SequenceStates:
    """The states of whole documents, with at most `num_tokens` tokens to learn or as many more as the last one has.

    Raises:
        ValueError: the documents have no token to learn.
    """
    wanted = layer, network.config.layers + 1
    sequences = [
        (states[0].to(torch.bfloat16).cpu(), states[1][first:].to(torch.bfloat16).cpu(), first)
        for _, first, states in document_states(network, documents, wanted, num_tokens, _LONGEST)
    ]
    return SequenceStates(*(tuple(part) for part in zip(*sequences, strict=True)))


def document_states(
    network: Network, documents: Sequence[Document], layers: Sequence[int], num_tokens: int, longest: int
) -> Iterator[tuple[list[int], int, list[Float[torch.Tensor, "s d"]]]]:
    """Per document its tokens, the first one whose successor is to be learned, and the states of layers at all tokens.

    Raises:
        ValueError: the documents have no token to learn.
    """
    runner = DecoderRunner(network)
    for tokens, first in texts_to_learn(documents, num_tokens, longest):
        yield tokens, first, list(text_states(runner, tokens, layers))
        runner.truncate(0, 0)


def text_states(runner: Runner, tokens: Sequence[int], layers: Sequence[int]) -> tuple[Float[torch.Tensor, "s d"], ...]:
    """The states of layers at tokens, which an empty row 0 reads in one pass."""
    tree = root_tree([tokens[-1]]).with_prefix([tokens])
    return runner.forward([0], tree, scored=np.zeros_like(tree.valid), hidden_layers=layers).hidden_states


def texts_to_learn(documents: Sequence[Document], num_tokens: int, longest: int) -> Iterator[tuple[list[int], int]]:
    """Per document its first `longest` tokens, and the first one whose successor is to be learned, until there are
    `num_tokens` of these.

    Raises:
        ValueError: the documents have no token to learn.
    """
    count = 0
    for document in documents:
        if count >= num_tokens:
            break
        tokens, first = document.tokens[:longest].tolist(), max(document.start - 1, FIRST_POSITION)
        if len(tokens) > first:
            yield tokens, first
            count += len(tokens) - first
    if not count:
        raise ValueError("the data set has no answer of more than a few tokens; make one with foretell data generate")
