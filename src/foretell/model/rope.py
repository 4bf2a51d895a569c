"""Rotary position embedding: frequency tables and their application, in the half-split layout of Hugging Face
checkpoints.
"""

import math

import torch
from jaxtyping import Float, Int

from foretell.model.config import RopeConfig

_EMPTY_RANGE = 0.001
"""Width, in dimensions, of an empty YaRN range: avoids a division by zero (as in transformers)."""
RopeTables = tuple[Float[torch.Tensor, "context half"], Float[torch.Tensor, "context half"]]
RopeAngles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every token's angles, `[*t, 1, half]` each."""


def rope_tables(rope: RopeConfig, head_dim: int, context: int) -> RopeTables:
    """Cosine and sine of every position's angles, float32 (Su et al., arXiv 2104.09864).

    Scalings: `linear` divides positions, `llama3` divides low frequencies with a smooth transition, `yarn` is Peng et
    al., arXiv 2309.00071.
    """
    frequency, factor = _frequencies(rope, int(head_dim * rope.fraction))
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float[torch.Tensor, " half"], float]:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = 1.0 / rope.theta**exponent
    if rope.divisors:
        frequency = frequency / torch.tensor(rope.divisors, dtype=torch.float64)
    if rope.kind == "linear":
        return frequency / rope.factor, 1.0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
        smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        between = (1 - smooth) * frequency / rope.factor + smooth * frequency
        scaled = torch.where(wavelength > low, frequency / rope.factor, frequency)
        return torch.where((wavelength <= low) & (wavelength >= high), between, scaled), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequency, head_dim)
    return frequency, 1.0


def _yarn(
    rope: RopeConfig, frequency: Float[torch.Tensor, " half"], head_dim: int
) -> tuple[Float[torch.Tensor, " half"], float]:
    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
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
    """Rotate every head by its token's angles, in float32 or wider; numbers beyond the tables' width pass unchanged."""
    cos, sin = angles
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :width], angles), x[..., width:]), -1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
