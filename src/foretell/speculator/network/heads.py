"""The base class of Medusa's and blockwise decoding's heads: independent predictions from one hidden state."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from pydantic import Field

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TokenSubset

RankPath = tuple[int, ...]
"""A tree node as the rank of the token chosen at every depth."""
_MAX_NODES = 128
"""Nodes of the largest tree that a checkpoint holds."""


class HeadsConfig(SpeculatorConfig):
    """Configuration of a set of heads."""

    heads: int = Field(4, ge=1)
    """Tokens drafted after the target's own next token."""


class HeadsNetwork(Speculator):
    """Heads on the hidden state that produced the newest token: head `i` (from 0) predicts the token `i + 1` positions
    after that one.
    """

    def __init__(self, config: HeadsConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.config: HeadsConfig = config
        self.heads = config.heads
        self.tree: torch.Tensor
        """Nodes of the draft tree as rank paths, padded with -1: the first `n` are the best tree of `n` nodes."""
        self.register_buffer("tree", torch.full((_MAX_NODES, config.heads), -1))
        self.chances: torch.Tensor
        """Measured acceptance rate of every path as a whole."""
        self.register_buffer("chances", torch.zeros(_MAX_NODES))

    @property
    def paths(self) -> tuple[RankPath, ...]:
        """Rank paths, the highest acceptance rate first; empty before training."""
        rank_paths = (tuple(r for r in path if r >= 0) for path in self.tree.tolist())
        return tuple(path for path in rank_paths if path)

    def set_tree(self, paths: Sequence[RankPath], chances: Sequence[float]) -> None:
        """Store the paths of the highest acceptance rates, every path after its prefixes, and their rates."""
        table, shares = torch.full(self.tree.shape, -1), torch.zeros(len(self.tree))
        for i, (path, chance) in enumerate(zip(paths[:_MAX_NODES], chances, strict=False)):
            table[i, : len(path)], shares[i] = torch.tensor(path), chance
        self.tree.copy_(table)
        self.chances.copy_(shares)

    @abstractmethod
    def head_states(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t k d"]:
        """Input of the output head for every head."""

    def forward(
        self, h: Float[torch.Tensor, "*t d"], subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t k w"]:
        """Logits of every head over the draft vocabulary, or a subset of it, from hidden states of the target."""
        return self.compute_logits(self.head_states(h.to(self.dtype)), subset)
