"""A model bound to its cache: reads token trees, remembers what is kept. Target and draft models alike."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.context import Output
from foretell.model.backend import Backend
from foretell.model.cache import Cache, Layout, numbered
from foretell.model.config import ModelConfig
from foretell.model.decoder import Skip, Span, Streams
from foretell.model.native import Trees
from foretell.tree import TokenTree


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

    def new_cache(self) -> Cache:
        """An empty cache for this network."""

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, span: Span) -> Streams:
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
class Growing(Protocol):
    """A network that may grow trees by confidence in one call."""

    @property
    def grows(self) -> bool:
        """Whether it does."""

    def beam(
        self,
        roots: Float[torch.Tensor, "b d"],
        trees: Trees,
        cache: Cache,
        token_of: Int[torch.Tensor, " v"] | None = None,
    ) -> None:
        """Grow trees below roots whose last block's outputs are given; `token_of`: the token of every row of the head (None: its number)."""


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
        read: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        taps: Sequence[int] = (),
    ) -> Output:
        """Read nodes of a tree on top of what is kept: those that `read` marks (default: all that the tree has read).

        Ancestors not marked were read by earlier calls with the same tree, before anything was kept. Scores the nodes that `scored` marks (default:
        all read). `taps` names blocks whose *input* is wanted as features: `layers` stands for the last block's output, `layers + 1` for the same
        after the final norm.
        """

    def beam(
        self,
        rows: Sequence[int],
        trunks: TokenTree,
        room: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
    ) -> Trees | None:
        """Read trunks, and grow what `shape.Beam` would below each, in one call of the network; None: it cannot, and nothing was read.

        `room`, 1 or more, `sizes` and `bounds` as in `Predictor.beam`. Of a tree without branches all nodes but the last have been read then, as
        nodes after the trunk.
        """
        return None

    @abstractmethod
    def keep(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree, in order, as the row's next tokens; everything else of it is forgotten."""

    @abstractmethod
    def crop(self, row: int, length: int) -> None:
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
        read: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        taps: Sequence[int] = (),
    ) -> Output:
        """Read nodes of a tree; see `Runner.forward`."""
        self._reserve(rows, tree.nodes)
        read = tree.read if read is None else read
        layout, index = Layout.of(tree, rows, self._length[list(rows)], read)
        x = self._inputs(tree.token[read], tree.inputs)
        states, experts = self._states(x, layout, taps)
        at, layers = index, self.network.config.layers
        seen = states.get(layers + 1, states[layers])
        if scored is not None and scored is not read:
            wanted = read & scored
            at = numbered(wanted)
            seen = seen[torch.from_numpy(index[wanted]).to(x.device)]
        if layers + 1 not in states:
            seen = self.network.final(seen)
        logits = self.network.logits(seen) if len(seen) else x.new_zeros(0, self.vocab)
        return Output(logits, at, tuple(states[t] for t in taps), index, experts=experts)

    @torch.inference_mode()
    def beam(
        self,
        rows: Sequence[int],
        trunks: TokenTree,
        room: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
    ) -> Trees | None:
        """Read trunks and grow trees below them; see `Runner.beam`."""
        if not (isinstance(self.network, Growing) and self.network.grows):
            return None
        self._reserve(rows, trunks.nodes + sizes[0] * sizes[1])
        output = self.forward(rows, trunks, scored=np.zeros_like(trunks.live), taps=(self.network.config.layers,))
        ends = output.feature_at[np.arange(len(rows)), trunks.trunk - 1]
        trees = Trees(room, sizes, bounds, np.array(rows), self._length[list(rows)] + trunks.trunk)
        self.network.beam(output.features[0][torch.from_numpy(ends)], trees, self.cache)
        return trees

    def _inputs(
        self, token: Int[np.ndarray, " t"], side: Float[torch.Tensor, "e d"] | None
    ) -> Float[torch.Tensor, "t d"]:
        """What the first block sees: embeddings of tokens, and of ids beyond the vocabulary the rows of the tree's own table."""
        if side is None:
            return self.network.embed(torch.from_numpy(token))
        beyond = token >= self.vocab
        x = self.network.embed(torch.from_numpy(np.where(beyond, 0, token)))
        number = torch.from_numpy(token[beyond] - self.vocab)
        x[torch.from_numpy(beyond).to(x.device)] = side[number.to(side.device)].to(x)
        return x

    def _states(
        self, x: Float[torch.Tensor, "t d"], layout: Layout, taps: Sequence[int]
    ) -> tuple[dict[int, Float[torch.Tensor, "t d"]], tuple[int, ...]]:
        """What is tapped and the last block's output, by number of the tap; and how many experts each mixture layer read."""
        layers = self.network.config.layers
        span = Span(0, layers, tuple(t for t in sorted(set(taps)) if t < layers))
        streams = self.network.run(x, layout, self.cache, span)
        states = dict(zip((*span.taps, layers), streams.states, strict=True))
        if layers + 1 in taps:
            states[layers + 1] = self.network.final(states[layers])
        return states, streams.experts

    def _reserve(self, rows: Sequence[int], nodes: int) -> None:
        need = max(rows) + 1
        if need > len(self._length):
            self._length = np.concatenate([self._length, np.zeros(need - len(self._length), np.int64)])
        self.cache.reserve(need, int(self._length[list(rows)].max()) + nodes)

    @torch.inference_mode()
    def keep(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        base = int(self._length[row])
        self.cache.move(row, [base + node for node in path], base)
        self._length[row] += len(path)

    def crop(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        if row < len(self._length):
            self._length[row] = min(length, self._length[row])
