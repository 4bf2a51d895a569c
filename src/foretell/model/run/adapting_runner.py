"""A model with adapters that requests choose among: a network each, over one cache."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool

from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.block.backend import Backend
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Adapts, ForksRows, LimitsCache, Runner


class AdaptingRunner(Runner, Adapts, ForksRows, LimitsCache):
    """A network, and others that share its weights, by the names of their adapters. Rows of different networks are
    passed one network after the other. Rows may be copied to rows of the same network only.
    """

    def __init__(self, network: Network, adapted: Mapping[str, Network]) -> None:
        self._base = DecoderRunner(network)
        self._runners = {name: DecoderRunner(each, self._base) for name, each in adapted.items()} | {"": self._base}
        self._name = dict[int, str]()
        self.vocab, self.context = self._base.vocab, self._base.context
        self.adapters = tuple(adapted)

    def adapt(self, row: int, name: str) -> None:
        """Let a row be of the network of this name; see `Adapts.adapt`."""
        self._name[row] = name

    def _of(self, row: int) -> DecoderRunner:
        return self._runners[self._name.get(row, "")]

    @property
    def backend(self) -> Backend:
        """The network's."""
        return self._base.backend

    def length(self, row: int) -> int:
        """Number of committed tokens of a row."""
        return self._base.length(row)

    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
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

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        self._of(row).commit(row, path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        self._of(row).truncate(row, length)

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves."""
        return self._base.restorable(row, length)

    @property
    def shares_prefixes(self) -> bool:
        """Whether `copy_row` copies any number of a row's tokens."""
        return self._base.shares_prefixes

    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Copy the first tokens of a row; see `ForksRows.copy_row`."""
        return self._base.copy_row(source, target, length)

    @property
    def cache_bytes(self) -> int:
        """Memory of the key-value cache."""
        return self._base.cache_bytes

    @property
    def free_tokens(self) -> int | None:
        """Tokens that the cache has room for without forgetting others; None: any number."""
        return self._base.free_tokens

    def limit_cache(self, nbytes: int) -> None:
        """Limit the memory of the cache; see `LimitsCache.limit_cache`."""
        self._base.limit_cache(nbytes)


def _join(outputs: Sequence[ModelOutput], order: np.ndarray) -> ModelOutput:
    """The outputs of several passes as one of all their rows, in this order."""

    def indices(name: str, counts: Sequence[int]) -> np.ndarray:
        firsts = accumulate(counts, initial=0)
        own = [getattr(output, name) for output in outputs]
        return np.concatenate([np.where(i < 0, i, i + f) for i, f in zip(own, firsts, strict=False)])[order]

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
