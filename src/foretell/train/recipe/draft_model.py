"""Draft models made of some of the target's blocks, distilled from the target (DistillSpec, arXiv 2310.08461)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, Self

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from foretell.accept import Match
from foretell.catalogue.options.shared import ChainOptions
from foretell.distributions.divergence import divergences
from foretell.draft import DraftModel
from foretell.engine.method import AnyMethod, Method
from foretell.model.offload.influence import measure_influence
from foretell.shape import Chain
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork, draft_config
from foretell.train.data.batch import Batch
from foretell.train.data.regenerate import AnswerGenerator, BatchRegenerator
from foretell.train.objective.candidates import sample_candidates
from foretell.train.objective.distillation import DistillationLoss, distillation_loss
from foretell.train.recipe.base import CandidateOptions, Loss, Recipe, RecipeSetup, TensorDict

_CHUNK = 1024
"""Positions scored at once, which bounds the memory of logits."""
_INFLUENCE_TOKENS = 256
"""Random tokens over which the influence of blocks is measured."""


class DraftModelTraining(CandidateOptions):
    """Options of `--set`."""

    layers: int = Field(3, ge=1)
    """Number of the target's blocks that the draft model keeps."""
    blocks: str = "even"
    """Which blocks: `even` (first, last, and evenly between), `influence` (first, last, and those that change the
    residual stream most), or numbers: `0,14,29`.
    """
    loss: Literal["forward_kl", "reverse_kl", "jsd", "tvd", "tvd++", "nla", "lk_hybrid"] = "forward_kl"
    beta: float = Field(0.5, gt=0, lt=1)
    """Share of the target in the mixture of `jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Divides both models' logits: the temperature of decoding."""
    writer: Literal["data", "draft", "target"] = "data"
    """Source of the answers: the data set, the draft model (on-policy), or the target."""
    share: float = Field(0.5, ge=0, le=1)
    """Share of batches whose answers `writer` generates again."""
    written: int = Field(64, ge=1)
    """Maximum number of generated tokens per answer."""
    refresh: int = Field(8, ge=1)
    """Batches after which the generating copy of the draft model gets the current weights."""
    earlier: str = ""
    """Folders of earlier draft models, separated by commas: only tokens that all of them miss are learned (SpecInfer's
    boost-tuning, arXiv 2305.09781).
    """
    unit: Literal["position", "text"] = "position"
    """What boost-tuning leaves out: positions that an earlier draft model predicts, or (as published) sequences that
    they predict completely.
    """


class DraftModelRecipe(Recipe):
    """Distils the target into a few of its blocks, at the positions of answers.

    Positions whose token is not in the draft vocabulary are left out, so that in expectation a position is weighted by
    the target's probability of the draft vocabulary.
    """

    name = "draft_model"
    network: DraftNetwork
    config: DraftModelConfig

    def __init__(
        self, network: DraftNetwork, config: DraftModelConfig, options: DraftModelTraining, setup: RecipeSetup
    ) -> None:
        self.network, self.config, self.options = network, config, options
        self._divergence = divergences(options.beta)[options.loss]
        self._draftable = _draftable_tokens(network, setup.embedding_and_head.vocab)
        folders = [Path(name).expanduser() for name in options.earlier.split(",") if name]
        self._earlier = nn.ModuleList(
            _frozen_draft(load_speculator(f, setup.card, setup.embedding_and_head), f) for f in folders
        )
        self._regenerator = None if options.writer == "data" else _build_regenerator(options, network, setup)

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Copy the draft model from the target.

        Raises:
            ValueError: unknown options, or values that do not fit the target.
        """
        options = setup.parse_options(DraftModelTraining)
        blocks = select_blocks(options, setup)
        kept = () if setup.checkpoint is None else blocks
        config = setup.configuration(DraftModelConfig, options, model=draft_config(setup.config, blocks), blocks=kept)
        network = DraftNetwork(config, setup.embedding_and_head)
        init_draft(network, setup, blocks)
        return cls(network, config, options, setup)

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The divergence, averaged over the positions to learn."""
        if self._regenerator is not None:
            batch = self._regenerator.regenerate(batch)
        mask = self._loss_positions(batch)
        draft, target = network(batch.token, mask), batch.features[0][mask]
        if len(draft) == 0:
            return Loss(draft.sum(), {"acceptance": 0.0, "top 1": 0.0})
        parts = [(len(d), self._distill(d, t)) for d, t in zip(draft.split(_CHUNK), target.split(_CHUNK), strict=True)]
        total = torch.stack([d.loss * n for n, d in parts]).sum() / len(draft)
        metrics = {
            "acceptance": sum(d.acceptance * n for n, d in parts) / len(draft),
            "top 1": sum(d.top1 * n for n, d in parts) / len(draft),
        }
        return Loss(total, metrics)

    def _distill(
        self, draft_states: Float[torch.Tensor, "k d"], target_states: Float[torch.Tensor, "k d"]
    ) -> DistillationLoss:
        with torch.no_grad():
            temperature, target = self.options.temperature, self.network.teacher_logits(target_states)
            candidates = sample_candidates(target / temperature, self.options.candidates)
            if candidates is not None:
                # The correction is added to logits before they are divided by the temperature.
                candidates = replace(candidates, logit_offset=candidates.logit_offset * temperature)
                target = candidates.select(target)

        def loss_of(states: torch.Tensor) -> DistillationLoss:
            draft = self.network.compute_logits(states, candidates)
            return distillation_loss(target / temperature, draft / temperature, self._divergence)

        # The backward pass computes the logits again instead of keeping them.
        loss: DistillationLoss = checkpoint(loss_of, draft_states, use_reentrant=False)
        return loss

    @torch.no_grad()
    def _loss_positions(self, batch: Batch) -> Bool[torch.Tensor, "b s"]:
        """Positions whose next token is to be learned, in the draft vocabulary, and missed by earlier drafts."""
        mask = torch.zeros_like(batch.loss_mask)
        mask[:, :-1] = batch.loss_mask[:, 1:]
        if self._draftable is not None:
            mask[:, :-1] &= self._draftable.to(mask.device)[batch.token[:, 1:]]
        if len(self._earlier):
            mask &= missed_positions(self._earlier, self.network, batch, mask, self.options.unit)
        return mask

    def state(self) -> TensorDict:
        """The state of the answer generator."""
        return {} if self._regenerator is None else self._regenerator.generator.state()

    def load_state(self, state: TensorDict) -> None:
        """Restore the answer generator."""
        if self._regenerator is not None:
            self._regenerator.generator.load_state(state)

    def method(self, network: Speculator) -> AnyMethod:
        """A greedy chain of the default length."""
        assert isinstance(network, DraftNetwork)
        return Method(
            DraftModel(network.to_runner()), Chain(ChainOptions().num_speculative_tokens, draw=False), Match()
        )


@torch.no_grad()
def missed_positions(
    earlier: nn.ModuleList, draft: DraftNetwork, batch: Batch, mask: Bool[torch.Tensor, "b s"], unit: str
) -> Bool[torch.Tensor, "b s"]:
    """Positions in `mask` at which no earlier draft model has the target's most probable token.

    SpecInfer's boost-tuning (arXiv 2305.09781). `unit` `text`: all positions of every sequence that has such.
    """
    best = draft.teacher_logits(batch.features[0][mask]).argmax(-1)
    if draft.token_of is not None:
        best = draft.token_of[best]
    predicted = torch.zeros_like(best, dtype=torch.bool)
    for network in earlier:
        assert isinstance(network, DraftNetwork)
        guess = network.compute_logits(network(batch.token, mask)).argmax(-1)
        predicted |= best == (guess if network.token_of is None else network.token_of[guess])
    out = torch.zeros_like(mask)
    out[mask] = ~predicted
    return mask & out.any(1, keepdim=True) if unit == "text" else out


def init_draft(network: DraftNetwork, setup: RecipeSetup, blocks: Sequence[int]) -> None:
    """Copy these blocks of the target; without a checkpoint random weights."""
    setup.set_draft_tokens(network)
    if setup.checkpoint is not None:
        network.init_from_target(setup.checkpoint.decoder(torch.float32, blocks), range(len(blocks)))
        return
    with torch.random.fork_rng():
        torch.manual_seed(setup.seed)
        network.init_random()


class BlockOptions(Protocol):
    """Which of the target's blocks a draft model keeps."""

    @property
    def layers(self) -> int: ...  # noqa: D102
    @property
    def blocks(self) -> str: ...  # noqa: D102


def select_blocks(options: BlockOptions, setup: RecipeSetup) -> tuple[int, ...]:
    """Numbers of the target's blocks that the draft model keeps."""
    most = setup.config.layers
    if options.blocks not in ("even", "influence"):
        try:
            return tuple(int(number) for number in options.blocks.split(","))
        except ValueError:
            raise ValueError(
                f"--set blocks={options.blocks}: write even, influence, or numbers such as 0,{most // 2},{most - 1}"
            ) from None
    if options.layers > most:
        raise ValueError(f"--set layers={options.layers}: the target has {most} blocks")
    if options.blocks == "influence" and options.layers > 2:
        if setup.checkpoint is None:
            raise ValueError("--set blocks=influence needs the target's checkpoint, and there is none; use even")
        return _most_influential(options.layers, setup)
    return evenly_spaced(options.layers, most)


def evenly_spaced(count: int, layers: int) -> tuple[int, ...]:
    """The first and the last of `layers` blocks, and others at even distances between; a single one is the first."""
    return tuple(round(i * (layers - 1) / max(count - 1, 1)) for i in range(count))


def _most_influential(count: int, setup: RecipeSetup) -> tuple[int, ...]:
    """The first and the last block, and those between that change the residual stream most on random tokens."""
    assert setup.checkpoint is not None
    vocab = torch.arange(setup.config.vocab) if setup.draft_tokens is None else setup.draft_tokens
    length, generator = min(_INFLUENCE_TOKENS, setup.config.context), torch.Generator().manual_seed(setup.seed)
    tokens = vocab[torch.randint(0, len(vocab), (length,), generator=generator)].tolist()
    change = measure_influence(setup.decoder, tokens).block
    inner = sorted(range(1, setup.config.layers - 1), key=lambda i: -change[i])[: count - 2]
    return (0, *sorted(inner), setup.config.layers - 1)


def _draftable_tokens(network: DraftNetwork, vocab: int) -> Bool[torch.Tensor, " v"] | None:
    if network.token_of is None:
        return None
    out = torch.zeros(vocab, dtype=torch.bool)
    out[network.token_of.cpu()] = True
    return out


def _frozen_draft(network: Speculator, folder: Path) -> DraftNetwork:
    if not isinstance(network, DraftNetwork):
        raise ValueError(f"{folder}: a speculator of kind {network.kind}; boost-tuning builds on draft models")
    return network.eval().requires_grad_(False)


def _build_regenerator(options: DraftModelTraining, network: DraftNetwork, setup: RecipeSetup) -> BatchRegenerator:
    if setup.checkpoint is None:
        raise ValueError(f"--set writer={options.writer} needs the target's checkpoint, and there is none; use data")
    generator = AnswerGenerator(network.to_network, network, options.refresh)
    if options.writer == "target":
        generator = AnswerGenerator(lambda: setup.network or setup.decoder)
    return BatchRegenerator(
        generator,
        setup.decoder,
        network.hidden_layers,
        options.share,
        options.written,
        options.temperature,
        setup.config.eos,
    )
