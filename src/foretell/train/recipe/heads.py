"""Shared by the recipes of Medusa's and blockwise heads: labels, losses, metrics, and the tree of best paths."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import nn

from foretell.catalogue.heads import heads_method
from foretell.catalogue.options.heads import MedusaOptions
from foretell.engine.method import AnyMethod
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner
from foretell.speculator.hf_writer import llama_config, write_hf
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.heads import HeadsConfig, HeadsNetwork
from foretell.train.data.batch import Batch
from foretell.train.objective.candidates import TargetDistributions
from foretell.train.objective.heads import (
    HeadLabels,
    cross_entropies,
    head_labels,
    label_ranks,
    soft_cross_entropies,
)
from foretell.train.objective.target_head import TargetHead
from foretell.train.recipe.base import (
    MAX_COUNT,
    MAX_WIDTH,
    MEASURE_TREE_NODES,
    CandidateOptions,
    Loss,
    Recipe,
    RecipeSetup,
    TensorDict,
)
from foretell.train.recipe.lora import HeadsWithLoRA
from foretell.train.recipe.path_counts import PathCounts

_TREE_UPDATE_INTERVAL = 8
"""Batches between updates of the tree."""
_TARGET_LOSS_SHARE = 4
"""The target's own loss uses one in so many of the positions."""
_TARGET_LR_SCALE = 0.25
"""Learning rate of the target's adapters relative to that of the heads (Medusa-2, arXiv 2401.10774)."""


class HeadsTraining(CandidateOptions):
    """Options of `--set` for both kinds of heads."""

    heads: int = Field(4, ge=1, le=MAX_COUNT)
    positions: int = Field(1024, ge=1)
    """Random positions of a batch at which the loss is computed."""
    learn: Literal["hard", "soft"] = "hard"
    """Labels: the tokens of the data, or the target's distributions (distillation)."""
    tune: Literal["no", "text", "self"] = "no"
    """Train LoRA adapters of the target: on the tokens of the data, or on its own distributions (self-distillation)."""
    rank: int = Field(32, ge=1, le=MAX_WIDTH)
    """Rank of the adapters."""
    joint_from: float = Field(0.5, ge=0, le=1)
    """Share of the training after which the target is trained, too."""


class HeadsRecipe(Recipe):
    """Trains heads at random positions of every batch, on its tokens or on the target's distributions."""

    network: HeadsNetwork
    config: HeadsConfig

    def __init__(self, setup: RecipeSetup, network: HeadsNetwork, options: HeadsTraining) -> None:
        self.network, self.config, self._options = network, network.config, options
        self._draft_index = setup.draft_index()
        self._draft_head = TargetHead(setup.embedding_and_head, setup.draft_tokens)
        self._target_head = TargetHead(setup.embedding_and_head)
        self._counts, self._batches = PathCounts(), 0
        self._codec, self._checkpoint, self._train_target = setup.codec, setup.checkpoint, False
        self._lora = None if options.tune == "no" else _build_lora(setup, network, options.rank)

    @abstractmethod
    def combine(self, losses: Float[torch.Tensor, " k"]) -> Float[torch.Tensor, ""]:
        """The loss from the losses of all heads."""

    @abstractmethod
    def combine_with_target(
        self, heads: Float[torch.Tensor, ""], target: Float[torch.Tensor, ""]
    ) -> Float[torch.Tensor, ""]:
        """The loss from the heads' combined loss and the target's own loss."""

    @property
    def module(self) -> nn.Module:
        """The heads, and the target's adapters where it is tuned."""
        return self.network if self._lora is None else self._lora

    def parameter_groups(self) -> Sequence[dict[str, object]]:
        """The heads, and the target's adapters with a lower learning rate."""
        heads = {"params": [p for p in self.network.parameters() if p.requires_grad], "lr_scale": 1.0}
        if self._lora is None:
            return [heads]
        return [heads, {"params": list(self._lora.adapters.parameters()), "lr_scale": _TARGET_LR_SCALE}]

    def state(self) -> TensorDict:
        """Counts of rank paths, and the number of batches."""
        counts = {name: torch.from_numpy(array) for name, array in self._counts.state().items()}
        return counts | {"batches": torch.tensor(self._batches)}

    def load_state(self, state: TensorDict) -> None:
        """Restore the counts."""
        self._batches = int(state["batches"])
        self._counts.load_state({name: tensor.numpy() for name, tensor in state.items() if name != "batches"})

    def set_progress(self, progress: float) -> None:
        """Train the heads alone until `joint_from`, then heads and target."""
        self._train_target = self._lora is not None and progress >= self._options.joint_from

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """Cross-entropies of the heads at random positions, plus the target's own loss once the target is tuned."""
        labels, h = self.labels(batch), batch.features[0]
        target = self.target_distributions(labels, h)
        candidates = None if target is None else target.candidates
        if self._lora is None:
            return self.heads_loss(network(h[labels.row, labels.position], candidates), labels, target)
        subset = torch.randperm(len(labels.row))[: self._options.positions // _TARGET_LOSS_SHARE].to(labels.row.device)
        logits, target_logits = network(
            batch.token, h, labels.row, labels.position, subset, self._train_target, candidates
        )
        heads = self.heads_loss(logits, labels, target)
        if not self._train_target:
            return heads
        row, position = labels.row[subset], labels.position[subset]
        mask = batch.loss_mask[row, position + 1]
        if self._options.tune == "self":
            with torch.no_grad():
                p = torch.softmax(self._target_head(h[row, position]), -1)
            losses = (torch.xlogy(p, p) - p * F.log_softmax(target_logits.float(), -1)).sum(-1)
        else:
            losses = F.cross_entropy(target_logits.float(), batch.token[row, position + 1], reduction="none")
        target_loss = (losses * mask).sum() / mask.sum().clamp_min(1)
        metrics = heads.metrics | {"target loss": float(target_loss.detach())}
        return Loss(self.combine_with_target(heads.total, target_loss), metrics)

    def target_runner(self) -> Runner | None:
        """The tuned target."""
        if self._lora is None:
            return None
        assert self._checkpoint is not None
        return DecoderRunner(self._checkpoint.load_network(self._lora.merge))

    def save(self, folder: Path) -> None:
        """Write the heads, and the tuned target into `target/`."""
        super().save(folder)
        if self._lora is not None:
            assert self._checkpoint is not None
            write_hf(folder / "target", self._lora.merge(self._checkpoint.decoder(torch.float32)), self._codec)

    def labels(self, batch: Batch) -> HeadLabels:
        """Random positions of a batch, with the heads' labels."""
        draft_index = None if self._draft_index is None else self._draft_index.to(batch.token.device)
        return head_labels(batch.token, batch.loss_mask, self.network.heads, draft_index, self._options.positions)

    def target_distributions(self, labels: HeadLabels, h: Float[torch.Tensor, "b s d"]) -> TargetDistributions | None:
        """The target's distributions at the labels; None: neither soft labels nor candidates need them."""
        o = self._options
        if o.learn == "hard" and not o.candidates:
            return None
        states = h.flatten(0, 1)
        return TargetDistributions(
            labels.cells(h.shape[1]), labels.token, lambda cell: self._draft_head(states[cell]), o.candidates
        )

    def heads_loss(
        self, logits: Float[torch.Tensor, "n k w"], labels: HeadLabels, target: TargetDistributions | None
    ) -> Loss:
        """The combined loss of all heads."""
        label = labels.token if target is None else target.index(labels.token)
        if target is None or self._options.learn == "hard":
            losses = cross_entropies(logits, label)
        else:
            losses = soft_cross_entropies(logits, target.of(), label >= 0)
        metrics = {f"head {i + 1} loss": x for i, x in enumerate(losses.detach().tolist())}
        ranks = label_ranks(logits.detach(), label)
        self._update_tree(ranks, labels)
        for i in range(self.network.heads):
            known = ranks[labels.known[:, i], i]
            for top in (1, 3):
                metrics[f"head {i + 1} top {top}"] = float((known < top).float().mean()) if len(known) else 0.0
        return Loss(self.combine(losses), metrics)

    def _update_tree(self, ranks: Int[torch.Tensor, "n k"], labels: HeadLabels) -> None:
        """Count the rank paths of the labels; every `_TREE_UPDATE_INTERVAL` batches set the network's best tree."""
        self._counts.add(ranks.cpu().numpy(), labels.known.cpu().numpy())
        self._batches += 1
        if self._batches % _TREE_UPDATE_INTERVAL == 0:
            self.network.set_tree(*self._counts.most_frequent())

    def method(self, network: Speculator) -> AnyMethod:
        """The heads' best tree, verified greedily."""
        assert isinstance(network, HeadsNetwork)
        return heads_method(network, MedusaOptions(num_draft_tokens=2 * MEASURE_TREE_NODES))


def _build_lora(setup: RecipeSetup, network: HeadsNetwork, rank: int) -> HeadsWithLoRA:
    if setup.checkpoint is None:
        raise ValueError("--set tune needs the target's checkpoint, and there is none")
    llama_config(setup.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        return HeadsWithLoRA(network, setup.decoder, rank)
