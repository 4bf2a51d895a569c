"""Training of a model whose first layers shall answer alone: FREE (arXiv 2310.05424).

The model itself changes: its first layers learn from its text and from its deeper layers, and the deep ones go along.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.model.block.decoder import Decoder
from foretell.model.training.full_forward import full_forward
from foretell.train.data.dataset import Document
from foretell.train.exits.descent import Descent, OnStep, ignore_step, random_batches
from foretell.utils.options import Option


@dataclass(frozen=True)
class ShallowDeepSettings:
    """`layer`: after so many layers the shallow model ends. `longest`: tokens of a text."""

    layer: int
    steps: Annotated[int, Option("Gradient steps.", least=1)] = 100
    rate: Annotated[float, Option("Largest learning rate.", name="--lr", least=0)] = 1e-4
    distillation: Annotated[float, Option("Weight of the distance to states of deeper layers; 0: none.", least=0)] = 0.5
    batch: Annotated[int, Option("Tokens of a batch, prompts included.", name="--batch-tokens", least=1)] = 1024
    seed: Annotated[int, Option("Seed of data and batches.")] = 0
    longest: int = 512

    def check(self, layers: int) -> None:
        """Check that a model of so many layers can be split.

        Raises:
            ValueError: the shallow model has none of the layers, or all.
        """
        if not 1 <= self.layer < layers:
            raise ValueError(f"--layer {self.layer}: the model has {layers} layers; give 1 to {layers - 1}")


@dataclass(frozen=True)
class ShallowQuality:
    """`agreement`: share of tokens at which the shallow model gives the whole model's token, over `tokens`."""

    agreement: float
    tokens: int


def train_shallow_deep(
    decoder: Decoder,
    documents: Sequence[Document],
    settings: ShallowDeepSettings,
    on_step: OnStep = ignore_step,
) -> None:
    """Train the blocks of a float32 decoder, in place; embedding, final norm and head stay. `on_step` gets the step and
    the loss.

    The loss is the cross-entropy of both models with the text, weighted by their layers, and the distillation.

    Raises:
        ValueError: see `ShallowDeepSettings.check`; or no document has a token to learn.
    """
    settings.check(decoder.config.layers)
    decoder.requires_grad_(False)
    batches = _batches(documents, settings)
    Descent.of_blocks(settings.steps, settings.rate, warm_up=10).run(
        [p for p in decoder.blocks.parameters() if p.is_floating_point()],
        lambda: shallow_deep_loss(decoder, *next(batches), settings),
        on_step,
    )


def shallow_deep_loss(
    decoder: Decoder,
    tokens: Int[torch.Tensor, "b s"],
    mask: Bool[torch.Tensor, "b s"],
    settings: ShallowDeepSettings,
) -> Float[torch.Tensor, ""]:
    """The loss of a batch; `mask`: positions whose successors are to be learned."""
    shallow, layers = settings.layer, decoder.config.layers
    states = _layer_states(decoder, tokens, mask)
    following = tokens.roll(-1, 1)[mask]
    losses = [
        F.cross_entropy(decoder.logits(decoder.final_norm(states[depth - 1])), following) for depth in (shallow, layers)
    ]
    loss = (shallow * losses[0] + layers * losses[1]) / (shallow + layers)
    if not settings.distillation:
        return loss
    teachers = torch.stack([states[layer - 1].detach() for layer in teacher_layers(shallow, layers)]).float()
    students = torch.stack(states[:shallow]).float()
    errors = torch.stack([(teacher - students).square().mean((1, 2)) for teacher in teachers])
    pairs = align_layers(errors.detach())
    return loss + settings.distillation * torch.stack([errors[t, s] for t, s in pairs]).mean()


def teacher_layers(shallow: int, layers: int) -> list[int]:
    """The layers whose outputs the shallow ones learn from, counted from 1: as many as these, in equal distances."""
    return [round(i * layers / shallow) for i in range(1, shallow + 1)]


def align_layers(errors: Float[torch.Tensor, "t s"]) -> list[tuple[int, int]]:
    """Pairs of a teacher and a student, counted from 0: from the last teacher on, the student of the smallest error
    among those before the last one that was taken; teachers that no student is left for have none.
    """
    pairs, free = list[tuple[int, int]](), errors.shape[1]
    for teacher in reversed(range(len(errors))):
        if free == 0:
            break
        free = int(errors[teacher, :free].argmin())
        pairs.append((teacher, free))
    return pairs[::-1]


@torch.no_grad()
def shallow_quality(decoder: Decoder, documents: Sequence[Document], layer: int) -> ShallowQuality:
    """How often the first layers of a decoder, with its own norm and head, give the whole decoder's token."""
    same = count = 0
    for document in documents:
        batch = _pad([document], ShallowDeepSettings.longest)
        if batch is None:
            continue
        states = _layer_states(decoder, *batch)
        best = [decoder.logits(decoder.final_norm(states[i])).argmax(-1) for i in (layer - 1, -1)]
        same += int((best[0] == best[1]).sum())
        count += len(best[0])
    return ShallowQuality(same / max(1, count), count)


def _layer_states(
    decoder: Decoder, tokens: Int[torch.Tensor, "b s"], mask: Bool[torch.Tensor, "b s"]
) -> list[Float[torch.Tensor, "t d"]]:
    """The outputs of every layer at the marked positions."""
    x, out = decoder.embed(tokens), list[torch.Tensor]()
    for i in range(decoder.config.layers):
        x = full_forward(decoder, x, i, i + 1)
        out.append(x[mask])
    return out


def _pad(
    documents: Sequence[Document], longest: int
) -> tuple[Int[torch.Tensor, "b s"], Bool[torch.Tensor, "b s"]] | None:
    """Documents padded at the end, and the positions whose successors are to be learned; None: there is none."""
    parts = [(document.tokens[:longest], max(document.start - 1, 0)) for document in documents]
    parts = [(tokens, first) for tokens, first in parts if len(tokens) > first + 1]
    if not parts:
        return None
    tokens = torch.zeros(len(parts), max(len(part) for part, _ in parts), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (part, first) in enumerate(parts):
        tokens[row, : len(part)] = torch.from_numpy(part.astype(np.int64))
        mask[row, first : len(part) - 1] = True
    return tokens, mask


def _batches(
    documents: Sequence[Document], settings: ShallowDeepSettings
) -> Iterator[tuple[Int[torch.Tensor, "b s"], Bool[torch.Tensor, "b s"]]]:
    """Batches of documents in a random order, without end."""
    usable = [d for d in documents if min(len(d.tokens), settings.longest) > max(d.start - 1, 0) + 1]
    if not usable:
        raise ValueError("the data set has no answer of more than a few tokens; make one with foretell data generate")
    lengths = [min(len(d.tokens), settings.longest) for d in usable]
    for chosen in random_batches(lengths, settings.batch, settings.seed):
        batch = _pad([usable[i] for i in chosen], settings.longest)
        assert batch is not None
        yield batch
