"""DFlash: blocks at random anchors of the target's own answers, in one pass without unrolling."""

from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field
from torch import nn

from foretell.catalogue.one_pass import dflash_method
from foretell.catalogue.options.feature_level import DFlashOptions
from foretell.engine.method import AnyMethod
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.cached_layers import EXTRA_POSITIONS
from foretell.speculator.network.corrections import DominoConfig, RefinerConfig, SelectorConfig
from foretell.speculator.network.dflash import BlockPredictions, DFlash, DFlashConfig
from foretell.speculator.network.lattice import LatticeConfig
from foretell.train.data.batch import Batch
from foretell.train.data.features import parse_hidden_layers
from foretell.train.objective.block import Weighting, block_loss, confidence_loss, place_losses, sample_blocks
from foretell.train.objective.unrolled import top1_agreement
from foretell.train.recipe.base import (
    MAX_COUNT,
    MAX_WIDTH,
    MEASURE_TREE_NODES,
    LabelledRecipe,
    LayerOptions,
    Loss,
    RecipeSetup,
)
from foretell.train.recipe.init_from_target import init_dflash_from_target

CORRECTIONS = {
    "": None,
    "selector": SelectorConfig(),
    "domino": DominoConfig(inner=256),
    "refiner": RefinerConfig(rank=64),
    "lattice": LatticeConfig(width=128, heads=4, factors=64),
}
"""Heads by name; the published sizes are for targets ten times as wide."""
CANDIDATE_WEIGHTS = {"selector": (1.0, 0.0), "lattice": (0.25, 0.25)}
"""Weights of what heads that choose among candidates learn beside the loss of the slots: the cross-entropy of the right
token, and the expected difference of the target's logits between it and the choice.
"""


class DFlashTraining(LayerOptions):
    """Options of `--set`; sizes default to the target's."""

    layers: int = Field(2, ge=1, le=MAX_COUNT)
    block_size: int = Field(8, ge=2, le=EXTRA_POSITIONS)
    """Slots of a block: the anchor and masks."""
    predicts_from_anchor: bool = False
    """The anchor's slot predicts a token too, as in DSpark."""
    hidden_layers: str = ""
    """Hidden layers to fuse, separated by commas; empty: five, evenly."""
    fc_norm: bool = False
    """Normalise each fused state, for which published formats have no place."""
    mask_token: int | None = None
    """Token that fills the slots of a block; unset: a learned vector."""
    markov_rank: int = Field(128, ge=0, le=MAX_WIDTH)
    """Rank of the bias that a draft token gives to the next one (DSpark); 0: none, as in DFlash."""
    confidence: bool = False
    """Train a confidence head (DSpark), which weights the nodes of draft trees."""
    convolution: bool = False
    """Mix neighbouring slots in every layer (two taps, DFlash-2); such layers do not run on the CPU kernels."""
    correction: Literal["", "selector", "domino", "refiner", "lattice"] = ""
    """Train a head that corrects a slot by the tokens before it: DFlash-2's, Domino's, XPress's or LiLiCorr's."""
    uncorrected: float = Field(0.6, ge=0)
    """Weight of the loss before that correction beside the loss after it (XPress)."""
    qk_norm: bool = True
    """Normalise queries and keys per head, as published formats of DFlash do."""
    window: int = Field(0, ge=0)
    """Sliding attention window of all layers in tokens, counted back from every slot; 0: none."""
    causal: bool = False
    """Let slots attend to no later slots (JetSpec); its loss is `weighting=uniform` with `hard=0`."""
    anchors: int = Field(64, ge=1)
    """Maximum number of random blocks per text of a batch."""
    weighting: Weighting = "dpace"
    """Weights of the places of a block: `dpace`, DFlash's `decay`, or JetSpec's `uniform`."""
    hard: float = Field(0.3, ge=0, le=1)


class DFlashRecipe(LabelledRecipe):
    """Cross-entropy at all places of random blocks with D-PACE's weights (arXiv 2602.06036, 2605.18810)."""

    name = "dflash"
    network: DFlash
    config: DFlashConfig

    def __init__(self, setup: RecipeSetup, network: DFlash, options: DFlashTraining) -> None:
        self.network, self.config, self.options = network, network.config, options
        self._embedding_and_head = setup.embedding_and_head
        setup.set_draft_tokens(network)
        init_dflash_from_target(network, setup.last_blocks(len(network.layers)), setup.seed)

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build layers of the size of the target's blocks."""
        o = setup.parse_options(DFlashTraining)
        config = setup.configuration(DFlashConfig, o, **_config_values(setup, o))
        return cls(setup, DFlash(config, setup.embedding_and_head), o)

    @property
    def output_norm(self) -> nn.Parameter:
        """The last norm."""
        return self.network.norm.weight

    @property
    def draft_length(self) -> int:
        """Tokens that it learns to draft in one pass."""
        return self.network.depth

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The loss of blocks at random anchors."""
        o, depth = self.options, self.network.depth
        labels = self.target_labels(batch, batch.loss_mask)
        anchor, row = sample_blocks(labels, o.anchors, depth)
        labels, wanted = labels.with_candidates(o.candidates), row >= 0
        features = batch.features[: len(self.network.hidden_layers)]
        expected = labels.logits[row[wanted]]
        predictions: BlockPredictions = network(
            batch.token, features, anchor, wanted, labels.candidates, expected.argmax(-1)
        )
        loss, right = self._losses(predictions, expected)
        total = block_loss(loss, right, wanted, o.weighting, self.config.block_size)
        place = wanted.nonzero()[:, -1]
        metrics = {
            f"place {i + 1} top 1": top1_agreement(predictions.logits.detach()[place == i], expected[place == i])
            for i in range(depth)
        }
        if predictions.confidence is not None:
            confidence = confidence_loss(predictions.confidence, predictions.logits, expected)
            total, metrics = total + confidence, metrics | {"confidence": float(confidence.detach())}
        return Loss(total, metrics | {"covered": labels.covered})

    def _losses(
        self, predictions: BlockPredictions, expected: Float[torch.Tensor, "k w"]
    ) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, " k"]]:
        """The losses at all places, and the probabilities of the target's most probable tokens. A selector and a
        lattice learn to tell the right token among their candidates, beside the loss of the slots alone (DFlash-2,
        LiLiCorr).
        """
        o, uncorrected = self.options, predictions.uncorrected
        if uncorrected is None:
            return place_losses(predictions.logits, expected, o.hard, o.objective)
        alone, right = place_losses(uncorrected, expected, o.hard, o.objective)
        if predictions.candidates is not None and self.config.correction is not None:
            log_q = predictions.candidates.scores.log_softmax(-1)
            logits = expected.gather(1, predictions.candidates.index)
            difference = (log_q.exp() * (logits[:, :1] - logits)).sum(-1)
            weight, weight_of_difference = CANDIDATE_WEIGHTS[self.config.correction.kind]
            return alone - weight * log_q[:, 0] + weight_of_difference * difference, right
        corrected, right = place_losses(predictions.logits, expected, o.hard, o.objective)
        return corrected + o.uncorrected * alone, right

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily."""
        assert isinstance(network, DFlash)
        return dflash_method(network, DFlashOptions(num_draft_tokens=MEASURE_TREE_NODES))


def _config_values(setup: RecipeSetup, o: DFlashTraining) -> dict[str, Any]:
    window = o.window or setup.config.context + EXTRA_POSITIONS
    every = {"window": window, "window_layers": tuple(range(o.layers)), "window_causal": True}
    return {
        **setup.layer_values(o),
        **(every if o.causal else {}),
        "hidden_layers": parse_hidden_layers(o.hidden_layers, setup.card.layers + 1, "--set hidden_layers"),
        "correction": CORRECTIONS[o.correction],
    }
