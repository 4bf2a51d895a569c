"""Distilled draft models: some of the target's blocks, trained to give the target's distribution (DistillSpec, arXiv
2310.08461).
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import torch
from jaxtyping import Bool, Float
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from foretell.accept import Match
from foretell.catalogue.options import ChainOptions
from foretell.distributions.divergence import divergences
from foretell.draft import DraftModel
from foretell.engine.method import AnyMethod, Method
from foretell.model.influence import influence
from foretell.shape import Chain
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork, draft_config
from foretell.train.data.batch import Batch
from foretell.train.data.rewrite import Rewriter, Writer
from foretell.train.objective.candidates import candidates
from foretell.train.objective.divergence import Distilled, distil
from foretell.train.recipe.base import Loss, Recipe, Setup, State

_CHUNK = 1024
"""Positions scored at once: logits over the vocabulary are what takes the memory."""


class Options(BaseModel):
    """What `--set` may say about a distilled draft model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(3, ge=1)
    """Blocks that it keeps of the target's."""
    blocks: str = "even"
    """Which: `even` (first, last and evenly between), `influence` (first, last and what changes the residual stream
    most), or numbers: `0,14,29`.
    """
    loss: Literal["forward_kl", "reverse_kl", "jsd", "tvd", "tvd++"] = "forward_kl"
    beta: float = Field(0.5, gt=0, lt=1)
    """Of `jsd`: the target's share in the mixture."""
    temperature: float = Field(1.0, gt=0)
    """Divides both models' logits: the temperature that shall be decoded with."""
    writer: Literal["data", "draft", "target"] = "data"
    """Who writes the answers: the data set as it stands, the draft (on policy), or the target."""
    share: float = Field(0.5, ge=0, le=1)
    """Share of batches whose answers the draft or the target writes anew; the others stay as they are."""
    written: int = Field(64, ge=1)
    """Most tokens that it writes per text."""
    refresh: int = Field(8, ge=1)
    """Batches after which the writing draft takes over the trained weights."""
    earlier: str = ""
    """Directories of drafts trained before, separated by commas: only what none of them finds is learned (SpecInfer's
    boost-tuning).
    """
    candidates: int = Field(2048, ge=0)
    """Tokens that the loss of a batch looks at: the target's likeliest there, and some drawn at random; 0: all that are
    drafted.
    """
    unit: Literal["position", "text"] = "position"
    """What boost-tuning leaves out: positions that an earlier draft masters, or (as published) whole texts all of whose
    positions they master.
    """


class DraftModelRecipe(Recipe):
    """Distils the target into a few of its blocks, at the positions that answers stand at.

    Positions whose answer is no drafted token do not count: in the mean, each then weighs as much as the mass of the
    target that can be drafted.
    """

    name = "draft_model"
    network: DraftNetwork
    config: DraftModelConfig

    def __init__(self, network: DraftNetwork, config: DraftModelConfig, options: Options, setup: Setup) -> None:
        self.network, self.config, self.options = network, config, options
        self._divergence = divergences(options.beta)[options.loss]
        self._kept = _marks(network, setup.ends.vocab)
        folders = [Path(name).expanduser() for name in options.earlier.split(",") if name]
        self._earlier = nn.ModuleList(_frozen(load_speculator(f, setup.card, setup.ends), f) for f in folders)
        self._rewriter = None if options.writer == "data" else _rewriter(options, network, setup)

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """Cut the draft from the target.

        Raises:
            ValueError: options that it does not have, or that do not fit the target.
        """
        options = setup.parse(Options)
        blocks = _chosen(options, setup)
        config = DraftModelConfig(
            target=setup.card,
            draft_vocab=setup.draft_vocab,
            model=draft_config(setup.config, blocks),
            blocks=() if setup.source is None else blocks,
        )
        network = DraftNetwork(config, setup.ends)
        setup.choose(network)
        if setup.source is not None:
            network.init_from_target(setup.source.decoder(torch.float32, blocks), range(len(blocks)))
        else:
            with torch.random.fork_rng():
                torch.manual_seed(setup.seed)
                network.init_random()
        return cls(network, config, options, setup)

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The divergence, averaged over the positions that count."""
        if self._rewriter is not None:
            batch = self._rewriter.batch(batch)
        where = self._where(batch)
        mine, theirs = network(batch.token, where), batch.features[0][where]
        if len(mine) == 0:
            return Loss(mine.sum(), {"acceptance": 0.0, "top 1": 0.0})
        parts = [(len(m), self._distilled(m, t)) for m, t in zip(mine.split(_CHUNK), theirs.split(_CHUNK), strict=True)]
        total = torch.stack([d.loss * n for n, d in parts]).sum() / len(mine)
        figures = {
            "acceptance": sum(d.acceptance * n for n, d in parts) / len(mine),
            "top 1": sum(d.top1 * n for n, d in parts) / len(mine),
        }
        return Loss(total, figures)

    def _distilled(self, mine: Float[torch.Tensor, "k d"], theirs: Float[torch.Tensor, "k d"]) -> Distilled:
        with torch.no_grad():
            warmth, target = self.options.temperature, self.network.teacher_logits(theirs)
            among = candidates(torch.softmax(target / warmth, -1), self.options.candidates)
            if among is not None:
                # What is added to logits here is divided with them.
                among = replace(among, logit_offset=among.logit_offset * warmth)
                target = among.select(target)

        def of(states: torch.Tensor) -> Distilled:
            return distil(target / warmth, self.network.compute_logits(states, among) / warmth, self._divergence)

        # The logits of a chunk are made again for its gradient rather than kept.
        done: Distilled = checkpoint(of, mine, use_reentrant=False)
        return done

    @torch.no_grad()
    def _where(self, batch: Batch) -> Bool[torch.Tensor, "b s"]:
        """Positions whose next token is to be learned, can be drafted, and is beyond the earlier drafts."""
        where = torch.zeros_like(batch.answer)
        where[:, :-1] = batch.wanted(1)
        if self._kept is not None:
            where[:, :-1] &= self._kept.to(where.device)[batch.token[:, 1:]]
        if len(self._earlier):
            where &= missed(self._earlier, self.network, batch, where, self.options.unit)
        return where

    def state(self) -> State:
        """The writer's."""
        return {} if self._rewriter is None else self._rewriter.writer.state()

    def load_state(self, state: State) -> None:
        """Go on writing with the same copy."""
        if self._rewriter is not None:
            self._rewriter.writer.load_state(state)

    def method(self, network: Speculator) -> AnyMethod:
        """A greedy chain of the catalogue's length."""
        assert isinstance(network, DraftNetwork)
        return Method(
            DraftModel(network.to_runner()), Chain(ChainOptions().num_speculative_tokens, draw=False), Match()
        )


@torch.no_grad()
def missed(
    earlier: nn.ModuleList, draft: DraftNetwork, batch: Batch, where: Bool[torch.Tensor, "b s"], unit: str
) -> Bool[torch.Tensor, "b s"]:
    """Of the positions in `where`, those at which no earlier draft's best token is the target's (SpecInfer's
    boost-tuning, arXiv 2305.09781).

    `unit` `text`: all those of a text as soon as one of them is missed, none of a text that is mastered.
    """
    best = draft.teacher_logits(batch.features[0][where]).argmax(-1)
    if draft.token_of is not None:
        best = draft.token_of[best]
    found = torch.zeros_like(best, dtype=torch.bool)
    for network in earlier:
        assert isinstance(network, DraftNetwork)
        guess = network.compute_logits(network(batch.token, where)).argmax(-1)
        found |= best == (guess if network.token_of is None else network.token_of[guess])
    out = torch.zeros_like(where)
    out[where] = ~found
    return where & out.any(1, keepdim=True) if unit == "text" else out


def _chosen(options: Options, setup: Setup) -> tuple[int, ...]:
    """Which of the target's blocks the draft starts as."""
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
        if setup.source is None:
            raise ValueError("--set blocks=influence needs the target's checkpoint, and there is none; use even")
        return _influential(options.layers, setup)
    return spaced(options.layers, most)


def spaced(count: int, layers: int) -> tuple[int, ...]:
    """The first and the last of `layers` blocks, and the others at even distances between; a single one is the
    first.
    """
    return tuple(round(i * (layers - 1) / max(count - 1, 1)) for i in range(count))


def _influential(count: int, setup: Setup) -> tuple[int, ...]:
    """First and last block, and between them those that turn the residual stream most over a text of frequent
    tokens.
    """
    assert setup.source is not None
    some = torch.arange(setup.config.vocab) if setup.kept is None else setup.kept
    generator = torch.Generator().manual_seed(setup.seed)
    text = some[torch.randint(0, len(some), (min(256, setup.config.context),), generator=generator)].tolist()
    turns = influence(setup.decoder, text).block
    inner = sorted(range(1, setup.config.layers - 1), key=lambda i: -turns[i])[: count - 2]
    return (0, *sorted(inner), setup.config.layers - 1)


def _marks(network: DraftNetwork, vocab: int) -> Bool[torch.Tensor, " v"] | None:
    if network.token_of is None:
        return None
    out = torch.zeros(vocab, dtype=torch.bool)
    out[network.token_of.cpu()] = True
    return out


def _frozen(network: Speculator, folder: Path) -> DraftNetwork:
    if not isinstance(network, DraftNetwork):
        raise ValueError(f"{folder}: a speculator of kind {network.kind}; boost-tuning builds on draft models")
    return network.eval().requires_grad_(False)


def _rewriter(options: Options, network: DraftNetwork, setup: Setup) -> Rewriter:
    if setup.source is None:
        raise ValueError(f"--set writer={options.writer} needs the target's checkpoint, and there is none; use data")
    author = Writer(network.to_network, network, options.refresh)
    if options.writer == "target":
        author = Writer(lambda: setup.network or setup.decoder)
    return Rewriter(
        author,
        setup.decoder,
        network.hidden_layers,
        options.share,
        options.written,
        options.temperature,
        setup.config.eos,
    )
