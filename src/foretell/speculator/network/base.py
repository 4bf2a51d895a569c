"""The base class of trained speculators: small networks that use the target's embedding and output head."""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.kernels import NativeLinear
from foretell.model.run.topk import top_probabilities
from foretell.utils.validation import FrozenModel


class TargetInfo(FrozenModel):
    """Which model a speculator was trained for."""

    name: str
    fingerprint: str = ""
    """Hash of the target's norm weights, which quantisation does not change; empty in checkpoints of other projects."""
    hidden: int
    vocab: int
    layers: int


class SpeculatorConfig(FrozenModel):
    """Configuration of a speculator, stored as `config.json`. Subclasses add sizes and fix `kind`."""

    kind: str
    target: TargetInfo
    draft_vocab: int | None = None
    """Size of the draft vocabulary, the most frequent tokens of the training data; None: the target's vocabulary."""
    own_head: bool = False
    """Whether it has an output matrix of its own; otherwise it uses the target's (the rows of its draft vocabulary)."""


def check_mask_token(token: int, vocab: int) -> None:
    """Check that a mask token is one of the target's tokens.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= token < vocab:
        raise ValueError(
            f"mask_token {token} is not among the target's {vocab} tokens; give one of 0 to {vocab - 1}, or a "
            "checkpoint for this tokenizer"
        )


def last_undrafted(draft_tokens: Int[torch.Tensor, " n"] | None, vocab: int) -> int:
    """A token to stand for a mask: the last one that is not drafted, which is rare or does not occur in texts."""
    drafted = set() if draft_tokens is None else set(draft_tokens.tolist())
    return next((token for token in reversed(range(vocab)) if token not in drafted), vocab - 1)


@dataclass(frozen=True)
class TokenSubset:
    """A subset of the draft vocabulary, for losses with a sampled softmax."""

    columns: Int[torch.Tensor, " c"]
    """Indices into the draft vocabulary, ascending."""
    logit_offset: Float[torch.Tensor, " c"]
    """Added to the logits: the log of the number of tokens that a sampled token represents, 0 for the others."""

    def select(self, logits: Float[torch.Tensor, "*t w"]) -> Float[torch.Tensor, "*t c"]:
        """Logits of the subset, from those of the whole draft vocabulary."""
        return logits[..., self.columns] + self.logit_offset


class Speculator(nn.Module, ABC):
    """A network that drafts for one target. Training calls `forward`; drafters call the other methods.

    A checkpoint holds the parameters and the persistent buffers; the target's embedding and head are neither.

    Raises:
        ValueError: the target's embedding and head do not have the sizes of the configuration.
    """

    kind: ClassVar[str]
    starts_from: ClassVar[tuple[str, ...]] = ()
    """Other kinds with whose weights a training of this one may start."""
    config: SpeculatorConfig

    def __init__(self, config: SpeculatorConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        target = config.target
        if (target.hidden, target.vocab) != (embedding_and_head.hidden, embedding_and_head.vocab):
            raise ValueError(
                f"this {config.kind} speculator is for a target of width {target.hidden} and {target.vocab} tokens; "
                f"the target given has width {embedding_and_head.hidden} and {embedding_and_head.vocab} tokens"
            )
        self.config, self.target_info = config, target
        self.embedding_scale = embedding_and_head.embedding_scale
        """Factor of the target's embeddings."""
        self.softcap = embedding_and_head.softcap
        """The target's bound on logits; 0: none."""
        self.register_buffer("_embedding", embedding_and_head.embedding, persistent=False)
        size = config.draft_vocab
        self.token_of: torch.Tensor | None
        """Target token of every token of the draft vocabulary, ascending; None: the vocabularies are the same."""
        self.register_buffer("token_of", None if size is None else torch.arange(size))
        self._target_head = embedding_and_head.head
        rows = embedding_and_head.head if size is None else embedding_and_head.head[:size]
        self.head: nn.Parameter | None
        """Its own output matrix; None: it uses rows of the target's."""
        self.register_parameter("head", nn.Parameter(rows.detach().float().clone()) if config.own_head else None)
        self.register_buffer("_shared_head", None if config.own_head else rows, persistent=False)
        self.packed_head: NativeLinear | None = None
        """The output matrix in the format of the CPU kernels, set by `pack_network`."""
        self.packed_precision = ""
        """What its matrices are rounded to, set by `pack_network`; empty: they are not packed."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads; see `Runner.forward`. Here the input of the head."""
        return (self.target_info.layers + 1,)

    @property
    def target_vocab(self) -> int:
        """Tokens of the target."""
        return self.target_info.vocab

    def adapt_state_dict(self, smaller: "Speculator") -> dict[str, torch.Tensor]:
        """The state dict of a smaller network of this kind in the shapes of this one; inputs that the smaller one does
        not have get zero weights.
        """
        return smaller.state_dict()

    def set_draft_vocab(self, tokens: Int[torch.Tensor, " n"]) -> None:
        """Set the draft vocabulary (ascending, `config.draft_vocab` tokens) and take its rows of the target's head.

        Loading a checkpoint calls it too, before it loads an own head.
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
        """Output matrix of the draft vocabulary: its own, or rows of the target's."""
        return self.get_buffer("_shared_head") if self.head is None else self.head

    @property
    def full_lm_head(self) -> Float[torch.Tensor, "v d"]:
        """Output matrix of the target's whole vocabulary: the target's, with this network's own rows in place."""
        if self.head is None or self.token_of is None:
            return self._target_head if self.head is None else self.head
        full = self._target_head.to(self.head.device, self.head.dtype, copy=True)
        full[self.token_of] = self.head.detach()
        return full

    def embed(self, token: Int[torch.Tensor, "*t"]) -> Float[torch.Tensor, "*t d"]:
        """The target's scaled embedding of tokens, in the dtype of this network's weights."""
        x = F.embedding(token, self.get_buffer("_embedding")).to(self.dtype)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def compute_logits(
        self, x: Float[torch.Tensor, "*t d"], subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t w"]:
        """Logits over the draft vocabulary, or a subset of it, from inputs of the output head."""
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
        """Probabilities of the `count` most probable tokens and their indices into the draft vocabulary, best first,
        from inputs of the output head.
        """
        if self.packed_head is not None and not self.softcap:
            return self.packed_head.topk_softmax(x, count)
        return top_probabilities(self.compute_logits(x), count)

    def _apply_softcap(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def to_target_vocab(self, logits: Float[torch.Tensor, "*t w"]) -> Float[torch.Tensor, "*t v"]:
        """Logits over the target's vocabulary: minus infinity for tokens outside the draft vocabulary."""
        if self.token_of is None:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.target_info.vocab), float("-inf"))
        out[..., self.token_of] = logits
        return out

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its own weights."""
        if self.packed_head is not None:
            return torch.float32
        return next((p.dtype for p in self.parameters()), torch.float32)
