"""The losses of all kinds of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.lab.nat.network import Kind, Memory, NatModel, causal_mask, padding_mask
from foretell.lab.nat.pairs import BEGIN, END, MASK, PAD, UNKNOWN
from foretell.train.objective.masking import draw_masks, lowest

_GLANCING = 0.5, 0.3
"""Share of the distance that GLAT reveals, at the start and at the end of training."""


@dataclass(frozen=True)
class PairBatch:
    """Padded sources and targets, without begin and end tokens."""

    source: Int[torch.Tensor, "b s"]
    target: Int[torch.Tensor, "b t"]
    length: Int[torch.Tensor, " b"]
    """Tokens of every target."""
    fertility: Int[torch.Tensor, "b s"] | None = None
    """Target tokens of every source token, for the kind `fertility`."""
    progress: float = 0.0
    """Finished share of the training."""
    smoothing: float = 0.1
    """Label smoothing."""

    @property
    def real(self) -> Bool[torch.Tensor, "b t"]:
        """True where the target is no padding."""
        return self.target != PAD


def loss_of(model: NatModel, batch: PairBatch) -> Float[torch.Tensor, ""]:
    """The loss of a batch; random numbers are torch's default ones."""
    memory = model.encode(batch.source)
    loss = _LOSSES[model.config.kind](model, memory, batch)
    if model.config.kind in ("autoregressive", "fertility"):
        return loss
    return loss + F.cross_entropy(memory.length_logits, batch.length - 1)


def autoregressive_inputs(target: Int[torch.Tensor, "b t"]) -> Int[torch.Tensor, "b u"]:
    """The begin token, then the target."""
    inputs: torch.Tensor = F.pad(target, (1, 0), value=BEGIN)
    return inputs


def _autoregressive(model: NatModel, memory: Memory, batch: PairBatch) -> Float[torch.Tensor, ""]:
    """Cross-entropy of the next token, the end token included."""
    inputs = autoregressive_inputs(batch.target)
    label = F.pad(batch.target, (0, 1), value=PAD)
    label[torch.arange(len(label)), batch.length] = END
    logits = model.decode(model.embed(inputs), memory, causal_mask(inputs.shape[1])).logits
    return _cross_entropy(logits, label, label != PAD, batch.smoothing)


def _cmlm(model: NatModel, memory: Memory, batch: PairBatch) -> Float[torch.Tensor, ""]:
    """Cross-entropy of masked tokens from the others (conditional masked language model, arXiv 1904.09324)."""
    masked = draw_masks(batch.real)
    logits = _decode_all(model, memory, batch, batch.target.masked_fill(masked, MASK))
    return _cross_entropy(logits, batch.target, masked, batch.smoothing)


def glance(
    target: Int[torch.Tensor, "b t"], predicted: Int[torch.Tensor, "b t"], share: float
) -> Bool[torch.Tensor, "b t"]:
    """Positions to reveal: random ones, per row `share` times the number of wrong predictions."""
    real = target != PAD
    wrong = ((predicted != target) & real).sum(1)
    score = torch.rand(target.shape).masked_fill(~real, 2.0)
    return lowest(score, (share * wrong).round().long())


def _glat(model: NatModel, memory: Memory, batch: PairBatch) -> Float[torch.Tensor, ""]:
    """Glancing (Qian et al., arXiv 2008.07905): the more a first pass got wrong, the more of the target the second pass
    is shown; cross-entropy of what it is not shown.
    """
    blank = batch.target.masked_fill(batch.real, MASK)
    with torch.no_grad():
        predicted = _decode_all(model, memory, batch, blank).argmax(-1)
    first, last = _GLANCING
    shown = glance(batch.target, predicted, first + (last - first) * batch.progress)
    logits = _decode_all(model, memory, batch, torch.where(shown, batch.target, blank))
    return _cross_entropy(logits, batch.target, batch.real & ~shown, batch.smoothing)


def corrupt(target: Int[torch.Tensor, "b t"], vocab: int) -> Int[torch.Tensor, "b t"]:
    """Replace every token by a uniform random one, with a probability that is uniform per row."""
    noise = torch.randint(UNKNOWN + 1, vocab, target.shape)
    replaced = (torch.rand(target.shape) < torch.rand(len(target), 1)) & (target != PAD)
    corrupted: torch.Tensor = torch.where(replaced, noise, target)
    return corrupted


def _sundae(model: NatModel, memory: Memory, batch: PairBatch) -> Float[torch.Tensor, ""]:
    """Step-unrolled denoising (Savinov et al., arXiv 2112.06749): the loss of a corrupted target, and of what the model
    makes of it; no gradient flows through the sample.
    """
    first = _decode_all(model, memory, batch, corrupt(batch.target, len(model.config.target)))
    with torch.no_grad():
        sampled = torch.multinomial(first.softmax(-1).flatten(0, 1), 1).view(batch.target.shape)
    second = _decode_all(model, memory, batch, torch.where(batch.real, sampled, PAD))
    both = (_cross_entropy(logits, batch.target, batch.real, batch.smoothing) for logits in (first, second))
    return torch.stack(list(both)).mean()


def _fertility(model: NatModel, memory: Memory, batch: PairBatch) -> Float[torch.Tensor, ""]:
    """Cross-entropy of the tokens, given the true fertilities, and of the fertilities."""
    assert batch.fertility is not None and model.fertility_head is not None
    inputs = copied_sources(model, batch.source, batch.fertility, batch.target.shape[1])
    logits = model.decode(inputs, memory, padding_mask(batch.length, inputs.shape[1])).logits
    real = batch.source != PAD
    fertility = F.cross_entropy(model.fertility_head(memory.states[real]), batch.fertility[real])
    return _cross_entropy(logits, batch.target, batch.real, batch.smoothing) + fertility


def copied_sources(
    model: NatModel, source: Int[torch.Tensor, "b s"], fertility: Int[torch.Tensor, "b s"], width: int
) -> Float[torch.Tensor, "b t d"]:
    """Embeddings of source tokens, each as often as its fertility says, padded to `width`."""
    rows = [s.repeat_interleave(f)[:width] for s, f in zip(source, fertility, strict=True)]
    padded = torch.stack([F.pad(row, (0, width - len(row)), value=PAD) for row in rows])
    out: torch.Tensor = model.source_embedding(padded)
    return out


def _decode_all(
    model: NatModel, memory: Memory, batch: PairBatch, token: Int[torch.Tensor, "b t"]
) -> Float[torch.Tensor, "b t v"]:
    """Logits at every position, from all positions."""
    return model.decode(model.embed(token), memory, padding_mask(batch.length, token.shape[1])).logits


def _cross_entropy(
    logits: Float[torch.Tensor, "b t v"],
    label: Int[torch.Tensor, "b t"],
    where: Bool[torch.Tensor, "b t"],
    smoothing: float,
) -> Float[torch.Tensor, ""]:
    """The mean over the positions in `where`."""
    if not where.any():
        return logits.sum() * 0
    return F.cross_entropy(logits[where], label[where], label_smoothing=smoothing)


_LOSSES: Mapping[Kind, Callable[[NatModel, Memory, PairBatch], torch.Tensor]] = {
    "autoregressive": _autoregressive,
    "cmlm": _cmlm,
    "glat": _glat,
    "fertility": _fertility,
    "sundae": _sundae,
}
KINDS = tuple(_LOSSES)
