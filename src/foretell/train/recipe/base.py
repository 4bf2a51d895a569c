"""The contract of a recipe: what a speculator is, what it is to learn from a batch, and how it is measured."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from pydantic import BaseModel
from torch import nn

from foretell.engine.method import AnyMethod
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.model.graph import GraphedDecoder
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.runner import Network, Runner
from foretell.speculator.checkpoint import save
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TargetInfo
from foretell.tokenizer.codec import TextCodec
from foretell.train.data.batch import Batch
from foretell.utils.names import unknown
from foretell.utils.validation import validate

Options = TypeVar("Options", bound=BaseModel)
MAX_WIDTH = 1 << 20
"""Largest width of a layer that `--set` may ask for."""
MAX_COUNT = 256
"""Most layers, heads or steps that `--set` may ask for."""

State = dict[str, Shaped[torch.Tensor, "*shape"]]


TREE = 12
"""Nodes of the trees by confidence that speculators are measured with while they learn."""


def plain_decoder(network: Network, dtype: torch.dtype) -> Decoder | None:
    """The decoder in plain torch that a network runs, if it is one of this dtype; None: CPU kernels run it, or it has
    another dtype.
    """
    decoder = network.decoder if isinstance(network, GraphedDecoder) else network
    return decoder if isinstance(decoder, Decoder) and decoder.embedding.dtype == dtype else None


@dataclass(frozen=True)
class Setup:
    """What a recipe is built from: the target, and what the user asked for."""

    card: TargetInfo
    config: ModelConfig
    """Of the target."""
    ends: EmbeddingAndHead
    """Of the target, in the dtype that it trains with (bfloat16 or float32)."""
    source: Checkpoint | None = None
    """The target's checkpoint, for copies that training changes; None in some tests."""
    kept: Int[torch.Tensor, " n"] | None = None
    """Tokens to draft (ascending), the most frequent ones of the training answers; None: all.

    For `config.draft_vocab` and `choose`.
    """
    seed: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    """Sizes and weights as the user wrote them: `--set inner=1024` is `{"inner": "1024"}`."""
    codec: TextCodec | None = None
    """Of the target, for recipes that write a target of their own."""
    network: Network | None = None
    """The target as it decodes; None: in plain torch."""

    @cached_property
    def decoder(self) -> Decoder:
        """The target in plain torch, in the dtype of `embedding_and_head`: one for all who read with it, loaded at first use.

        It must not be changed.

        Raises:
            ValueError: its checkpoint is not at hand.
        """
        found = None if self.network is None else plain_decoder(self.network, self.ends.embedding.dtype)
        if found is not None:
            return found
        if self.source is None:
            raise ValueError("this training needs the target's checkpoint, and there is none")
        return self.source.decoder(self.ends.embedding.dtype)

    @property
    def draft_vocab(self) -> int | None:
        """How many tokens are drafted; None: all."""
        return None if self.kept is None else len(self.kept)

    def choose(self, network: Speculator) -> None:
        """Give a fresh network the tokens that it drafts."""
        if self.kept is not None:
            network.set_draft_vocab(self.kept)

    def draft_index(self) -> Int[torch.Tensor, " v"] | None:
        """Place of every token of the target among the drafted ones, -1 for the others; None: all are drafted."""
        if self.kept is None:
            return None
        out = torch.full((self.card.vocab,), -1)
        out[self.kept.cpu()] = torch.arange(len(self.kept))
        return out

    def parse(self, kind: type[Options]) -> Options:
        """The options as the recipe's own model, whose fields have defaults.

        Raises:
            ValueError: an option that the recipe does not have, or a value that does not fit.
        """
        for key in self.options:
            if key not in kind.model_fields:
                raise unknown("option of --set", key, kind.model_fields)
        return validate(kind, dict(self.options), "--set")


@dataclass(frozen=True)
class Loss:
    """What is minimised, and figures to draw beside it (detached scalars: a loss per head, top-1 accuracies …)."""

    total: Float[torch.Tensor, ""]
    figures: dict[str, float]


class Recipe(ABC):
    """How one kind of speculator is trained. A new one is a file in this folder and a line in `RECIPES`."""

    name: ClassVar[str]
    """As `foretell train NAME` says it; equal to the catalogue's where there is one such method."""
    network: Speculator
    config: SpeculatorConfig

    @classmethod
    @abstractmethod
    def of(cls, setup: Setup) -> Self:
        """Build it, its network with fresh weights drawn from `setup.seed`.

        Raises:
            ValueError: options that it does not have, or that do not fit the target.
        """

    @property
    def trained(self) -> nn.Module:
        """The module that the trainer wraps, whose parameters it optimises and checkpoints: the network, or something
        around it.
        """
        return self.network

    def save(self, folder: Path) -> None:
        """Write the network as it is now, ready to be decoded with."""
        save(folder, self.network, self.config)

    def runner(self) -> Runner | None:
        """The target that it is measured on, bound to a fresh cache, where the recipe changes it; None: the target as
        it is.
        """
        return None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that batches must bring."""
        return self.network.hidden_layers

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The loss of a batch.

        `network` is `self.trained` as the trainer wrapped it (data parallel, sharded): call nothing but its `forward`.
        """

    @abstractmethod
    def method(self, network: Speculator) -> AnyMethod:
        """How the speculator is decoded with when tokens per pass are measured: greedy, lossless, its default tree."""

    def groups(self) -> Sequence[dict[str, object]]:
        """Parameter groups of the optimizer with learning rates relative to the trainer's (`lr_scale`)."""
        return [{"params": [p for p in self.network.parameters() if p.requires_grad], "lr_scale": 1.0}]

    def state(self) -> State:
        """What the next batches depend on beside weights, buffers, optimizer and the number of the step: training
        checkpoints keep it.
        """
        return {}

    def load_state(self, state: State) -> None:
        """Go on from what `state` gave; the weights may be loaded before or after."""
        return

    def stage(self, progress: float) -> None:
        """Told before every step how much of the training is done (0 to 1); recipes of several stages switch here."""
        return
