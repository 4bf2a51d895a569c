"""Recurrent speculators: a state after every drafted token, from the target's last hidden state on."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int

from foretell.speculator.network.base import Speculator, SpeculatorConfig, TokenSubset

T = TypeVar("T")


class RecurrentConfig(SpeculatorConfig):
    """Configuration of a recurrent speculator."""

    stages: int
    """Tokens that it drafts."""


class RecurrentNetwork(Speculator):
    """The base class: `stages` predictions, each from the previous state and the previous token."""

    config: RecurrentConfig

    @property
    def stages(self) -> int:
        """Number of stages: the maximum depth of a draft."""
        return self.config.stages

    @abstractmethod
    def initial_state(self, features: Sequence[Float[torch.Tensor, "*t d"]]) -> Float[torch.Tensor, "*t w"]:
        """The state before the first stage, from one tensor per layer of `hidden_layers`."""

    @abstractmethod
    def next_state(
        self, state: Float[torch.Tensor, "*t w"], token: Int[torch.Tensor, "*t"], stage: int
    ) -> Float[torch.Tensor, "*t e"]:
        """The state of stage `stage` (from 0) after the previous stage's token (for stage 0 the target's)."""

    @abstractmethod
    def head_input(self, state: Float[torch.Tensor, "*t e"], stage: int) -> Float[torch.Tensor, "*t r"]:
        """The input of a stage's output head."""

    def head_logits(
        self, head_input: Float[torch.Tensor, "*t r"], stage: int, subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t w"]:
        """Logits over the draft vocabulary, or a subset of it, from inputs of a stage's output head."""
        return self.compute_logits(head_input, subset)

    def draft_step(
        self, state: Float[torch.Tensor, "k i"], token: Int[torch.Tensor, " k"], stage: int
    ) -> tuple[Float[torch.Tensor, "k e"], Float[torch.Tensor, "k w"]]:
        """`next_state`, and the logits after it."""
        state = self.next_state(state, token, stage)
        return state, self.head_logits(self.head_input(state, stage), stage)

    def forward(
        self,
        features: Sequence[Float[torch.Tensor, "*t d"]],
        tokens: Int[torch.Tensor, "*t n"],
        loss: Callable[[Sequence[Float[torch.Tensor, "*t r"]]], T],
    ) -> T:
        """`loss` of the inputs of all stages' output heads, with teacher forcing.

        `tokens[..., i]` is the token `i + 1` positions after the features'. The loss is computed inside `forward`
        because it calls `head_logits`, and a sharded network (FSDP) gathers its weights during this call only; and
        because logits of all stages at once would be the largest tensor of training.
        """
        state, head_inputs = self.initial_state(features), []
        for stage in range(self.stages):
            state = self.next_state(state, tokens[..., stage], stage)
            head_inputs.append(self.head_input(state, stage))
        return loss(head_inputs)
