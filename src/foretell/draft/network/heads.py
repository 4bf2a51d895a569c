"""What Medusa's and blockwise decoding's heads have in common: several guesses from one state of the target, none knowing of the others."""

from abc import abstractmethod

import torch
from jaxtyping import Float
from pydantic import Field

from foretell.draft.network.base import Speculator, SpeculatorConfig
from foretell.model.ends import Ends


class HeadsConfig(SpeculatorConfig):
    """Sizes of a set of heads, and the tree that they earned in training."""

    heads: int = Field(4, ge=1)
    """Tokens guessed after the target's own next one."""
    paths: tuple[tuple[int, ...], ...] = ()
    """Rank paths, the one most often accepted first: the `n` first make the best tree of `n` nodes. Empty: not calibrated."""
    chances: tuple[float, ...] = ()
    """How often each path was accepted as a whole."""


class HeadsNetwork(Speculator):
    """Heads on the state that produced the newest token: head `i` (from 0) guesses the token `i + 1` places after that one."""

    def __init__(self, config: HeadsConfig, ends: Ends) -> None:
        super().__init__(config, ends)
        self.config = config
        self.heads = config.heads

    @property
    def taps(self) -> tuple[int, ...]:
        """What the target's own head sees."""
        return (self.card.layers + 1,)

    @abstractmethod
    def states(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t k d"]:
        """Every head's own version of a state, which the output matrix then scores."""

    def forward(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t k w"]:
        """Logits of every head over the drafted tokens, from states of the target."""
        return self.score(self.states(h.to(self.dtype)))
