"""A model bound to its cache: reads token trees, remembers what is kept. Target and draft models alike."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.backend import Backend
from foretell.model.cache import KVCache, Layout, numbered
from foretell.model.config import ModelConfig
from foretell.model.decoder import Skip, Span, Streams
from foretell.model.kernels import Trees


@runtime_checkable
class Network(Protocol):
    """Weights that a `DecoderRunner` can run: the torch decoder, or its blocks on native kernels."""

    config: ModelConfig

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def backend(self) -> Backend:
        """What computes its passes."""

    def new_cache(self) -> KVCache:
        """An empty cache for this network."""

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, span: Span) -> Streams:
        """The blocks of a span."""

    def final(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """What the head sees."""

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Next-token scores, float32."""

    def cut(self, layers: int) -> "Network":
        """The first blocks under the same head, sharing weights."""

    def skipping(self, skip: Skip) -> "Network":
        """All blocks without some of their parts, sharing weights."""


@runtime_checkable
class DynamicTreeNetwork(Protocol):
    """A network that may grow trees by confidence in one call."""

    @property
    def grows_dynamic_trees(self) -> bool:
        """Whether it does."""

    def grow_dynamic_trees(
        self,
        roots: Float[torch.Tensor, "b d"],
        trees: Trees,
        cache: KVCache,
        token_of: Int[torch.Tensor, " v"] | None = None,
    ) -> None:
        """Grow trees below roots whose last block's outputs are given; `token_of`: the token of every row of the head
        (None: its number).
        """


class Runner(ABC):
    """Reads trees of tokens on behalf of row-indexed texts."""

    vocab: int
    context: int
    """Longest text the model can read, in tokens."""

    @property
    def backend(self) -> Backend:
        """What computes its passes; nothing may be relied on where a runner does not say."""
        return Backend("custom", precision="")

    @abstractmethod
    def length(self, row: int) -> int:
        """How many tokens of a row have been read and kept."""

    @abstractmethod
    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Read nodes of a tree on top of what is kept: those that `read` marks (default: all that the tree has read).

        Ancestors not marked were read by earlier calls with the same tree, before anything was kept. Scores the nodes
        that `scored` marks (default: all read). `hidden_layers` names blocks whose *input* is wanted as features:
        `layers` stands for the last block's output, `layers + 1` for the same after the final norm.
        """

    def grow_dynamic_tree(
        self,
        rows: Sequence[int],
        prefixes: TokenTree,
        max_depth: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
    ) -> Trees | None:
        """Read trunks, and grow what `shape.Beam` would below each, in one call of the network; None: it cannot, and
        nothing was read.

        `max_depth`, 1 or more, `sizes` and `bounds` as in `Predictor.grow_dynamic_tree`. Of a tree without branches all
        nodes but the last have been read then, as nodes after the trunk.
        """
        return None

    @abstractmethod
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree, in order, as the row's next tokens; everything else of it is forgotten."""

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""


class DecoderRunner(Runner):
    """Runs a `Network`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cache = network.new_cache()
        self.vocab, self.context = network.config.vocab, network.config.context
        self._length = np.zeros(0, np.int64)

    @property
    def backend(self) -> Backend:
        """That of the network."""
        return self.network.backend

    def length(self, row: int) -> int:
        """How many tokens of a row have been read and kept."""
        return int(self._length[row]) if row < len(self._length) else 0

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Read nodes of a tree; see `Runner.forward`."""
        self._reserve(rows, tree.nodes)
        active = tree.active if active is None else active
        layout, index = Layout.of(tree, rows, self._length[list(rows)], active)
        x = self._inputs(tree.token[active], tree.probe_embeddings)
        states, experts = self._states(x, layout, hidden_layers)
        at, layers = index, self.network.config.layers
        seen = states.get(layers + 1, states[layers])
        if scored is not None and scored is not active:
            wanted = active & scored
            at = numbered(wanted)
            seen = seen[torch.from_numpy(index[wanted]).to(x.device)]
        if layers + 1 not in states:
            seen = self.network.final(seen)
        logits = self.network.logits(seen) if len(seen) else x.new_zeros(0, self.vocab)
        return ModelOutput(logits, at, tuple(states[t] for t in hidden_layers), index, experts=experts)

    @torch.inference_mode()
    def grow_dynamic_tree(
        self,
        rows: Sequence[int],
        prefixes: TokenTree,
        max_depth: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
    ) -> Trees | None:
        """Read trunks and grow trees below them; see `Runner.grow_dynamic_tree`."""
        if not (isinstance(self.network, DynamicTreeNetwork) and self.network.grows_dynamic_trees):
            return None
        self._reserve(rows, prefixes.nodes + sizes[0] * sizes[1])
        output = self.forward(
            rows, prefixes, scored=np.zeros_like(prefixes.valid), hidden_layers=(self.network.config.layers,)
        )
        ends = output.hidden_index[np.arange(len(rows)), prefixes.prefix_length - 1]
        trees = Trees(max_depth, sizes, bounds, np.array(rows), self._length[list(rows)] + prefixes.prefix_length)
        self.network.grow_dynamic_trees(output.hidden_states[0][torch.from_numpy(ends)], trees, self.cache)
        return trees

    def _inputs(
        self, token: Int[np.ndarray, " t"], side: Float[torch.Tensor, "e d"] | None
    ) -> Float[torch.Tensor, "t d"]:
        """What the first block sees: embeddings of tokens, and of ids beyond the vocabulary the rows of the tree's own
        table.
        """
        if side is None:
            return self.network.embed(torch.from_numpy(token))
        beyond = token >= self.vocab
        x = self.network.embed(torch.from_numpy(np.where(beyond, 0, token)))
        number = torch.from_numpy(token[beyond] - self.vocab)
        x[torch.from_numpy(beyond).to(x.device)] = side[number.to(side.device)].to(x)
        return x

    def _states(
        self, x: Float[torch.Tensor, "t d"], layout: Layout, hidden_layers: Sequence[int]
    ) -> tuple[dict[int, Float[torch.Tensor, "t d"]], tuple[int, ...]]:
        """What is tapped and the last block's output, by number of the tap; and how many experts each mixture layer
        read.
        """
        layers = self.network.config.layers
        span = Span(0, layers, tuple(t for t in sorted(set(hidden_layers)) if t < layers))
        streams = self.network.run(x, layout, self.cache, span)
        states = dict(zip((*span.hidden_layers, layers), streams.states, strict=True))
        if layers + 1 in hidden_layers:
            states[layers + 1] = self.network.final(states[layers])
        return states, streams.experts

    def _reserve(self, rows: Sequence[int], nodes: int) -> None:
        need = max(rows) + 1
        if need > len(self._length):
            self._length = np.concatenate([self._length, np.zeros(need - len(self._length), np.int64)])
        self.cache.reserve(need, int(self._length[list(rows)].max()) + nodes)

    @torch.inference_mode()
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        base = int(self._length[row])
        self.cache.move(row, [base + node for node in path], base)
        self._length[row] += len(path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        if row < len(self._length):
            self._length[row] = min(length, self._length[row])
