"""A model with adapters that requests choose among: a network each, over one cache."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.network_runner import NetworkRunner
from foretell.model.run.runner import Adapts, ForksRows, Layers, Marks, Rows


class AdaptingRunner(NetworkRunner, Adapts, ForksRows):
    """A network, and others that share its cache, by the names of their adapters. Rows of different networks are passed
    one network after the other.
    """

    def __init__(self, network: Network, adapted: Mapping[str, Network]) -> None:
        super().__init__(network)
        self._runners = {name: DecoderRunner(each, self) for name, each in {"": network, **adapted}.items()}
        self._name, self.adapters = dict[int, str](), tuple(adapted)

    def adapt(self, row: int, name: str) -> None:
        """Let a row be of the network of this name; see `Adapts.adapt`."""
        self._name[row] = name

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run nodes of a tree; see `Runner.forward`."""
        groups = dict[str, list[int]]()
        for i, row in enumerate(rows):
            groups.setdefault(self._name.get(row, ""), []).append(i)
        if len(groups) == 1:
            runner = self._runners[next(iter(groups))]
            return runner.forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)
        index = [np.array(group) for group in groups.values()]
        outputs = [
            self._runners[name].forward(
                [rows[i] for i in own],
                tree.select(own),
                active=None if active is None else active[own],
                scored=None if scored is None else scored[own],
                hidden_layers=hidden_layers,
            )
            for name, own in zip(groups, index, strict=True)
        ]
        return _join(outputs, np.argsort(np.concatenate(index)))

    @property
    def shares_prefixes(self) -> bool:
        """Whether `copy_row` copies any number of a row's tokens."""
        return self._runners[""].shares_prefixes

    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Copy the first tokens of a row; see `ForksRows.copy_row`."""
        return self._runners[""].copy_row(source, target, length)


def _join(outputs: Sequence[ModelOutput], order: np.ndarray) -> ModelOutput:
    """The outputs of several passes as one of all their rows, in this order."""

    def indices(name: str, counts: Sequence[int]) -> np.ndarray:
        firsts = accumulate(counts, initial=0)
        own = [getattr(output, name) for output in outputs]
        moved = [np.where(i < 0, i, i + first) for i, first in zip(own, firsts, strict=False)]
        joined: np.ndarray = np.concatenate(moved)[order]
        return joined

    argmax = [output.argmax for output in outputs if output.argmax is not None]
    read = [int(output.hidden_index.max(initial=-1)) + 1 for output in outputs]
    return ModelOutput(
        torch.cat([output.logits for output in outputs]),
        indices("logit_index", [len(output.logits) for output in outputs]),
        tuple(torch.cat(states) for states in zip(*(output.hidden_states for output in outputs), strict=True)),
        indices("hidden_index", read),
        tuple(map(sum, zip(*(output.experts for output in outputs), strict=True))),
        np.concatenate(argmax) if len(argmax) == len(outputs) else None,
    )
