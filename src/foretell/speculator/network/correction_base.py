"""A head that corrects what the slots of a block predict by the tokens drafted before them, and what it reads."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import nn

from foretell.speculator.network.base import TokenSubset
from foretell.utils.validation import FrozenModel

Embed = Callable[[Int[torch.Tensor, "*t"]], Float[torch.Tensor, "*t d"]]
"""The target's embedding of tokens."""
Columns: TypeAlias = Int[torch.Tensor, " w"] | None
"""The tokens of the draft vocabulary that logits are of; None: all of them."""
Logits: TypeAlias = Float[torch.Tensor, "k w"]


class Blocks(NamedTuple):
    """`n` blocks that one pass predicted."""

    states: Float[torch.Tensor, "n s d"]
    """Inputs of the output head at all slots."""
    logits: Float[torch.Tensor, "n p w"]
    """Of the predicting slots, the last `p`."""
    feature: Float[torch.Tensor, "n d"]
    """What the drafter made of the target's states at the last position before the anchor."""
    prepared: tuple[torch.Tensor, ...] = ()
    """What a head computes once for a block."""

    def state_at(self, nodes: "Nodes") -> Float[torch.Tensor, "k d"]:
        """Inputs of the output head at the slots of nodes."""
        return self.states[:, -self.logits.shape[1] :][nodes.block, nodes.slot]

    def logits_at(self, nodes: "Nodes") -> Float[torch.Tensor, "k w"]:
        """The uncorrected logits after nodes."""
        return self.logits[nodes.block, nodes.slot]


class Nodes(NamedTuple):
    """Nodes after which a token is predicted."""

    block: Int[torch.Tensor, " k"]
    slot: Int[torch.Tensor, " k"]
    """Which predicting slot of the block predicts it: the number of drafted tokens up to the node."""
    path: Int[torch.Tensor, "k t"]
    """The token before the anchor, the anchor, and the drafted tokens up to the node; what follows has no meaning."""

    @property
    def token(self) -> Int[torch.Tensor, " k"]:
        """The last token of every path."""
        return self.path.gather(1, self.slot[:, None] + 1)[:, 0]


class Candidates(NamedTuple):
    """The tokens that a head chooses among after `k` nodes, the right one first."""

    scores: Float[torch.Tensor, "k c"]
    index: Int[torch.Tensor, "k c"]
    """Where they stand among the logits."""


class CorrectionConfig(FrozenModel):
    """Configuration of such a head."""


class Correction(nn.Module, ABC):
    """A head over blocks of `slots` slots of width `hidden`, whose tokens are `vocab` of the target, `outputs` of them
    drafted.
    """

    def prepare(self, blocks: Blocks, embed: Embed, subset: TokenSubset | None = None) -> Blocks:
        """The blocks with what is computed once for each; `subset`: their logits are of these tokens."""
        return blocks

    def score_with(
        self, right: Int[torch.Tensor, " k"], blocks: Blocks, nodes: Nodes, columns: Columns = None
    ) -> Candidates | None:
        """What a head that chooses among tokens has to tell the right ones from; None: it corrects all logits."""
        return None

    @abstractmethod
    def forward(self, blocks: Blocks, nodes: Nodes, embed: Embed, columns: Columns = None) -> Logits:
        """The corrected logits after nodes."""
