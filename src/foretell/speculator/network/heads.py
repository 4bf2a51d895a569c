"""What Medusa's and blockwise decoding's heads have in common: several guesses from one state of the target, none
knowing of the others.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from pydantic import Field

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TokenSubset

RankPath = tuple[int, ...]
_PATHS = 128
"""Nodes of the largest tree that is noted."""


class HeadsConfig(SpeculatorConfig):
    """Sizes of a set of heads."""

    heads: int = Field(4, ge=1)
    """Tokens guessed after the target's own next one."""


class HeadsNetwork(Speculator):
    """Heads on the state that produced the newest token: head `i` (from 0) guesses the token `i + 1` places after that
    one.
    """

    def __init__(self, config: HeadsConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.config: HeadsConfig = config
        self.heads = config.heads
        self.tree: torch.Tensor
        """Rank paths of the tree that the heads earned, padded with -1: the `n` first make the best tree of `n`
        nodes.
        """
        self.register_buffer("tree", torch.full((_PATHS, config.heads), -1))
        self.chances: torch.Tensor
        """How often each path came true as a whole."""
        self.register_buffer("chances", torch.zeros(_PATHS))

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the target's own head sees."""
        return (self.target_info.layers + 1,)

    @property
    def paths(self) -> tuple[RankPath, ...]:
        """Rank paths, the one most often right first; empty before training."""
        found = (tuple(r for r in path if r >= 0) for path in self.tree.tolist())
        return tuple(path for path in found if path)

    def set_tree(self, paths: Sequence[RankPath], chances: Sequence[float]) -> None:
        """Note the paths that were right most often, each after its beginnings, and how often."""
        table, shares = torch.full(self.tree.shape, -1), torch.zeros(len(self.tree))
        for i, (path, chance) in enumerate(zip(paths[:_PATHS], chances, strict=False)):
            table[i, : len(path)], shares[i] = torch.tensor(path), chance
        self.tree.copy_(table)
        self.chances.copy_(shares)

    @abstractmethod
    def head_states(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t k d"]:
        """Every head's own version of a state, which the output matrix then scores."""

    def forward(
        self, h: Float[torch.Tensor, "*t d"], subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t k w"]:
        """Logits of every head over the drafted tokens, or some of them, from states of the target."""
        return self.compute_logits(self.head_states(h.to(self.dtype)), subset)
