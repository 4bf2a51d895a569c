"""Exits: output heads after some of the target's layers."""

from itertools import pairwise
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.layer import DecoderBlock, RMSNorm
from foretell.model.block.rope import RopeTables, rope_tables
from foretell.model.config.model import ModelConfig
from foretell.model.training.full_forward import forward_blocks
from foretell.speculator.network.base import Speculator, SpeculatorConfig
from foretell.speculator.network.blocks import blank_blocks, frozen_copy
from foretell.speculator.network.draft_model import DraftNetwork, draft_config
from foretell.utils.validation import FrozenModel

Halting = Literal["agreement", "geometric", "policy", "token", "sequence"]
"""What the classifiers of exits were trained for. `agreement`: whether an exit gives the target's token (CALM, arXiv
2207.07061). The others choose a depth: `geometric`, exit by exit towards the best one, and `token` or `sequence`, once
per token or answer at the first exit (Depth-Adaptive Transformer, arXiv 1910.10073); `policy`, exit by exit for a
reward (ConsistentEE, arXiv 2312.11882).
"""


DRAFT_PROBABILITY = 0.6
"""Probability below which a fitted exit does not draft: then the pass costs what plain decoding does, and the test."""


class DraftQuality(FrozenModel):
    """How an exit drafts: the share of tokens after which its most probable token has `DRAFT_PROBABILITY`, and how
    often that is the target's then.
    """

    drafts: float = Field(ge=0, le=1)
    right: float = Field(ge=0, le=1)


class ExitsConfig(SpeculatorConfig):
    """Configuration of a set of exits."""

    kind: Literal["exits"] = "exits"
    layers: tuple[int, ...] = Field(min_length=1)
    """After how many layers each exit is, ascending."""
    maps: bool = True
    """Whether each exit has a square matrix between its norm and the head."""
    inner: int = Field(0, ge=0)
    """Width of the feed-forward network that each exit adds to that; 0: none."""
    shared_inner: bool = False
    """Whether all exits share this network."""
    blocks: ModelConfig | None = None
    """The target's configuration with the decoder blocks alone that the only exit has after its layer; None: none."""
    halting: Halting = "agreement"
    """What the classifiers were trained for."""
    drafting: tuple[DraftQuality, ...] = ()
    """What every exit does on held-out tokens; empty: not measured."""
    norm_eps: float = 1e-5

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        ascending = all(a < b for a, b in pairwise(self.layers))
        if not (ascending and self.layers[0] >= 1 and self.layers[-1] < self.target.layers):
            raise ValueError(
                f"exits lie after 1 to {self.target.layers - 1} layers, in ascending order; found {list(self.layers)}"
            )
        if self.blocks is not None and (len(self.layers) > 1 or self.inner):
            raise ValueError(f"one exit may have decoder blocks, without a network; found exits {list(self.layers)}")
        if self.drafting and len(self.drafting) != len(self.layers):
            raise ValueError(f"{len(self.layers)} exits with the quality of {len(self.drafting)}")
        return self


class Exits(Speculator):
    """Per exit a norm, a linear shortcut to the input of the target's head (Jump to Conclusions, arXiv 2303.09435), a
    feed-forward network if there is one (EE-Tuning, arXiv 2402.00518), and a classifier of whether to leave; see
    `Halting`. A single exit may have decoder blocks before them (Kangaroo, arXiv 2404.18911): all else then reads the
    outputs of these.

    Exits without maps and networks are those of a head that all layers share: the target's norm and head.
    """

    kind = "exits"

    def __init__(self, config: ExitsConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config.model_copy(update={"own_head": False}), embedding_and_head)
        self.config: ExitsConfig = config
        width, count, inner = config.target.hidden, len(config.layers), config.inner
        self.norms = nn.ModuleList(RMSNorm(torch.ones(width), config.norm_eps) for _ in range(count))
        self.maps = nn.ModuleList(_identity(width) for _ in range(count * config.maps))
        networks = (1 if config.shared_inner else count) * bool(inner)
        self.up = nn.ModuleList(nn.Linear(width, inner) for _ in range(networks))
        self.down = nn.ModuleList(_zeros(inner, width) for _ in range(networks))
        self.blocks = nn.ModuleList() if config.blocks is None else blank_blocks(config.blocks)
        for name, table in zip(("_cos", "_sin"), _rope(config.blocks), strict=True):
            self.register_buffer(name, table, persistent=False)
        self.classifier = nn.Parameter(torch.zeros(count, width))
        self.classifier_bias = nn.Parameter(torch.zeros(count))
        self.agreement: torch.Tensor
        """Share of held-out tokens at which each exit's most probable token is the target's; 0: not measured."""
        self.register_buffer("agreement", torch.zeros(count))

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers of the exits."""
        return self.config.layers

    def forward(self, exit_: int, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Input of the output head for exit number `exit_`, from the outputs of its layer."""
        x: torch.Tensor = self.norms[exit_](h.to(self.dtype))
        out: torch.Tensor = self.maps[exit_](x) if self.config.maps else x
        if not self.config.inner:
            return out
        i = 0 if self.config.shared_inner else exit_
        added: torch.Tensor = self.down[i](F.silu(self.up[i](x)))
        return out + added

    def init_from_target(self, target: Decoder) -> None:
        """Copy blocks of the target."""
        for mine, block in zip(self.blocks, target.blocks, strict=True):
            mine.load_state_dict(block.state_dict())

    def init_from_draft_model(self, draft: DraftNetwork) -> None:
        """Copy the last blocks of a trained draft model of the same target, and its final norm.

        Raises:
            ValueError: it has fewer blocks, or blocks of other sizes.
        """
        count = len(self.blocks)
        if len(draft.blocks) < count:
            raise ValueError(
                f"the draft model has {len(draft.blocks)} blocks, and {count} were asked for with --blocks"
            )
        for mine, block in zip(self.blocks, list(draft.blocks)[-count:], strict=True):
            try:
                mine.load_state_dict(block.state_dict())
            except RuntimeError as error:
                raise ValueError(
                    f"the draft model's blocks do not fit: {str(error).splitlines()[-1].strip()}"
                ) from error
        self.norms[0].load_state_dict(draft.norm.state_dict())

    def run_blocks(self, h: Float[torch.Tensor, "b s d"]) -> Float[torch.Tensor, "b s d"]:
        """Outputs of the blocks over whole sequences, from the outputs of the exit's layer; the same without blocks."""
        if self.config.blocks is None:
            return h
        rope = self.get_buffer("_cos"), self.get_buffer("_sin")
        return forward_blocks(self.blocks, self.config.blocks, (rope, rope), h)

    def decoder_blocks(self, dtype: torch.dtype) -> list[DecoderBlock]:
        """Copies of the blocks for drafting."""
        return [frozen_copy(block, dtype) for block in self.blocks]

    def exit_score(self, exit_: int, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t"]:
        """The classifier's logit for "this exit gives the target's token", from the outputs of its layer."""
        return self._normed(h) @ self.classifier[exit_] + self.classifier_bias[exit_]

    def depth_scores(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t e"]:
        """The classifiers' logits for "leave at this exit", from the outputs of the first exit's layer; that for "run
        all layers" is 0. Only if they were trained for `token` or `sequence`.
        """
        return self._normed(h) @ self.classifier.T + self.classifier_bias

    def _normed(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        x = h.to(self.classifier.dtype)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps)


def block_config(target: ModelConfig, layer: int, count: int) -> ModelConfig:
    """The configuration of `count` blocks after some layers of a target.

    Raises:
        ValueError: the target's blocks are not alike, or have experts.
    """
    blocks = range(layer, min(layer + count, target.layers))
    config = draft_config(target, blocks)
    if len(blocks) < count or target.window_layers or target.unrotated_layers or target.rope is None:
        raise ValueError(
            f"--blocks {count}: an exit has the blocks that follow it in the target ({target.layers - layer} here), "
            f"which must be alike, without sliding windows; fit exits without blocks"
        )
    return config


def _rope(config: ModelConfig | None) -> RopeTables:
    """Rotary tables of blocks; empty without."""
    if config is None or config.rope is None:
        return torch.empty(0, 0), torch.empty(0, 0)
    return rope_tables(config.rope, config.head_dim, config.context)


def _identity(width: int) -> nn.Linear:
    made = nn.Linear(width, width, bias=False)
    nn.init.eye_(made.weight)
    return made


def _zeros(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made
