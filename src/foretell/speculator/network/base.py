"""What all trained speculators are: small networks on the target's hidden states that borrow its embedding and its
head.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn

from foretell.distributions.topk import likeliest
from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.model.kernels import NativeLinear


class TargetInfo(BaseModel):
    """Which model a speculator was trained for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    fingerprint: str = ""
    """Of the target's norms, which quantisation leaves alone; empty in published checkpoints, which have none."""
    hidden: int
    vocab: int
    layers: int


_FORMER_KEYS = {"taps": "hidden_layers", "more_taps": "more_hidden_layers"}
"""Keys of `config.json` under their former names."""


class SpeculatorConfig(BaseModel):
    """What is needed, beside weights and target, to build a speculator.

    Subclasses add their own sizes and fix `kind`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    target: TargetInfo
    draft_vocab: int | None = None
    """Tokens that it can guess, the most frequent ones of its training data; None: all."""
    own_head: bool = False
    """It has an output matrix of its own; otherwise it uses the target's (the rows of its tokens)."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_keys(cls, values: Any) -> Any:
        """Accept configurations that were written before the keys got their present names."""
        return {_FORMER_KEYS.get(k, k): v for k, v in values.items()} if isinstance(values, dict) else values


@dataclass(frozen=True)
class TokenSubset:
    """Some of the drafted tokens, for a loss that looks at no others."""

    columns: Int[torch.Tensor, " c"]
    """Their numbers among the drafted ones, ascending."""
    logit_offset: Float[torch.Tensor, " c"]
    """What is added to their logits, for those that stand for others too."""

    def select(self, logits: Float[torch.Tensor, "*t w"]) -> Float[torch.Tensor, "*t c"]:
        """Logits of these alone, from those of all drafted tokens."""
        return logits[..., self.columns] + self.logit_offset


class Speculator(nn.Module, ABC):
    """A network that drafts for one target. `forward` is what training calls; drafters call the parts it is made of.

    Parameters and persistent buffers are what a checkpoint holds; the target's ends are neither.

    Raises:
        ValueError: the target's ends do not have the sizes that the configuration names.
    """

    kind: ClassVar[str]
    config: SpeculatorConfig

    def __init__(self, config: SpeculatorConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        card = config.target
        if (card.hidden, card.vocab) != (embedding_and_head.hidden, embedding_and_head.vocab):
            raise ValueError(
                f"this {config.kind} speculator is for a target of width {card.hidden} and {card.vocab} tokens; "
                f"the target given has width {embedding_and_head.hidden} and {embedding_and_head.vocab} tokens"
            )
        self.config, self.target_info = config, card
        self._scale, self._softcap = embedding_and_head.embedding_scale, embedding_and_head.softcap
        self.register_buffer("_embedding", embedding_and_head.embedding, persistent=False)
        kept = config.draft_vocab
        self.token_of: torch.Tensor | None
        """Target token of every drafted one, ascending; None where it drafts all of them."""
        self.register_buffer("token_of", None if kept is None else torch.arange(kept))
        self._target_head = embedding_and_head.head
        rows = embedding_and_head.head if kept is None else embedding_and_head.head[:kept]
        self.head: nn.Parameter | None
        """Its own output matrix; None where it uses rows of the target's."""
        self.register_parameter("head", nn.Parameter(rows.detach().float().clone()) if config.own_head else None)
        self.register_buffer("_shared_head", None if config.own_head else rows, persistent=False)
        self.packed_head: NativeLinear | None = None
        """The output matrix in the form of the CPU kernels, once `packed` made it."""

    @property
    @abstractmethod
    def hidden_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads; see `Runner.forward`."""

    def adapt_state_dict(self, smaller: "Speculator") -> dict[str, torch.Tensor]:
        """The weights of one of its kind, which may read fewer of the target's states, as its own: what that one did
        not see weighs nothing.
        """
        return smaller.state_dict()

    def set_draft_vocab(self, tokens: Int[torch.Tensor, " n"]) -> None:
        """Fix the tokens it drafts (ascending, as many as the configuration says), and take their rows of the target's
        head.

        Loading a checkpoint calls it too, before an own head is read.
        """
        assert self.token_of is not None
        self.token_of.copy_(tokens)
        rows = self._target_head[tokens.to(self._target_head.device)]
        if self.head is None:
            self._shared_head = rows
        else:
            self.head.data.copy_(rows)

    @property
    def lm_head(self) -> Float[torch.Tensor, "w d"]:
        """What scores the drafted tokens: its own matrix, or rows of the target's."""
        return self.get_buffer("_shared_head") if self.head is None else self.head

    @property
    def full_lm_head(self) -> Float[torch.Tensor, "v d"]:
        """What scores the target's whole vocabulary: the target's own matrix, with the own rows in their places."""
        if self.head is None or self.token_of is None:
            return self._target_head if self.head is None else self.head
        whole = self._target_head.to(self.head.device, self.head.dtype, copy=True)
        whole[self.token_of] = self.head.detach()
        return whole

    @property
    def softcap(self) -> float:
        """The target's bound on logits; 0: none."""
        return self._softcap

    @property
    def embedding_scale(self) -> float:
        """What the target multiplies its embeddings by."""
        return self._scale

    def embed(self, token: Int[torch.Tensor, "*t"]) -> Float[torch.Tensor, "*t d"]:
        """The target's embedding of tokens, as its first block sees it, in the dtype of the own weights."""
        x = F.embedding(token, self.get_buffer("_embedding")).to(self.dtype)
        return x if self._scale == 1 else x * self._scale

    def compute_logits(
        self, x: Float[torch.Tensor, "*t d"], subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t w"]:
        """Logits over the drafted tokens, or some of them, from what the target's head would see."""
        if self.packed_head is not None:
            flat = x.reshape(-1, x.shape[-1]).contiguous()
            return self._apply_softcap(self.packed_head(flat).view(*x.shape[:-1], -1))
        head = self.lm_head
        if subset is None:
            return self._apply_softcap(F.linear(x, head.to(x.dtype)).float())
        return self._apply_softcap(F.linear(x, head[subset.columns].to(x.dtype)).float()) + subset.logit_offset

    def top_tokens(
        self, x: Float[torch.Tensor, "k d"], count: int
    ) -> tuple[Float[torch.Tensor, "k c"], Int[torch.Tensor, "k c"]]:
        """Probabilities and numbers of the `count` drafted tokens that score best, best first, from what the target's
        head would see.
        """
        if self.packed_head is not None and not self._softcap:
            return self.packed_head.likeliest(x, count)
        return likeliest(self.compute_logits(x), count)

    def _apply_softcap(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits within the target's bound, where it has one."""
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def to_target_vocab(self, logits: Float[torch.Tensor, "*t w"]) -> Float[torch.Tensor, "*t v"]:
        """Logits over the target's whole vocabulary: minus infinity for tokens it does not draft."""
        if self.token_of is None:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.target_info.vocab), float("-inf"))
        out[..., self.token_of] = logits
        return out

    @property
    def dtype(self) -> torch.dtype:
        """Of its own weights."""
        if self.packed_head is not None:
            return torch.float32
        return next((p.dtype for p in self.parameters()), torch.float32)
