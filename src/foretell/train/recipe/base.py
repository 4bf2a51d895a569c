"""The interface of recipes: the network of a speculator, its loss, and the method that measures it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from pydantic import BaseModel, Field
from torch import nn

from foretell.engine.method import AnyMethod
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.plan import Plan
from foretell.speculator.checkpoint import save
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TargetInfo
from foretell.tokenizer.codec import TextCodec
from foretell.train.data.batch import Batch
from foretell.train.objective.distillation import Objective
from foretell.train.objective.unrolled import TargetLabels, target_labels
from foretell.utils.names import unknown
from foretell.utils.validation import FrozenModel, validate

Options = TypeVar("Options", bound=BaseModel)
Config = TypeVar("Config", bound=SpeculatorConfig)
NewNetwork = TypeVar("NewNetwork", bound=Speculator)
MAX_WIDTH = 1 << 20
"""Largest width of a layer that `--set` accepts."""
MAX_COUNT = 256
"""Largest number of layers, heads or steps that `--set` accepts."""


class RecipeOptions(FrozenModel):
    """Options of `--set`."""


class CandidateOptions(RecipeOptions):
    """Options of recipes with a sampled softmax."""

    candidates: int = Field(2048, ge=0)
    """Size of the sampled softmax: labels, the target's likeliest tokens, and random ones; 0: the whole draft
    vocabulary.
    """


class LabelOptions(CandidateOptions):
    """Options of recipes that learn the target's distributions."""

    hard: float = Field(0.0, ge=0, le=1)
    """Share of the target's most probable token in the label; the rest is its distribution."""
    objective: Objective = "cross_entropy"
    """How the distribution is learned; for decoding at temperature 1 `nla`, `lk_hybrid` or `tvd`, with `hard=0`."""


class LayerOptions(LabelOptions):
    """Options of layers like the target's blocks; sizes default to the target's."""

    layers: int = Field(1, ge=1, le=MAX_COUNT)
    ffn: int | None = Field(None, ge=1, le=MAX_WIDTH)
    own_head: bool = False
    window: int = Field(0, ge=0)
    """Sliding attention window of all layers in tokens; 0: none."""


TensorDict = dict[str, Shaped[torch.Tensor, "*shape"]]

MEASURE_TREE_NODES = 12
"""Draft tokens of the trees that speculators are measured with during training."""


def plain_decoder(network: Network, dtype: torch.dtype) -> Decoder | None:
    """The plain torch decoder behind a network; None: it runs on CPU kernels, or has another dtype."""
    decoder = network.decoder if isinstance(network, GraphedDecoder) else network
    return decoder if isinstance(decoder, Decoder) and decoder.embedding.dtype == dtype else None


@dataclass(frozen=True)
class RecipeSetup:
    """What a recipe is built from: the target and the user's options."""

    card: TargetInfo
    config: ModelConfig
    """Configuration of the target."""
    embedding_and_head: EmbeddingAndHead
    """Of the target, in the dtype of training (bfloat16 or float32)."""
    checkpoint: Checkpoint | None = None
    """The target's checkpoint, for copies that training modifies; None in some tests."""
    draft_tokens: Int[torch.Tensor, " n"] | None = None
    """The draft vocabulary, ascending; None: all tokens."""
    seed: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of `--set`: `--set inner=1024` is `{"inner": "1024"}`."""
    codec: TextCodec | None = None
    """Of the target, for recipes that write a modified target."""
    network: Network | None = None
    """The target as loaded for decoding; None: plain torch."""

    @cached_property
    def decoder(self) -> Decoder:
        """The target in plain torch, in the dtype of `embedding_and_head`; loaded once, shared, not to be modified.

        Raises:
            ValueError: there is no checkpoint.
        """
        plain = None if self.network is None else plain_decoder(self.network, self.embedding_and_head.embedding.dtype)
        if plain is not None:
            return plain
        if self.checkpoint is None:
            raise ValueError("this training needs the target's checkpoint, and there is none")
        return self.checkpoint.decoder(self.embedding_and_head.embedding.dtype)

    @property
    def draft_vocab(self) -> int | None:
        """Size of the draft vocabulary; None: all tokens."""
        return None if self.draft_tokens is None else len(self.draft_tokens)

    def set_draft_tokens(self, network: Speculator) -> None:
        """Set the draft vocabulary of a new network."""
        if self.draft_tokens is not None:
            network.set_draft_vocab(self.draft_tokens)

    def create_network(self, kind: Callable[[Config, EmbeddingAndHead], NewNetwork], config: Config) -> NewNetwork:
        """A new network with weights drawn from the seed, and the draft vocabulary."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = kind(config, self.embedding_and_head)
        self.set_draft_tokens(network)
        return network

    def last_blocks(self, count: int) -> Decoder | None:
        """The target with its last blocks alone, float32, on the CPU, as new networks are; None: there is no
        checkpoint.
        """
        layers, checkpoint = self.config.layers, self.checkpoint
        return checkpoint.decoder(torch.float32, range(max(layers - count, 0), layers)).cpu() if checkpoint else None

    def configuration(self, kind: type[Config], options: RecipeOptions, /, **own: object) -> Config:
        """The configuration of a network: the options that it has by their names, and `own` values.

        Raises:
            ValueError: values that do not fit the target.
        """
        values = {"target": self.card, "draft_vocab": self.draft_vocab}
        return validate(kind, values | options.model_dump(include=set(kind.model_fields)) | own, "--set")

    def layer_values(self, options: LayerOptions) -> dict[str, Any]:
        """What the configuration of layers has of the target's blocks."""
        c = self.config
        return {
            "heads": c.heads,
            "kv_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "ffn": options.ffn or c.ffn,
            "context": c.context,
            "window_layers": tuple(range(options.layers if options.window else 0)),
            "norm_eps": c.norm_eps,
            "rope": c.rope or RopeConfig(),
        }

    def draft_index(self) -> Int[torch.Tensor, " v"] | None:
        """Index of every token of the target in the draft vocabulary, -1 for tokens not in it; None: all tokens are."""
        if self.draft_tokens is None:
            return None
        out = torch.full((self.card.vocab,), -1)
        out[self.draft_tokens.cpu()] = torch.arange(len(self.draft_tokens))
        return out

    def parse_options(self, kind: type[Options]) -> Options:
        """Parse the options into the recipe's model.

        Raises:
            ValueError: an unknown option or an invalid value.
        """
        for key in self.options:
            if key not in kind.model_fields:
                raise unknown("option of --set", key, kind.model_fields)
        return validate(kind, dict(self.options), "--set")


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, and further metrics (detached: loss per head, top-1 accuracy …)."""

    total: Float[torch.Tensor, ""]
    metrics: dict[str, float]


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan to measure with, and the codec and the context of the model that it decodes."""

    plan: Plan
    codec: TextCodec
    context: int


class Recipe(ABC):
    """Training of one kind of speculator. A new recipe is a file in this folder and a line in `RECIPES`."""

    name: ClassVar[str]
    """Name in `foretell train NAME`; that of the method in the catalogue where there is one."""
    network: Speculator
    config: SpeculatorConfig

    @classmethod
    @abstractmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build the recipe and its network, with weights initialised from `setup.seed`.

        Raises:
            ValueError: unknown options, or values that do not fit the target.
        """

    @property
    def module(self) -> nn.Module:
        """The module that the trainer optimises and checkpoints: the network, or a module around it."""
        return self.network

    def usage(self, out: str) -> str:
        """The options that use what is in the folder `out`."""
        return f"--draft-model {out}"

    def save(self, folder: Path) -> None:
        """Write the network as a speculator folder."""
        save(folder, self.network, self.config)

    def target_runner(self) -> Runner | None:
        """The modified target to measure on, with a new KV cache; None: the recipe does not modify the target."""
        return None

    @property
    def measured_plan(self) -> MeasuredPlan | None:
        """The plan whose tokens per pass are measured; None: those of the method alone."""
        return None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states are in `Batch.features`."""
        return self.network.hidden_layers

    @property
    def output_norm(self) -> nn.Parameter | None:
        """The weights before the output head that are scaled to fit the first batch where the network is new; None:
        there are none.
        """
        return None

    @property
    def draft_length(self) -> int:
        """Tokens that it learns to draft in one pass."""
        return 1

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The loss of a batch.

        `network` is `self.module` wrapped for distributed training: only its `forward` may be called.
        """

    @abstractmethod
    def method(self, network: Speculator) -> AnyMethod:
        """The method that measures tokens per pass: greedy, lossless, the default tree."""

    def parameter_groups(self) -> Sequence[dict[str, object]]:
        """Parameter groups of the optimizer; `lr_scale` is relative to the trainer's learning rate."""
        return [{"params": [p for p in self.network.parameters() if p.requires_grad], "lr_scale": 1.0}]

    def state(self) -> TensorDict:
        """Further state for checkpoints, beside weights, buffers, optimizer and step."""
        return {}

    def load_state(self, state: TensorDict) -> None:
        """Restore what `state` returned, before or after the weights are loaded."""
        return

    def set_progress(self, progress: float) -> None:
        """Called before every step with the finished share of the training (0 to 1), for recipes in several phases."""
        return


class LabelledRecipe(Recipe):
    """Learns the target's distributions, from hidden states that include the input of the target's head."""

    _embedding_and_head: EmbeddingAndHead

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The network's hidden layers, and the input of the target's head, for labels."""
        head, own = self.network.target_info.layers + 1, self.network.hidden_layers
        return own if head in own else (*own, head)

    def head_states(self, batch: Batch) -> Float[torch.Tensor, "b s d"]:
        """The input of the target's head."""
        return batch.features[self.hidden_layers.index(self.network.target_info.layers + 1)]

    def target_labels(self, batch: Batch, loss_mask: Bool[torch.Tensor, "b s"]) -> TargetLabels:
        """The target's distributions at the tokens of `loss_mask`."""
        target = self._embedding_and_head
        if target.head.device != batch.token.device:
            target = self._embedding_and_head = replace(target, head=target.head.to(batch.token.device))
        return target_labels(self.head_states(batch), batch.token, loss_mask, target, self.network.token_of)
