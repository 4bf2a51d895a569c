"""EAGLE's layers: EAGLE-1's regression in feature space (EAGLE-2 uses the same weights), and EAGLE-3's training-time
test.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field
from torch import nn

from foretell.catalogue.feature_level import eagle_method
from foretell.catalogue.options.feature_level import EagleTreeOptions
from foretell.engine.method import AnyMethod
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleConfig, EagleNetwork
from foretell.train.data.batch import Batch
from foretell.train.data.features import parse_hidden_layers
from foretell.train.objective.unrolled import TargetLabels, mean_loss, top1_agreement
from foretell.train.recipe.base import MAX_COUNT, MEASURE_TREE_NODES, LabelledRecipe, LayerOptions, Loss, RecipeSetup
from foretell.train.recipe.init_from_target import init_from_target


def feature_loss(predicted: Float[torch.Tensor, "k d"], feature: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, ""]:
    """Mean smooth L1 distance (Girshick, arXiv 1504.08083) between predicted and true features; 0 for `k = 0`."""
    distance = F.smooth_l1_loss(predicted.float(), feature.float(), reduction="sum")
    return distance / max(1, predicted.numel())


def add_uniform_noise(features: Float[torch.Tensor, "*t d"], half_width: float) -> Float[torch.Tensor, "*t d"]:
    """Features with uniform noise in `-half_width .. half_width`, which makes the drafter robust to its own errors."""
    return features + (torch.rand_like(features) * 2 - 1) * half_width if half_width else features


class EagleTraining(LayerOptions):
    """Options of `--set` for all kinds; sizes default to the target's."""

    positions: int = Field(4096, ge=1)
    """Maximum number of random positions of a batch at which the loss is computed."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a step's loss relative to that of the previous step."""


class UnrolledTraining(EagleTraining):
    """Options of unrolled steps."""

    steps: int = Field(5, ge=1, le=MAX_COUNT)
    """Unrolled steps on the layer's own output."""


class Eagle1Training(UnrolledTraining):
    """Options of EAGLE-1's regression."""

    steps: int = Field(1, ge=1, le=MAX_COUNT)
    """Unrolled steps on the layer's own output; more than one is the harmonised training of HASS (arXiv 2408.15766)."""
    noise: float = Field(0.1, ge=0)
    """Half-width of the uniform noise on the target's features."""
    classify: float = Field(0.1, ge=0)
    """Weight of the loss on tokens relative to the regression."""


class Eagle3LayerTraining(EagleTraining):
    """Options of EAGLE-3's layers."""

    hidden_layers: str = ""
    """Hidden layers to fuse, separated by commas; empty: the paper's three, and the output of the last block."""
    fc_norm: bool = True
    """Normalise each fused state: their scales differ."""
    norm_before_residual: bool = False
    norm_output: bool = False
    """Feed the output back after the final norm, not before (EAGLE-3.1)."""


class Eagle3Training(UnrolledTraining, Eagle3LayerTraining):
    """Options of EAGLE-3's training-time test."""


class EagleRecipe(LabelledRecipe):
    """Trains EAGLE's layers at random positions on the target's distributions."""

    network: EagleNetwork
    config: EagleConfig

    def __init__(self, setup: RecipeSetup, network: EagleNetwork, options: EagleTraining) -> None:
        self.network, self.config, self._embedding_and_head = network, network.config, setup.embedding_and_head
        self._decay, self._hard, self._positions = options.decay, options.hard, options.positions
        self._candidates, self._objective = options.candidates, options.objective
        setup.set_draft_tokens(network)
        init_from_target(network, setup.last_blocks(len(network.layers)), setup.seed)

    @property
    def output_norm(self) -> nn.Parameter | None:
        """EAGLE-3's last norm; EAGLE-1 has none."""
        return self.network.norm.weight if isinstance(self.network, Eagle3) else None

    @abstractmethod
    def prediction_loss(
        self, network: nn.Module, batch: Batch, loss_mask: Bool[torch.Tensor, "b s"], labels: TargetLabels
    ) -> Loss:
        """The loss at the tokens of `loss_mask`."""

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The loss of a batch."""
        loss_mask = sample_positions(batch.loss_mask, self._positions)
        labels = self.target_labels(batch, loss_mask)
        return self.prediction_loss(network, batch, loss_mask, labels.with_candidates(self._candidates))

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily."""
        assert isinstance(network, EagleNetwork)
        return eagle_method(network, EagleTreeOptions(num_draft_tokens=MEASURE_TREE_NODES))


class Eagle3Recipe(EagleRecipe):
    """Training-time test: layers unrolled on their own outputs as in drafting, with the target's distribution at every
    step (Li et al., arXiv 2503.01840).
    """

    name = "eagle3"

    def __init__(self, setup: RecipeSetup, network: EagleNetwork, options: UnrolledTraining) -> None:
        super().__init__(setup, network, options)
        self._steps = options.steps

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build a layer of the size of the target's blocks, on four hidden states."""
        o = setup.parse_options(Eagle3Training)
        config = setup.configuration(EagleConfig, o, **eagle3_values(setup, "eagle3", o))
        return cls(setup, Eagle3(config, setup.embedding_and_head), o)

    def inputs(self, batch: Batch) -> Sequence[Float[torch.Tensor, "b s d"]]:
        """The hidden states that the network reads: those that are fused."""
        return batch.features[: len(self.network.hidden_layers)]

    def wanted(
        self, loss_mask: Bool[torch.Tensor, "b s"], labelled: Sequence[Bool[torch.Tensor, "b t"]]
    ) -> Sequence[Bool[torch.Tensor, "b t"]]:
        """The positions at which each step's outputs are learned: those with a label."""
        return labelled

    def step_loss(
        self,
        token_loss: Float[torch.Tensor, ""],
        state: Float[torch.Tensor, "k d"],
        after: Bool[torch.Tensor, "b s"],
        batch: Batch,
    ) -> tuple[Float[torch.Tensor, ""], dict[str, float]]:
        """The loss of a step from that on tokens and the outputs, which predict the features of the positions `after`;
        and further metrics. Here the loss on tokens.
        """
        return token_loss, {}

    def prediction_loss(
        self, network: nn.Module, batch: Batch, loss_mask: Bool[torch.Tensor, "b s"], labels: TargetLabels
    ) -> Loss:
        """The weighted sum of the losses of all steps."""
        steps = [labels.shifted(1 + i) for i in range(self._steps)]
        masks = self.wanted(loss_mask, [mask for mask, _ in steps])
        outputs = network(batch.token, self.inputs(batch), masks, labels.candidates)
        losses, metrics = list[torch.Tensor](), {"covered": labels.covered}
        for i, (output, mask, (labelled, target)) in enumerate(zip(outputs, masks, steps, strict=True)):
            logits = output.logits[labelled[mask]]
            after = F.pad(mask, (1 + i, 0))[:, : loss_mask.shape[1]]
            token_loss = mean_loss(logits, target, self._hard, self._objective)
            loss, further = self.step_loss(token_loss, output.state, after, batch)
            losses.append(self._decay**i * loss)
            further |= {"top 1": top1_agreement(logits.detach(), target)}
            metrics |= {f"step {i + 1} {name}": value for name, value in further.items()}
        return Loss(torch.stack(losses).sum(), metrics)


class Eagle1Recipe(Eagle3Recipe):
    """Regression onto the target's next feature, and cross-entropy of its logits (Li et al., arXiv 2401.15077)."""

    name = "eagle"

    def __init__(self, setup: RecipeSetup, network: Eagle1, options: Eagle1Training) -> None:
        super().__init__(setup, network, options)
        self._noise, self._classify = options.noise, options.classify

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build a layer of the size of the target's blocks."""
        o = setup.parse_options(Eagle1Training)
        config = setup.configuration(EagleConfig, o, kind="eagle", **setup.layer_values(o))
        return cls(setup, Eagle1(config, setup.embedding_and_head), o)

    def inputs(self, batch: Batch) -> Sequence[Float[torch.Tensor, "b s d"]]:
        """The input of the target's head, with noise."""
        return (add_uniform_noise(self.head_states(batch), self._noise),)

    def wanted(
        self, loss_mask: Bool[torch.Tensor, "b s"], labelled: Sequence[Bool[torch.Tensor, "b t"]]
    ) -> Sequence[Bool[torch.Tensor, "b t"]]:
        """Those before all tokens of `loss_mask`, in the draft vocabulary or not: the regression learns them."""
        return [_shift_mask(loss_mask, 2 + i) for i in range(self._steps)]

    def step_loss(
        self,
        token_loss: Float[torch.Tensor, ""],
        state: Float[torch.Tensor, "k d"],
        after: Bool[torch.Tensor, "b s"],
        batch: Batch,
    ) -> tuple[Float[torch.Tensor, ""], dict[str, float]]:
        """The regression, and the loss on tokens with its weight."""
        regression = feature_loss(state, self.head_states(batch)[after])
        return regression + self._classify * token_loss, {"distance": float(regression.detach())}


def eagle3_values(setup: RecipeSetup, kind: str, options: Eagle3LayerTraining) -> dict[str, Any]:
    """What the configuration of layers on fused hidden states has beside the options."""
    n = setup.card.layers
    given = parse_hidden_layers(options.hidden_layers, n + 1, "--set hidden_layers")
    return setup.layer_values(options) | {"kind": kind, "hidden_layers": given or fused_layers(n)}


def fused_layers(layers: int) -> tuple[int, ...]:
    """The hidden layers of a target with so many blocks that are fused: the paper's three, and the output of the last
    block. Other engines give these, but not the state after the final norm.
    """
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0), layers}))


def sample_positions(mask: Bool[torch.Tensor, "b s"], count: int) -> Bool[torch.Tensor, "b s"]:
    """At most `count` random positions of a mask; torch's global generator is seeded at every step."""
    positions = mask.flatten().nonzero()[:, 0]
    if len(positions) <= count:
        return mask
    drawn = torch.randperm(len(positions))[:count].to(positions.device)
    out = torch.zeros_like(mask)
    out.view(-1)[positions[drawn]] = True
    return out


def _shift_mask(mask: Bool[torch.Tensor, "b s"], shift: int) -> Bool[torch.Tensor, "b t"]:
    """For positions `0 .. s-2`: whether the token `shift` later is to be learned."""
    return F.pad(mask[:, shift:], (0, min(shift, mask.shape[1]) - 1))
