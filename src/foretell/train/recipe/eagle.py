"""EAGLE's layers: EAGLE-1's regression in feature space (EAGLE-2 uses the same weights), and EAGLE-3's training-time
test.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from foretell.catalogue.feature_level import eagle_method
from foretell.catalogue.options import EagleTreeOptions
from foretell.engine.method import AnyMethod
from foretell.model.config import RopeConfig
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleConfig, EagleNetwork
from foretell.train.data.batch import Batch
from foretell.train.data.features import hidden_layers_of
from foretell.train.objective.regression import feature_distance, noisy
from foretell.train.objective.unrolled import Labels, agreement, labels, soft_cross_entropy, unrolled
from foretell.train.recipe.base import MAX_COUNT, MAX_WIDTH, TREE, Loss, Recipe, Setup
from foretell.train.recipe.start import start


class EagleOptions(BaseModel):
    """What `--set` may say for every kind; sizes unsaid are the target's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(1, ge=1, le=MAX_COUNT)
    ffn: int | None = Field(None, ge=1, le=MAX_WIDTH)
    own_head: bool = False
    positions: int = Field(4096, ge=1)
    """Most positions of a batch that are guessed from, drawn at random."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a step's loss relative to that of the step before."""
    hard: float = Field(0.0, ge=0, le=1)
    """Share of the label that is the target's best token, instead of its distribution."""
    candidates: int = Field(2048, ge=0)
    """Tokens that the loss of a batch looks at: the target's likeliest there, and some drawn at random; 0: all that are
    drafted.
    """


class Eagle1Options(EagleOptions):
    """Of EAGLE-1's regression."""

    steps: int = Field(1, ge=1, le=MAX_COUNT)
    """How often the layer goes on from its own output; more than once is HASS's harmonised training (arXiv
    2408.15766).
    """
    noise: float = Field(0.1, ge=0)
    """Half the width of the uniform noise on the target's features."""
    classify: float = Field(0.1, ge=0)
    """Weight of the cross-entropy beside the regression."""


class Eagle3Options(EagleOptions):
    """Of EAGLE-3's training-time test."""

    steps: int = Field(5, ge=1, le=MAX_COUNT)
    """How often the layer goes on from its own output."""
    hidden_layers: str = ""
    """Hidden states to fuse, separated by commas; unsaid: the paper's three, and what the target's head sees."""
    fc_norm: bool = True
    """A norm for each fused state: their scales differ a lot."""
    norm_before_residual: bool = False


class EagleRecipe(Recipe):
    """Guesses at drawn positions, judged by the target's own distributions."""

    network: EagleNetwork
    config: EagleConfig

    def __init__(self, setup: Setup, network: EagleNetwork, options: EagleOptions) -> None:
        self.network, self.config, self._ends = network, network.config, setup.ends
        self._decay, self._hard, self._positions = options.decay, options.hard, options.positions
        self._candidates = options.candidates
        setup.choose(network)
        blocks = range(max(setup.config.layers - len(network.layers), 0), setup.config.layers)
        start(network, setup.source.decoder(torch.float32, blocks) if setup.source else None, setup.seed)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the network reads, and what the target's head sees, for labels."""
        head, own = self.network.target_info.layers + 1, self.network.hidden_layers
        return own if head in own else (*own, head)

    @abstractmethod
    def judge(self, network: nn.Module, batch: Batch, answer: Bool[torch.Tensor, "b s"], known: Labels) -> Loss:
        """The loss at the tokens of `answer`, given the target's opinions."""

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The loss of a batch."""
        device = batch.token.device
        if self._ends.head.device != device:
            self._ends = replace(self._ends, head=self._ends.head.to(device))
        answer = some(batch.answer, self._positions)
        known = labels(self.seen(batch), batch.token, answer, self._ends, self.network.token_of)
        return self.judge(network, batch, answer, known.narrowed(self._candidates))

    def seen(self, batch: Batch) -> Float[torch.Tensor, "b s d"]:
        """What the target's head sees."""
        return batch.features[self.hidden_layers.index(self.network.target_info.layers + 1)]

    def method(self, network: Speculator) -> AnyMethod:
        """A whole dynamic tree, matched."""
        assert isinstance(network, EagleNetwork)
        return eagle_method(network, EagleTreeOptions(num_draft_tokens=TREE))


class Eagle3Recipe(EagleRecipe):
    """The target's distribution at every step of a draft of several (Li et al., arXiv 2503.01840)."""

    name = "eagle3"

    def __init__(self, setup: Setup, network: Eagle3, options: Eagle3Options) -> None:
        super().__init__(setup, network, options)
        self._steps = options.steps

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """A layer as the target's blocks are, on four of its states."""
        o, n = setup.parse(Eagle3Options), setup.card.layers
        hidden_layers = hidden_layers_of(o.hidden_layers, n + 1, "--set hidden_layers") or (
            min(2, n),
            n // 2,
            max(n - 3, 0),
            n + 1,
        )
        more = {"hidden_layers": hidden_layers, "fc_norm": o.fc_norm, "norm_before_residual": o.norm_before_residual}
        return cls(setup, Eagle3(sizes_of(setup, "eagle3", o, more), setup.ends), o)

    def judge(self, network: nn.Module, batch: Batch, answer: Bool[torch.Tensor, "b s"], known: Labels) -> Loss:
        """The cross-entropy of every step, those of later steps weighted less."""
        asked = [known.after(1 + i) for i in range(self._steps)]
        features = batch.features[: len(self.network.hidden_layers)]
        guesses = network(batch.token, features, [where for where, _ in asked], known.among)
        pairs = [(guess.logits, target) for guess, (_, target) in zip(guesses, asked, strict=True)]
        figures = {f"step {i + 1} top 1": agreement(q.detach(), p) for i, (q, p) in enumerate(pairs)}
        return Loss(unrolled(pairs, self._decay, self._hard), figures | {"covered": known.covered})


class Eagle1Recipe(EagleRecipe):
    """The target's next feature, and what its head makes of it (Li et al., arXiv 2401.15077)."""

    name = "eagle"

    def __init__(self, setup: Setup, network: Eagle1, options: Eagle1Options) -> None:
        super().__init__(setup, network, options)
        self._steps, self._noise, self._classify = options.steps, options.noise, options.classify

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """A layer as the target's blocks are."""
        o = setup.parse(Eagle1Options)
        return cls(setup, Eagle1(sizes_of(setup, "eagle", o, {}), setup.ends), o)

    def judge(self, network: nn.Module, batch: Batch, answer: Bool[torch.Tensor, "b s"], known: Labels) -> Loss:
        """Regression wherever there is an answer, classification where its best token can be drafted."""
        truth = self.seen(batch)
        asked = [_ahead(answer, 2 + i) for i in range(self._steps)]
        guesses = network(batch.token, (noisy(truth, self._noise),), asked, known.among)
        total, figures = truth.new_zeros((), dtype=torch.float32), dict[str, float]()
        for i, (guess, where) in enumerate(zip(guesses, asked, strict=True)):
            labelled, target = known.after(1 + i)
            logits = guess.logits[labelled[where]]
            distance = feature_distance(guess.state, truth[:, 1 + i :][where[:, : truth.shape[1] - 1 - i]])
            total = total + self._decay**i * (
                distance + self._classify * soft_cross_entropy(logits, target, self._hard)
            )
            figures |= {f"step {i + 1} distance": float(distance.detach())}
            figures |= {f"step {i + 1} top 1": agreement(logits.detach(), target)}
        return Loss(total, figures | {"covered": known.covered})


def sizes_of(setup: Setup, kind: str, options: EagleOptions, more: dict[str, Any]) -> EagleConfig:
    """The configuration of a layer that is like the target's."""
    c = setup.config
    values = {
        "kind": kind,
        "target": setup.card,
        "draft_vocab": setup.draft_vocab,
        "own_head": options.own_head,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "ffn": options.ffn or c.ffn,
        "context": c.context,
        "layers": options.layers,
        "norm_eps": c.norm_eps,
        "rope": c.rope or RopeConfig(),
    }
    return EagleConfig.model_validate(values | more)


def some(answer: Bool[torch.Tensor, "b s"], most: int) -> Bool[torch.Tensor, "b s"]:
    """At most so many of the marked places, drawn from torch's own generator, which is seeded anew at every step."""
    places = answer.flatten().nonzero()[:, 0]
    if len(places) <= most:
        return answer
    drawn = torch.randperm(len(places))[:most].to(places.device)
    out = torch.zeros_like(answer)
    out.view(-1)[places[drawn]] = True
    return out


def _ahead(answer: Bool[torch.Tensor, "b s"], shift: int) -> Bool[torch.Tensor, "b t"]:
    """For positions `0 .. s-2`: whether the token `shift` later is to be learned."""
    return F.pad(answer[:, shift:], (0, min(shift, answer.shape[1]) - 1))
