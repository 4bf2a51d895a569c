"""Decoding: from left to right with a cache, mask-predict, fertilities, and unrolled denoising."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field

from foretell.lab.nat.network import Kind, Memory, NatModel, causal_mask, padding_mask
from foretell.lab.nat.objective import autoregressive_inputs, copied_sources
from foretell.lab.nat.pairs import BEGIN, END, MASK, PAD, UNKNOWN, pad
from foretell.train.objective.masking import lowest
from foretell.utils.options import Option
from foretell.utils.validation import FrozenModel


class DecodeOptions(FrozenModel):
    """How a model decodes; each option is for the kinds that it names, and the others do not read it."""

    iterations: Annotated[int | None, Option("Passes of cmlm, glat and sundae. Default: 4, 1 and 8.", "K")] = Field(
        None, ge=1
    )
    length_candidates: Annotated[int, Option("Lengths decoded side by side (cmlm, glat, sundae).", "L")] = Field(
        3, ge=1
    )
    fertility_samples: Annotated[int, Option("Fertilities decoded side by side; needs --teacher.", "N")] = Field(
        1, ge=1
    )
    """They are drawn, the best ones included; the teacher chooses."""
    update_share: float = Field(0.5, gt=0, le=1)
    """Share of the positions that a step of `sundae` may change."""
    temperature: Annotated[float, Option("Of the tokens that sundae draws; 0: the likeliest.", "T")] = Field(0.0, ge=0)
    seed: Annotated[int, Option("Seed of random numbers.", "N", least=0)] = Field(0, ge=0)

    def iterations_of(self, kind: Kind) -> int:
        """Passes for a kind."""
        return self.iterations or {"cmlm": 4, "sundae": 8}.get(kind, 1)


def options_read(kind: Kind, drafts: bool = False) -> frozenset[str]:
    """The options that a model of this kind reads when it translates, or when it drafts for an autoregressive one."""
    return _READ_BY_DRAFTERS.get(kind, frozenset()) if drafts else _READ[kind]


_ITERATIVE = frozenset({"iterations", "length_candidates"})
_READ: Mapping[Kind, frozenset[str]] = {
    "autoregressive": frozenset(),
    "cmlm": _ITERATIVE,
    "glat": _ITERATIVE,
    "fertility": frozenset({"fertility_samples", "seed"}),
    "sundae": _ITERATIVE | {"update_share", "temperature", "seed"},
}
_READ_BY_DRAFTERS: Mapping[Kind, frozenset[str]] = {
    # The others draft in one pass, with the most probable length.
    "sundae": frozenset({"iterations", "update_share", "temperature", "seed"}),
}


@dataclass(frozen=True)
class Translations:
    """Target tokens per source, without begin and end, and the decoder passes that the batch took."""

    tokens: Sequence[Sequence[int]]
    passes: int


@torch.inference_mode()
def translate(
    model: NatModel, sources: Sequence[Sequence[int]], options: DecodeOptions, teacher: NatModel | None = None
) -> Translations:
    """Translate a batch of sources.

    `teacher`: an autoregressive model that chooses among drawn fertilities (noisy parallel decoding).

    Raises:
        ValueError: a source is longer than the model reads, or fertilities are to be drawn without a teacher.
    """
    longest = max(map(len, sources))
    if longest > model.config.max_source:
        raise ValueError(f"a source has {longest} tokens, and this model reads at most {model.config.max_source}")
    source = pad(sources)
    if model.config.kind == "fertility":
        return _decode_fertility(model, source, options, teacher)
    return _DECODERS[model.config.kind](model, model.encode(source), options)


def _decode_left_to_right(model: NatModel, memory: Memory, options: DecodeOptions) -> Translations:
    """Greedy decoding, one pass per token."""
    rows = len(memory.states)
    out = [list[int]() for _ in range(rows)]
    token, past, passes, open_rows = torch.full((rows, 1), BEGIN), (), 0, set(range(rows))
    while open_rows and passes <= model.config.max_target:
        decoded = model.decode(model.embed(token), memory, None, past)
        past, passes = decoded.keys_values, passes + 1  # type: ignore[assignment]
        token = decoded.logits[:, -1:].argmax(-1)
        for row in list(open_rows):
            new = int(token[row])
            if new == END or len(out[row]) == model.config.max_target:
                open_rows.remove(row)
            else:
                out[row].append(new)
    return Translations(out, passes)


def masked_count(length: Int[torch.Tensor, " b"], iteration: int, iterations: int) -> Int[torch.Tensor, " b"]:
    """Tokens that mask-predict masks before pass `iteration` (from 0): `T (1 - t/K)`, at least 1."""
    return (length * (iterations - iteration) // iterations).clamp(min=1)


def least_confident(
    confidence: Float[torch.Tensor, "b t"], count: Int[torch.Tensor, " b"], real: Bool[torch.Tensor, "b t"]
) -> Bool[torch.Tensor, "b t"]:
    """The `count` positions of the least confidence, padding excluded."""
    return lowest(confidence.masked_fill(~real, float("inf")), count) & real


def _length_candidates(
    model: NatModel, memory: Memory, count: int
) -> tuple[Memory, Int[torch.Tensor, " r"], Bool[torch.Tensor, "r t"]]:
    """Every source as many times as there are candidates, their lengths (best first), and which positions they have."""
    count = min(count, model.config.max_target)
    length = memory.length_logits.topk(count).indices.flatten() + 1
    return memory.repeat(count), length, torch.arange(int(length.max())) < length[:, None]


def _choose(
    token: Int[torch.Tensor, "r t"], score: Float[torch.Tensor, " r"], real: Bool[torch.Tensor, "r t"], rows: int
) -> list[list[int]]:
    """The tokens of the candidate with the highest score, per source."""
    best = score.view(rows, -1).argmax(1) + torch.arange(rows) * (len(token) // rows)
    return [token[i][real[i]].tolist() for i in best.tolist()]


def predict(
    model: NatModel, memory: Memory, token: Int[torch.Tensor, "b t"], length: Int[torch.Tensor, " b"]
) -> Float[torch.Tensor, "b t v"]:
    """Log-probabilities of real tokens at every position, from all positions."""
    logits = model.decode(model.embed(token), memory, padding_mask(length, token.shape[1])).logits
    logits[..., :UNKNOWN] = float("-inf")
    return logits.log_softmax(-1)


def mask_predict(
    model: NatModel,
    memory: Memory,
    length: Int[torch.Tensor, " b"],
    real: Bool[torch.Tensor, "b t"],
    iterations: int,
) -> tuple[Int[torch.Tensor, "b t"], Float[torch.Tensor, "b t"]]:
    """Tokens of given lengths and their log-probabilities, after this number of passes (arXiv 1904.09324).

    A pass predicts the masked tokens; the others keep token and confidence.
    """
    token, confidence = torch.where(real, MASK, PAD), torch.zeros(real.shape)
    masked = real
    for iteration in range(iterations):
        if iteration:
            masked = least_confident(confidence, masked_count(length, iteration, iterations), real)
            token = token.masked_fill(masked, MASK)
        best = predict(model, memory, token, length).max(-1)
        token = torch.where(masked, best.indices, token)
        confidence = torch.where(masked, best.values.to(confidence.dtype), confidence)
    return token, confidence


def _decode_masked(model: NatModel, memory: Memory, options: DecodeOptions) -> Translations:
    """Mask-predict over several lengths; the highest mean log-probability wins."""
    repeated, length, real = _length_candidates(model, memory, options.length_candidates)
    iterations = options.iterations_of(model.config.kind)
    token, confidence = mask_predict(model, repeated, length, real, iterations)
    score = confidence.masked_fill(~real, 0).sum(1) / length
    return Translations(_choose(token, score, real, len(memory.states)), iterations)


def denoise(
    model: NatModel,
    memory: Memory,
    token: Int[torch.Tensor, "b t"],
    length: Int[torch.Tensor, " b"],
    options: DecodeOptions,
) -> tuple[Int[torch.Tensor, "b t"], Float[torch.Tensor, "b t"], int]:
    """Steps of denoising until nothing changes: tokens, their log-probabilities, and passes.

    A step changes the positions whose token it finds least probable, at most `update_share` of them; the first one
    changes all.
    """
    real = torch.arange(token.shape[1]) < length[:, None]
    generator = torch.Generator().manual_seed(options.seed)
    for passes in range(1, options.iterations_of("sundae") + 1):
        probability = predict(model, memory, token, length)
        drawn = probability.argmax(-1)
        if options.temperature:
            weights = (probability / options.temperature).softmax(-1).flatten(0, 1)
            drawn = torch.multinomial(weights, 1, generator=generator).view(token.shape)
        old = probability.gather(-1, token[..., None])[..., 0]
        share = 1.0 if passes == 1 else options.update_share
        open_positions = least_confident(old, (length * share).ceil().long(), real)
        new = torch.where(open_positions, drawn, token)
        done = torch.equal(new, token)
        token = new
        if done:
            break
    return token, probability.gather(-1, token[..., None])[..., 0], passes


def _decode_sundae(model: NatModel, memory: Memory, options: DecodeOptions) -> Translations:
    """Denoising of random tokens, for several lengths."""
    repeated, length, real = _length_candidates(model, memory, options.length_candidates)
    generator = torch.Generator().manual_seed(options.seed)
    noise = torch.randint(UNKNOWN + 1, len(model.config.target), real.shape, generator=generator)
    token, confidence, passes = denoise(model, repeated, torch.where(real, noise, PAD), length, options)
    score = confidence.masked_fill(~real, 0).sum(1) / length
    return Translations(_choose(token, score, real, len(memory.states)), passes)


def _decode_fertility(
    model: NatModel, source: Int[torch.Tensor, "b s"], options: DecodeOptions, teacher: NatModel | None
) -> Translations:
    """One pass over copied sources; of several fertilities the teacher chooses (arXiv 1711.02281)."""
    count = options.fertility_samples
    if count > 1 and (teacher is None or teacher.config.kind != "autoregressive"):
        raise ValueError("several fertilities need an autoregressive teacher that chooses among them; give --teacher")
    assert model.fertility_head is not None
    memory = model.encode(source)
    scores = model.fertility_head(memory.states)
    generator = torch.Generator().manual_seed(options.seed)
    drawn = [scores.argmax(-1)] + [
        torch.multinomial(scores.softmax(-1).flatten(0, 1), 1, generator=generator).view(source.shape)
        for _ in range(count - 1)
    ]
    fertility = (torch.stack(drawn, 1) * (source != PAD)[:, None]).flatten(0, 1)
    # A source without any copy would have no target.
    fertility[fertility.sum(1) == 0, 0] = 1
    length = fertility.sum(1).clamp(max=model.config.max_target)
    width = int(length.max())
    inputs = copied_sources(model, source.repeat_interleave(count, 0), fertility, width)
    logits = model.decode(inputs, memory.repeat(count), padding_mask(length, width)).logits
    logits[..., :UNKNOWN] = float("-inf")
    real = torch.arange(width) < length[:, None]
    token = torch.where(real, logits.argmax(-1), PAD)
    if teacher is None or count == 1:
        return Translations([row[row != PAD].tolist() for row in token[::count]], 1)
    score = sequence_log_probability(teacher, teacher.encode(source).repeat(count), token, length)
    return Translations(_choose(token, score, real, len(source)), 2)


def sequence_log_probability(
    teacher: NatModel, memory: Memory, token: Int[torch.Tensor, "b t"], length: Int[torch.Tensor, " b"]
) -> Float[torch.Tensor, " b"]:
    """The mean log-probability of target and end token under an autoregressive model, in one pass."""
    inputs, label = autoregressive_inputs(token), F.pad(token, (0, 1), value=PAD)
    label[torch.arange(len(label)), length] = END
    probability = teacher.decode(teacher.embed(inputs), memory, causal_mask(inputs.shape[1])).logits.log_softmax(-1)
    of_label = probability.gather(-1, label[..., None])[..., 0]
    return of_label.masked_fill(label == PAD, 0).sum(1) / (length + 1)


_DECODERS: Mapping[Kind, Callable[[NatModel, Memory, DecodeOptions], Translations]] = {
    "autoregressive": _decode_left_to_right,
    "cmlm": _decode_masked,
    "glat": _decode_masked,
    "sundae": _decode_sundae,
}
