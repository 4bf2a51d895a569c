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
from foretell.train.objective.heads import Targets, Told, cross_entropies, ranks, soft_cross_entropies, targets
from foretell.train.objective.teacher import TargetHead
from foretell.train.recipe.base import MAX_COUNT, MAX_WIDTH, TREE, Loss, Recipe, Setup, State
from foretell.train.recipe.tuned import Tuned

_NOTED = 8
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

    def __init__(self, setup: Setup, network: HeadsNetwork, options: HeadsOptions) -> None:
        self.network, self.config, self._options = network, network.config, options
        self._number = setup.draft_index()
        self._teacher, self._target_head = TargetHead(setup.ends, setup.kept), TargetHead(setup.ends)
        self._counts, self._batches = PathCounts(), 0
        self._codec, self._source, self._joint = setup.codec, setup.source, False
        self._tuned = None if options.tune == "no" else _tuned(setup, network, options.rank)

    @abstractmethod
    def total(self, losses: Float[torch.Tensor, " k"]) -> Float[torch.Tensor, ""]:
        """What is minimised, from the loss of every head."""

    @abstractmethod
    def joint(self, heads: Float[torch.Tensor, ""], language: Float[torch.Tensor, ""]) -> Float[torch.Tensor, ""]:
        """What is minimised where the target is tuned too, from the heads' total and the target's own loss."""

    @property
    def trained(self) -> nn.Module:
        """The heads, and the changes to the target where it is tuned."""
        return self.network if self._tuned is None else self._tuned

    def groups(self) -> Sequence[dict[str, object]]:
        """The target's changes learn at a quarter of the heads' rate (Medusa-2)."""
        heads = {"params": [p for p in self.network.parameters() if p.requires_grad], "lr_scale": 1.0}
        if self._tuned is None:
            return [heads]
        return [heads, {"params": list(self._tuned.changes.parameters()), "lr_scale": 0.25}]

    def state(self) -> State:
        """Which paths came true so far, and after how many batches."""
        counts = {name: torch.from_numpy(array) for name, array in self._counts.state().items()}
        return counts | {"batches": torch.tensor(self._batches)}

    def load_state(self, state: State) -> None:
        """Go on counting."""
        self._batches = int(state["batches"])
        self._counts.load_state({name: state[name].numpy() for name in ("paths", "counts", "total")})

    def stage(self, progress: float) -> None:
        """First the heads alone, then both."""
        self._joint = self._tuned is not None and progress >= self._options.joint_from

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """Cross-entropies of the heads at drawn positions; in the joint stage also the target's own."""
        wanted, h = self.wanted(batch), batch.features[0]
        told = self.told(wanted, h)
        among = None if told is None else told.among
        if self._tuned is None:
            return self.judged(network(h[wanted.row, wanted.place], among), wanted, told)
        few = torch.randperm(len(wanted.row))[: self._options.positions // 4].to(wanted.row.device)
        logits, own = network(batch.token, h, wanted.row, wanted.place, few, self._joint, among)
        judged = self.judged(logits, wanted, told)
        if not self._joint:
            return judged
        row, place = wanted.row[few], wanted.place[few]
        learned = batch.answer[row, place + 1]
        if self._options.tune == "self":
            with torch.no_grad():
                distribution = torch.softmax(self._target_head(h[row, place]), -1)
            each = (torch.xlogy(distribution, distribution) - distribution * F.log_softmax(own.float(), -1)).sum(-1)
        else:
            each = F.cross_entropy(own.float(), batch.token[row, place + 1], reduction="none")
        language = (each * learned).sum() / learned.sum().clamp_min(1)
        figures = judged.figures | {"target loss": float(language.detach())}
        return Loss(self.joint(judged.total, language), figures)

    def runner(self) -> Runner | None:
        """The tuned target."""
        if self._tuned is None:
            return None
        assert self._source is not None
        return DecoderRunner(self._source.copy(self._tuned.added))

    def save(self, folder: Path) -> None:
        """Write the heads, and beside them in `target/` the tuned target they belong to."""
        super().save(folder)
        if self._tuned is not None:
            assert self._source is not None
            write_hf(folder / "target", self._tuned.added(self._source.decoder(torch.float32)), self._codec)

    def wanted(self, batch: Batch) -> Targets:
        """The positions, and what is to be guessed there."""
        number = None if self._number is None else self._number.to(batch.token.device)
        return targets(batch.token, batch.answer, self.network.heads, number, self._options.positions)

    def told(self, wanted: Targets, h: Float[torch.Tensor, "b s d"]) -> Told | None:
        """What the target said of the tokens to be guessed, from its states; None where nothing asks for it."""
        o = self._options
        if o.learn == "hard" and not o.candidates:
            return None
        return Told(wanted, h, self._teacher, o.candidates)

    def judged(self, logits: Float[torch.Tensor, "n k w"], wanted: Targets, told: Told | None) -> Loss:
        """The loss of these guesses."""
        token = wanted.token if told is None else told.token(wanted.token)
        if told is None or self._options.learn == "hard":
            losses = cross_entropies(logits, token)
        else:
            losses = soft_cross_entropies(logits, told.distributions, token >= 0)
        figures = {f"head {i + 1} loss": x for i, x in enumerate(losses.detach().tolist())}
        found = ranks(logits.detach(), token)
        self._watch(found, wanted)
        for i in range(self.network.heads):
            places = found[wanted.known[:, i], i]
            for best in (1, 3):
                figures[f"head {i + 1} top {best}"] = float((places < best).float().mean()) if len(places) else 0.0
        return Loss(self.total(losses), figures)

    def _watch(self, found: Int[torch.Tensor, "n k"], wanted: Targets) -> None:
        """Count which paths came true, and note the best tree now and then: it is measured, saved and averaged with the
        weights.
        """
        self._counts.add(found.cpu().numpy(), wanted.known.cpu().numpy())
        self._batches += 1
        if self._batches % _NOTED == 0:
            self.network.set_tree(*self._counts.best())

    def method(self, network: Speculator) -> AnyMethod:
        """A large tree of what was earned, matched."""
        assert isinstance(network, HeadsNetwork)
        return heads_method(network, MedusaOptions(num_draft_tokens=2 * TREE))


def _tuned(setup: Setup, network: HeadsNetwork, rank: int) -> Tuned:
    if setup.source is None:
        raise ValueError("--set tune needs a target of the own decoder, whose weights can be read again")
    llama_config(setup.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        return Tuned(network, setup.decoder, rank)
