"""What the recipes of Medusa's and of blockwise heads share: positions, tokens to guess, figures, and the tree that is
earned on the way.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from foretell.catalogue.heads import heads_method
from foretell.catalogue.options import MedusaOptions
from foretell.engine.method import AnyMethod
from foretell.model.runner import DecoderRunner, Runner
from foretell.shape import PathCounts
from foretell.speculator.hf_writer import llama_config, write_hf
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.heads import HeadsConfig, HeadsNetwork
from foretell.train.data.batch import Batch
from foretell.train.objective.heads import HeadLabels, TargetDistributions, cross_entropies, label_ranks, soft_cross_entropies, head_labels
from foretell.train.objective.target_head import TargetHead
from foretell.train.recipe.base import MAX_COUNT, MAX_WIDTH, MEASURE_TREE_NODES, Loss, Recipe, RecipeSetup, State
from foretell.train.recipe.lora import HeadsWithLoRA

_TREE_UPDATE_INTERVAL = 8
"""Batches from one note of the tree to the next."""


class HeadsOptions(BaseModel):
    """What `--set` may say for both kinds: positions and labels, and tuning the target together with its heads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int = Field(4, ge=1, le=MAX_COUNT)
    positions: int = Field(1024, ge=1)
    """Positions of a batch that the loss is computed at, drawn at random."""
    learn: Literal["hard", "soft"] = "hard"
    """From the tokens of the text, or from the target's distributions over them (distillation)."""
    candidates: int = Field(2048, ge=0)
    """Tokens that the loss of a batch looks at: those that come, the target's likeliest, and some drawn at random; 0:
    all that are drafted.
    """
    tune: Literal["no", "text", "self"] = "no"
    """Change the target too: to say the tokens of the text, or to keep its own distributions (self-distillation)."""
    rank: int = Field(32, ge=1, le=MAX_WIDTH)
    """Of the changes to its matrices."""
    joint_from: float = Field(0.5, ge=0, le=1)
    """Part of the training after which the target learns too."""


class HeadsRecipe(Recipe):
    """Trains heads at some positions of every batch, from tokens or (`soft`) from the target's own distributions over
    them.
    """

    network: HeadsNetwork
    config: HeadsConfig

    def __init__(self, setup: RecipeSetup, network: HeadsNetwork, options: HeadsOptions) -> None:
        self.network, self.config, self._options = network, network.config, options
        self._draft_index = setup.draft_index()
        self._teacher, self._target_head = TargetHead(setup.embedding_and_head, setup.draft_tokens), TargetHead(setup.embedding_and_head)
        self._counts, self._batches = PathCounts(), 0
        self._codec, self._source, self._train_target = setup.codec, setup.checkpoint, False
        self._lora = None if options.tune == "no" else _build_lora(setup, network, options.rank)

    @abstractmethod
    def combine(self, losses: Float[torch.Tensor, " k"]) -> Float[torch.Tensor, ""]:
        """What is minimised, from the loss of every head."""

    @abstractmethod
    def combine_with_target(self, heads: Float[torch.Tensor, ""], language: Float[torch.Tensor, ""]) -> Float[torch.Tensor, ""]:
        """What is minimised where the target is tuned too, from the heads' total and the target's own loss."""

    @property
    def module(self) -> nn.Module:
        """The heads, and the changes to the target where it is tuned."""
        return self.network if self._lora is None else self._lora

    def parameter_groups(self) -> Sequence[dict[str, object]]:
        """The target's changes learn at a quarter of the heads' rate (Medusa-2)."""
        heads = {"params": [p for p in self.network.parameters() if p.requires_grad], "lr_scale": 1.0}
        if self._lora is None:
            return [heads]
        return [heads, {"params": list(self._lora.adapters.parameters()), "lr_scale": 0.25}]

    def state(self) -> State:
        """Which paths came true so far, and after how many batches."""
        counts = {name: torch.from_numpy(array) for name, array in self._counts.state().items()}
        return counts | {"batches": torch.tensor(self._batches)}

    def load_state(self, state: State) -> None:
        """Go on counting."""
        self._batches = int(state["batches"])
        self._counts.load_state({name: state[name].numpy() for name in ("paths", "counts", "total")})

    def set_progress(self, progress: float) -> None:
        """First the heads alone, then both."""
        self._train_target = self._lora is not None and progress >= self._options.joint_from

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """Cross-entropies of the heads at drawn positions; in the joint stage also the target's own."""
        wanted, h = self.labels(batch), batch.features[0]
        told = self.target_distributions(wanted, h)
        among = None if told is None else told.candidates
        if self._lora is None:
            return self.heads_loss(network(h[wanted.row, wanted.position], among), wanted, told)
        few = torch.randperm(len(wanted.row))[: self._options.positions // 4].to(wanted.row.device)
        logits, own = network(batch.token, h, wanted.row, wanted.position, few, self._train_target, among)
        judged = self.heads_loss(logits, wanted, told)
        if not self._train_target:
            return judged
        row, place = wanted.row[few], wanted.position[few]
        learned = batch.loss_mask[row, place + 1]
        if self._options.tune == "self":
            with torch.no_grad():
                distribution = torch.softmax(self._target_head(h[row, place]), -1)
            each = (torch.xlogy(distribution, distribution) - distribution * F.log_softmax(own.float(), -1)).sum(-1)
        else:
            each = F.cross_entropy(own.float(), batch.token[row, place + 1], reduction="none")
        language = (each * learned).sum() / learned.sum().clamp_min(1)
        figures = judged.metrics | {"target loss": float(language.detach())}
        return Loss(self.combine_with_target(judged.total, language), figures)

    def target_runner(self) -> Runner | None:
        """The tuned target."""
        if self._lora is None:
            return None
        assert self._source is not None
        return DecoderRunner(self._source.copy(self._lora.merge))

    def save(self, folder: Path) -> None:
        """Write the heads, and beside them in `target/` the tuned target they belong to."""
        super().save(folder)
        if self._lora is not None:
            assert self._source is not None
            write_hf(folder / "target", self._lora.merge(self._source.decoder(torch.float32)), self._codec)

    def labels(self, batch: Batch) -> HeadLabels:
        """The positions, and what is to be guessed there."""
        number = None if self._draft_index is None else self._draft_index.to(batch.token.device)
        return head_labels(batch.token, batch.loss_mask, self.network.heads, number, self._options.positions)

    def target_distributions(self, wanted: HeadLabels, h: Float[torch.Tensor, "b s d"]) -> TargetDistributions | None:
        """What the target said of the tokens to be guessed, from its states; None where nothing asks for it."""
        o = self._options
        if o.learn == "hard" and not o.candidates:
            return None
        return TargetDistributions(wanted, h, self._teacher, o.candidates)

    def heads_loss(self, logits: Float[torch.Tensor, "n k w"], labels: HeadLabels, target: TargetDistributions | None) -> Loss:
        """The loss of these guesses."""
        token = labels.token if target is None else target.candidate_index(labels.token)
        if target is None or self._options.learn == "hard":
            losses = cross_entropies(logits, token)
        else:
            losses = soft_cross_entropies(logits, target.distributions, token >= 0)
        figures = {f"head {i + 1} loss": x for i, x in enumerate(losses.detach().tolist())}
        found = label_ranks(logits.detach(), token)
        self._update_tree(found, labels)
        for i in range(self.network.heads):
            places = found[labels.known[:, i], i]
            for best in (1, 3):
                figures[f"head {i + 1} top {best}"] = float((places < best).float().mean()) if len(places) else 0.0
        return Loss(self.combine(losses), figures)

    def _update_tree(self, found: Int[torch.Tensor, "n k"], labels: HeadLabels) -> None:
        """Count which paths came true, and note the best tree now and then: it is measured, saved and averaged with the
        weights.
        """
        self._counts.add(found.cpu().numpy(), labels.known.cpu().numpy())
        self._batches += 1
        if self._batches % _TREE_UPDATE_INTERVAL == 0:
            self.network.earn(*self._counts.best())

    def method(self, network: Speculator) -> AnyMethod:
        """A large tree of what was earned, matched."""
        assert isinstance(network, HeadsNetwork)
        return heads_method(network, MedusaOptions(num_draft_tokens=2 * MEASURE_TREE_NODES))


def _build_lora(setup: RecipeSetup, network: HeadsNetwork, rank: int) -> HeadsWithLoRA:
    if setup.checkpoint is None:
        raise ValueError("--set tune needs a target of the own decoder, whose weights can be read again")
    llama_config(setup.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        return HeadsWithLoRA(network, setup.decoder, rank)
