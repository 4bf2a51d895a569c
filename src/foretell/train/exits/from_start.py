"""Training of a decoder from its first step so that tokens may leave it early or read a part of its neurons.

One trainer: a step says which layers its tokens run, after which layers the loss is, and how many neurons there are. A
token that does not run a layer passes its state on, of which deeper layers make its keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import nn

from foretell.draft.skip_decode import LayerBudget
from foretell.model.block.activation import gated
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import FeedForward, RMSNorm, Stream
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.structures import prefix_size
from foretell.model.training.full_forward import full_forward
from foretell.speculator.network.blocks import blank_blocks
from foretell.train.exits.checkpoints import Checkpoints
from foretell.train.exits.descent import Descent, OnStep, ignore_step
from foretell.train.exits.shallow_deep import aligned_distance
from foretell.utils.options import Option

ExitLoss = Literal["none", "uniform", "linear", "layerskip"]
"""Weights of the losses after all layers but the last: 0; 1 (Depth-Adaptive Transformer, aligned); the number of layers
(CALM); LayerSkip's, see `exit_weights`.
"""
Depth = Literal["all", "sampled", "schedule"]
"""Layers that a token runs: all; up to a random one, after which its loss is (Depth-Adaptive Transformer, mixed); by
SkipDecode's budget.
"""
Leave = Callable[[int, Float[torch.Tensor, "b s d"]], Bool[torch.Tensor, "b s"]]
"""`(layers, x)` to the tokens that leave after so many layers, where their states are `x`."""
_INIT_STD = 0.02
_LAYERSKIP_SCALE = 0.2
"""Of the losses of early exits beside the last one (LayerSkip's e_scale)."""


@dataclass(frozen=True)
class FromStartSettings:
    """`widths`: shares of the neurons, of which a step draws one (MatFormer, arXiv 2310.07707). `exits`: layers with an
    early loss; empty: all. With `distillation` the first layers, up to the only exit, learn from deeper ones.
    """

    steps: Annotated[int, Option("Gradient steps.", "N", least=1)] = 1000
    rate: Annotated[float, Option("Largest learning rate.", "X", "--lr", 0)] = 3e-3
    batch: Annotated[int, Option("Tokens of a batch, one piece at least.", "N", "--batch-tokens", 1)] = 2048
    sequence: Annotated[int, Option("Tokens of a piece of text.", "N", least=2)] = 256
    exit_loss: Annotated[
        ExitLoss, Option("Losses after layers before the last: none, uniform, linear in the layer, or LayerSkip's.")
    ] = "none"
    rotate: Annotated[int, Option("A step has the losses of every N-th exit, in turn.", "N", least=1)] = 1
    layer_dropout: Annotated[
        float, Option("Probability that a text skips the last layer; of earlier ones less (LayerSkip).", "P", least=0)
    ] = 0.0
    depth: Annotated[
        Depth, Option("Layers of a token: all, up to a sampled one, or SkipDecode's schedule by position.")
    ] = "all"
    distillation: Annotated[float, Option("Weight of the distance to states of deeper layers; 0: none.", least=0)] = 0.0
    seed: Annotated[int, Option("Seed of weights, batches and draws.", "N", least=0)] = 0
    widths: tuple[float, ...] = (1.0,)
    exits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.layer_dropout < 1:
            raise ValueError(f"--layer-dropout {self.layer_dropout:g}: a probability from 0 to below 1 was expected")
        if not self.widths or not all(0 < w <= 1 for w in self.widths):
            raise ValueError(f"--widths {self.widths}: shares above 0 and at most 1 were expected")
        if self.depth != "all" and (self.exit_loss != "none" or self.layer_dropout):
            raise ValueError(
                f"--depth {self.depth} says itself which layers run and where the loss is; leave out --exit-loss and "
                "--layer-dropout"
            )


class NestedFeedForward(FeedForward):
    """A gated feed-forward network that reads its first `neurons` only; they alone then have a gradient."""

    def __init__(self, dense: FeedForward) -> None:
        super().__init__(dense.gate_up, dense.down, dense.activation)
        self.neurons: int = dense.down.weight.shape[1]

    def forward(self, x: Stream) -> Stream:
        """The network of the first neurons."""
        gate, up = (F.linear(x, part[: self.neurons]) for part in self.gate_up.weight.chunk(2))
        return F.linear(gated(gate, up, self.activation), self.down.weight[:, : self.neurons])


def random_decoder(config: ModelConfig, seed: int) -> Decoder:
    """A float32 decoder of Gaussian numbers with tied embedding; what writes to the residual stream is smaller by the
    square root of twice the layers (GPT-2).
    """
    generator, blocks = torch.Generator().manual_seed(seed), blank_blocks(config)
    for name, parameter in blocks.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=_INIT_STD, generator=generator)
            if name.endswith(("output.weight", "down.weight")):
                parameter.data /= (2 * config.layers) ** 0.5
    embedding = torch.randn(config.vocab, config.hidden, generator=generator) * _INIT_STD
    return Decoder(config, embedding, list(blocks), RMSNorm(torch.ones(config.hidden), config.norm_eps))  # type: ignore[arg-type]


def exit_weights(kind: ExitLoss, layers: int) -> tuple[float, ...]:
    """Weights of the losses after each layer, before they are divided by their sum.

    LayerSkip's (arXiv 2404.16710) rise with the sum of the layers before, and the last one's by all layers more.
    """
    if kind == "layerskip":
        early = [_LAYERSKIP_SCALE * i * (i + 1) / 2 for i in range(layers)]
        return (*early[:-1], layers - 1 + (early[-2] if layers > 1 else 0.0))
    return tuple({"none": float(i == layers), "uniform": 1.0, "linear": float(i)}[kind] for i in range(1, layers + 1))


class DepthLoss(NamedTuple):
    """The cross-entropy in nats, the mean number of layers that a token ran, and the states after each layer."""

    loss: Float[torch.Tensor, ""]
    layers: float
    states: list[Float[torch.Tensor, "b s d"]]


def depth_loss(
    decoder: Decoder,
    tokens: Int[torch.Tensor, "b t"],
    weights: Sequence[float],
    runs: Bool[torch.Tensor, "l b s"] | None = None,
    leave: Leave | None = None,
    learn: Bool[torch.Tensor, "b t"] | None = None,
) -> DepthLoss:
    """The cross-entropy with the text after layers of these weights; `runs`: the layers of every token, where s is 1 or
    t - 1 (None: all). With `leave` a token has one loss, after the layer where it leaves, and runs no layer after it.
    `learn`: tokens whose successors are learned (None: all).
    """
    x, following, states = decoder.embed(tokens[:, :-1]), tokens[:, 1:], list[torch.Tensor]()
    here = torch.ones_like(following, dtype=torch.bool)
    wanted = here if learn is None else learn[:, :-1]
    total, weight, ran, layers = x.new_zeros(()), 0.0, 0.0, decoder.config.layers
    for i in range(layers):
        after = full_forward(decoder, x, i, i + 1)
        mask = here if runs is None else here & runs[i]
        ran += float(mask.expand_as(here).float().mean())
        x = after if runs is None and leave is None else torch.where(mask[..., None], after, x)
        learned, factor = here, weights[i]
        if leave is not None:
            learned = here if i == layers - 1 else here & leave(i + 1, x.detach())
            here, factor = here & ~learned, 1.0
        states.append(x)
        learned = learned & wanted
        if factor and bool(learned.any()):
            logits = decoder.logits(decoder.final_norm(x[learned]))
            total = total + factor * F.cross_entropy(logits, following[learned], reduction="sum")
            weight += factor * int(learned.sum())
    return DepthLoss(total / max(weight, 1.0), ran, states)


def train_from_start(
    decoder: Decoder,
    text: Int[torch.Tensor, " n"],
    settings: FromStartSettings,
    leave: Leave | None = None,
    on_step: OnStep = ignore_step,
    learn: Bool[torch.Tensor, " n"] | None = None,
    blocks_only: bool = False,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Train all weights of a float32 decoder with tied embedding on pieces of a text, in place, or its blocks alone.
    `leave`: tokens leave where it says, and their loss is there alone (ConsistentEE's third stage, arXiv 2312.11882).
    `learn`: tokens whose successors are learned.

    Raises:
        ValueError: the text is shorter than a piece.
    """
    if len(text) <= settings.sequence:
        raise ValueError(f"the text has {len(text)} tokens, and a piece --sequence {settings.sequence} and one more")
    decoder.requires_grad_(False)
    trained = [p for p in decoder.blocks.parameters() if p.is_floating_point()]
    if not blocks_only:
        decoder.embedding = decoder.head.weight = nn.Parameter(decoder.embedding.data)
        trained += [decoder.embedding, *decoder.norm.parameters()]
    dense = [block.mlp for block in decoder.blocks]
    for block in decoder.blocks if settings.widths != (1.0,) else ():
        block.mlp = NestedFeedForward(block.mlp)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        Descent.of_blocks(settings.steps, settings.rate, warm_up=max(1, settings.steps // 20)).run(
            trained, lambda step: _step_loss(decoder, text, settings, step, leave, learn), on_step, checkpoints
        )
    for block, mlp in zip(decoder.blocks, dense, strict=True):
        block.mlp = mlp


def _step_loss(
    decoder: Decoder,
    text: Int[torch.Tensor, " n"],
    settings: FromStartSettings,
    step: int,
    leave: Leave | None,
    learn: Bool[torch.Tensor, " n"] | None,
) -> Float[torch.Tensor, ""]:
    layers, s = decoder.config.layers, settings.sequence
    rows = max(1, settings.batch // s)
    piece = torch.randint(len(text) - s, (rows, 1)) + torch.arange(s + 1)
    runs, learn = None, None if learn is None else learn[piece]
    width = settings.widths[int(torch.randint(len(settings.widths), ()))]
    if settings.widths != (1.0,):
        set_neurons(decoder, width)
    exits = settings.exits or range(1, layers)
    weights = [
        w * (i == layers or (i in exits and (i - 1 - step) % settings.rotate == 0))
        for i, w in enumerate(exit_weights(settings.exit_loss, layers), 1)
    ]
    if settings.layer_dropout:
        dropped = settings.layer_dropout * (2 ** (torch.arange(layers) / max(1, layers - 1)) - 1)
        runs = torch.rand(layers, rows, 1) >= dropped[:, None, None]
    if settings.depth == "sampled":
        last = torch.randint(1, layers + 1, (rows, s))
        leave = lambda i, _: last == i  # noqa: E731
    elif settings.depth == "schedule":
        runs = schedule(layers, s, torch.randint(s, (rows, 1)))
    out = depth_loss(decoder, text[piece], weights, runs, leave, learn)
    if not settings.distillation:
        return out.loss
    wanted = slice(None) if learn is None else learn[:, :-1]
    return out.loss + settings.distillation * aligned_distance([x[wanted] for x in out.states], settings.exits[0])


def schedule(layers: int, length: int, prompt: Int[torch.Tensor, "b 1"]) -> Bool[torch.Tensor, "l b s"]:
    """The layers that texts run whose answers begin after some tokens, by SkipDecode's budget (arXiv 2307.02628): all
    in the prompt, then fewer down to a half over `length` tokens, the first sixth of them always.
    """
    budget = LayerBudget(layers, layers, max(2, layers // 2), max(1, layers // 6), length)
    resumes = torch.from_numpy(budget.resumes_at((torch.arange(length) - prompt).clamp_min(0).numpy()))
    layer = torch.arange(layers)[:, None, None]
    return (layer < budget.warm_up) | (layer >= resumes)


def set_neurons(decoder: Decoder, share: float) -> None:
    """Let a decoder in training read this share of its neurons."""
    for block in decoder.blocks:
        assert isinstance(block.mlp, NestedFeedForward)
        block.mlp.neurons = prefix_size(share, block.mlp.down.weight.shape[1])
