"""Rotary position embedding: frequency tables and their application, in the half-split layout of Hugging Face
checkpoints.
"""

import math

import torch
from jaxtyping import Float, Int

from foretell.model.config.rope import RopeConfig

_EMPTY_RANGE = 0.001
"""Width, in dimensions, of an empty YaRN range: avoids a division by zero (as in transformers)."""
RopeTables = tuple[Float[torch.Tensor, "context _"], Float[torch.Tensor, "context _"]]
RopeAngles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every token's angles, `[*t, 1, half]` each."""


def rope_tables(rope: RopeConfig, head_dim: int, context: int, more: int = 0) -> RopeTables:
    """Cosine and sine of the angles of `context + more` positions, float32 (Su et al., arXiv 2104.09864).

    Scalings: `linear` divides positions (arXiv 2306.15595), `dynamic` changes theta by the context, `llama3` divides
    low frequencies with a smooth transition (arXiv 2407.21783), `yarn` is Peng et al., arXiv 2309.00071, `longrope`
    Ding et al., arXiv 2402.13753; `proportional` leaves the last dimensions of a head as they are (Gemma 4).
    """
    frequency, factor = _frequencies(rope, head_dim, context)
    angle = torch.arange(context + more, dtype=torch.float64)[:, None] * frequency
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def _frequencies(rope: RopeConfig, head_dim: int, context: int) -> tuple[Float[torch.Tensor, " half"], float]:
    """Angle of one position in every pair of dimensions, and the factor on cosine and sine."""
    dim = rope.rotary_dim(head_dim)
    theta = _dynamic_theta(rope, dim, context) if rope.kind == "dynamic" else rope.theta
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope.divisors:
        frequency = frequency / torch.tensor(rope.divisors, dtype=torch.float64)
    if rope.kind == "linear":
        return frequency / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequency), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequency, dim)
    if rope.kind == "longrope":
        return _longrope(rope, frequency, context)
    if rope.kind == "proportional":
        rotated = torch.arange(len(frequency)) < int(rope.fraction * head_dim // 2)
        return torch.where(rotated, frequency / rope.factor, 0.0), 1.0
    return frequency, 1.0


def _dynamic_theta(rope: RopeConfig, dim: int, context: int) -> float:
    """NTK-aware theta for texts of this length."""
    length = max(context / rope.original_context, 1.0)
    return float(rope.theta * (rope.factor * length - (rope.factor - 1)) ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, frequency: Float[torch.Tensor, " half"]) -> Float[torch.Tensor, " half"]:
    wavelength = 2 * math.pi / frequency
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    scaled = torch.where(wavelength > low, frequency / rope.factor, frequency)
    if rope.high_freq_factor == rope.low_freq_factor:
        return scaled
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequency / rope.factor + smooth * frequency
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


def _longrope(
    rope: RopeConfig, frequency: Float[torch.Tensor, " half"], context: int
) -> tuple[Float[torch.Tensor, " half"], float]:
    divisors = rope.long_factor if context > rope.original_context else rope.short_factor
    factor = rope.attention_factor
    if factor is None:
        scaled = math.log(max(rope.factor, 1.0)) / math.log(rope.original_context)
        factor = math.sqrt(1 + scaled)
    return frequency / torch.tensor(divisors, dtype=torch.float64), factor


def _yarn(
    rope: RopeConfig, frequency: Float[torch.Tensor, " half"], dim: int
) -> tuple[Float[torch.Tensor, " half"], float]:
    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(len(frequency), dtype=torch.float64) - low) / ((high - low) or _EMPTY_RANGE)).clamp(0, 1)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return frequency / rope.factor * ramp + frequency * (1 - ramp), factor


def rope_angles(table: RopeTables, position: Int[torch.Tensor, "*t"]) -> RopeAngles:
    """Cosine and sine of the angles at these positions."""
    cos, sin = table
    return cos[position].unsqueeze(-2), sin[position].unsqueeze(-2)


def apply_rope(x: Float[torch.Tensor, "*t h e"], angles: RopeAngles) -> Float[torch.Tensor, "*t h e"]:
    """Rotate the first dimensions of every head, twice as many as there are angles, in float32 or wider."""
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
