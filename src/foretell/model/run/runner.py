"""What the engine passes token trees through: a model with its cache, and what some of them offer beside passes.

`Runner` is what every model can do. The other interfaces are what their callers ask for by `offered`: a type checker
says which classes have them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import ModelOutput
from foretell.core.tree import NodeMask, TokenTree, TreeBounds, TreeSizes
from foretell.model.block.backend import Backend
from foretell.model.kernels import DynamicTrees, NodeLimits
from foretell.model.kernels.dynamic_tree import NO_LIMITS, Noise
from foretell.model.kernels.structures import Sampling
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import PartialPass

Interface = TypeVar("Interface")
Rows: TypeAlias = Sequence[int]
"""Rows of the cache, one for each tree of a batch."""
Marks: TypeAlias = NodeMask | None
"""Some nodes of the trees of a batch; None: the default of the place."""
Layers: TypeAlias = Sequence[int]
"""Layers whose hidden states are wanted."""


class Runner(ABC):
    """Runs forward passes over token trees; keeps the accepted tokens of every batch row."""

    vocab: int
    context: int
    """Longest sequence, in tokens."""

    @property
    def backend(self) -> Backend:
        """What computes the passes; by default unknown, without batch invariance."""
        return Backend("custom", precision="")

    @property
    def innermost(self) -> "Runner":
        """The runner that does the work, where this one passes every call on to another."""
        return self

    @abstractmethod
    def length(self, row: int) -> int:
        """Number of committed tokens of a row."""

    @abstractmethod
    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run the `active` nodes of a tree (default: `tree.active`) after the committed tokens of their rows.

        Inactive ancestors must have run in earlier calls with the same tree, since the last commit. Logits are computed
        for the nodes that `scored` marks (default: all active ones). `hidden_layers` names blocks whose *input* is
        returned as hidden states; `layers` is the last block's output, `layers + 1` the same after the final norm.
        """

    @abstractmethod
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree, in order, as the row's next tokens; forget its other nodes."""

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on; recurrent states go back to `restorable(row, length)` tokens."""

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves: at most `length` and those committed."""
        return min(length, self.length(row))


class ForksRows(ABC):
    """Copies rows."""

    @property
    @abstractmethod
    def shares_prefixes(self) -> bool:
        """Whether `copy_row` copies any number of a row's tokens."""

    @abstractmethod
    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Replace the tokens of row `target` by the first `length` of row `source`, bit for bit.

        Returns False where this cannot be done; then `target` is empty.
        """


class LimitsCache(ABC):
    """Has a key-value cache of known size."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Memory of the key-value cache."""

    @property
    @abstractmethod
    def free_tokens(self) -> int | None:
        """Tokens that the cache has room for without forgetting others; None: any number."""

    @abstractmethod
    def limit_cache(self, nbytes: int) -> None:
        """Let the key-value cache use at most so many bytes; then `forward` raises `OutOfBlocksError` where it is full.

        Raises:
            ValueError: so few bytes, or such a cache, cannot be limited.
        """


class RunsLayers(ABC):
    """Runs some layers of a pass before the others."""

    @abstractmethod
    def begin_pass(self, rows: Sequence[int], tree: TokenTree) -> PartialPass:
        """A pass over a tree that runs its first layers now; the next `forward` goes on from there where its tree has
        the same nodes.

        Raises:
            ValueError: this model cannot run some of its layers.
        """


class SamplesTokens(ABC):
    """Samples in a pass."""

    @abstractmethod
    def sample_next(self, sampling: Sequence[Sampling]) -> None:
        """Let the next `forward`, of as many rows, sample after the roots of its trees, then after the draft that is
        the sampled token, and so on, where it can: `ModelOutput.sampled`. `sampling`: parameters, and as noise the key
        of the seed, of a row whose root is the last decided token; an inverse temperature of 0: the row is left out.
        """


class DraftsInCache(ABC):
    """Lets another network draft in its cache."""

    @abstractmethod
    def forward_draft(
        self, network: Network, rows: Sequence[int], tree: TokenTree, active: NodeMask, scored: NodeMask
    ) -> ModelOutput:
        """Run the active nodes of a tree with another network that has keys and values of the same sizes, over the
        cache of this one. Their keys and values are drafts: the next `forward` of a tree with these nodes replaces
        them. Inactive ancestors must have run so before.
        """


class GrowsTrees(ABC):
    """Grows a dynamic tree in one call."""

    @abstractmethod
    def grow_dynamic_tree(
        self,
        rows: Sequence[int],
        prefixes: TokenTree,
        max_depth: Int[np.ndarray, " b"],
        sizes: TreeSizes,
        bounds: TreeBounds,
        noise: Noise | None = None,
        limits: NodeLimits = NO_LIMITS,
    ) -> DynamicTrees | None:
        """Run the prefixes, and grow a dynamic tree below each in one call, as `shape.DynamicTree` would; None: not
        supported, nothing ran.

        `max_depth`, 1 or more, `sizes` and `bounds` as in `Predictor.grow_dynamic_tree`; `noise` and `limits` as in
        `DynamicTrees`. If a tree is a chain, all its nodes but the last have run, in the slots after the prefix.
        """


@dataclass(frozen=True, eq=False)
class PromptImages:
    """What a decoder reads of the images in a prompt."""

    positions: Int[np.ndarray, " k"]
    """Places in the prompt, ascending, where the decoder reads an image in place of the embedding of a token."""
    embeddings: Float[torch.Tensor, "k d"]
    digest: str
    """Identifies the embeddings: prompts with the same one and the same first tokens have the same prefix."""
    axes: Int[np.ndarray, "3 n"] | None = None
    """Positions of the prompt's tokens by time, height and width, where those of an image count so (Qwen2-VL, arXiv
    2409.12191); None: their places.
    """

    def axes_at(self, places: Int[np.ndarray, " n"]) -> Int[np.ndarray, "3 n"]:
        """Positions at places of a text that begins with the prompt: behind it they go on one by one."""
        assert self.axes is not None
        length = self.axes.shape[1]
        behind = self.axes.max() + 1 + places - length
        return np.where(places < length, self.axes[:, np.minimum(places, length - 1)], behind)


class ReadsImages(ABC):
    """Reads images in prompts."""

    @abstractmethod
    def show(self, row: int, images: PromptImages | None) -> None:
        """Let a row read these images from now on at their places; None: tokens alone. What the row holds already was
        read with the same ones.
        """


class Adapts(ABC):
    """Has adapters, of which every row may have another."""

    adapters: tuple[str, ...]
    """Their names."""

    @abstractmethod
    def adapt(self, row: int, name: str) -> None:
        """Run the passes of a row with this adapter from now on; empty: with none. Its tokens are of the same one."""


def offered(runner: Runner, interface: type[Interface]) -> Interface | None:
    """The runner that does the work, if it has this interface."""
    inner = runner.innermost
    return inner if isinstance(inner, interface) else None


def required(runner: Runner, interface: type[Interface], purpose: str) -> Interface:
    """The runner that does the work; `purpose`: what needs the interface, for the message.

    Raises:
        ValueError: it lacks the interface.
    """
    inner = offered(runner, interface)
    if inner is None:
        raise ValueError(f"{purpose}, which {type(runner.innermost).__name__} does not offer; use another method")
    return inner


def shares_prefixes(runner: Runner) -> bool:
    """Whether any number of a row's tokens can be copied."""
    forks = offered(runner, ForksRows)
    return forks is not None and forks.shares_prefixes


def copy_row(runner: Runner, source: int, target: int, length: int) -> bool:
    """`ForksRows.copy_row`; where rows cannot be copied it empties the target and returns False."""
    forks = offered(runner, ForksRows)
    if forks is not None:
        return forks.copy_row(source, target, length)
    runner.truncate(target, 0)
    return False


def free_tokens(runner: Runner) -> int | None:
    """`LimitsCache.free_tokens`; None also where the cache is unknown."""
    cache = offered(runner, LimitsCache)
    return None if cache is None else cache.free_tokens
