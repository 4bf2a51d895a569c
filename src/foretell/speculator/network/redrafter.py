"""ReDrafter: a recurrent network over the drafted tokens, beside the target's last hidden state."""

from collections.abc import Sequence
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.recurrent import RecurrentConfig, RecurrentNetwork

_INIT_SCALE = 0.1
"""Size of the random part of the first outputs, relative to the target's state."""


class ReDrafterConfig(RecurrentConfig):
    """Configuration of a ReDrafter."""

    kind: Literal["redrafter"] = "redrafter"
    stages: int = Field(5, ge=1, le=64)
    """Tokens that it was trained to draft."""
    inner: int = Field(1024, ge=1)
    """Width of the recurrent state."""
    layers: int = Field(2, ge=0)
    """Residual layers between the state and the output matrix."""
    recurrent: bool = True
    """False: the state is the sum of the tokens' embeddings, as in checkpoints of Apple without `rnn`."""
    exit_width: int | None = Field(None, ge=1)
    """Width of the residual layers and of its own output matrix; None: the target's."""
    combined: bool = True
    """False: the residual layers read the target's state and the recurrent state, without a matrix before them."""
    combine_bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        width = self.target.hidden + self.inner
        if not self.combined and self.exit_width != width:
            raise ValueError(f"without a matrix the residual layers are as wide as the states together ({width})")
        if self.exit_width is not None and (not self.own_head or self.draft_vocab is not None):
            raise ValueError("residual layers of a width of their own need an output matrix of the whole vocabulary")
        if not self.recurrent and self.inner != self.target.hidden:
            raise ValueError(f"a sum of embeddings is as wide as they are ({self.target.hidden})")
        return self


class ReDrafter(RecurrentNetwork):
    """ReDrafter (arXiv 2403.09919): the state `s_i = SiLU(A s_(i-1) + B emb(token_(i-1)))` starts at zero; with the
    target's last hidden state `h` it gives the input of the output matrix, through residual layers. All steps share
    their weights.
    """

    kind = "redrafter"
    config: ReDrafterConfig

    def __init__(self, config: ReDrafterConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        d, e, width = embedding_and_head.hidden, config.inner, config.exit_width or embedding_and_head.hidden
        self.recur = nn.Linear(e, e, bias=False) if config.recurrent else None
        self.token = nn.Linear(d, e) if config.recurrent else None
        self.combine = nn.Linear(d + e, width, bias=config.combine_bias) if config.combined else None
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.layers))
        self.native = None
        """There is no kernel for the whole network; its matrices are packed."""
        if config.exit_width is None:
            self._init_weights()
        else:
            self.register_parameter("head", nn.Parameter(torch.zeros(embedding_and_head.vocab, width)))

    @torch.no_grad()
    def _init_weights(self) -> None:
        """The first outputs are the target's state and a little noise; the state adds nothing yet."""
        if self.recur is not None and self.token is not None:
            table = self.get_buffer("_embedding")[:1000].float() * self.embedding_scale
            nn.init.orthogonal_(self.recur.weight, 0.5)
            nn.init.normal_(self.token.weight, 0, 1 / float(table.norm(dim=-1).mean()))
            nn.init.zeros_(self.token.bias)
        assert self.combine is not None
        d = self.combine.out_features
        nn.init.normal_(self.combine.weight, 0, _INIT_SCALE * self.config.inner**-0.5)
        self.combine.weight[:, :d] = torch.eye(d)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def initial_state(self, features: Sequence[Float[torch.Tensor, "*t d"]]) -> Float[torch.Tensor, "*t w"]:
        """The target's state and a recurrent state of zeros."""
        h = features[0].to(self.dtype)
        return torch.cat((h, h.new_zeros(*h.shape[:-1], self.config.inner)), -1)

    def next_state(
        self, state: Float[torch.Tensor, "*t w"], token: Int[torch.Tensor, "*t"], stage: int
    ) -> Float[torch.Tensor, "*t w"]:
        """The target's state and the recurrent state after a token."""
        h, s = state.split((self.target_info.hidden, self.config.inner), -1)
        embedded = self.embed(token)
        if self.recur is None or self.token is None:
            return torch.cat((h, s + embedded), -1)
        return torch.cat((h, F.silu(self.recur(s) + self.token(embedded)).to(h.dtype)), -1)

    def head_input(self, state: Float[torch.Tensor, "*t w"], stage: int) -> Float[torch.Tensor, "*t d"]:
        """The input of the output matrix."""
        x: torch.Tensor = state if self.combine is None else self.combine(state)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x
