"""Integers with a scale per group of inputs: what a directory in the format of compressed-tensors holds."""

import torch

from foretell.lab.quantize.grid import Grid, Groups, Importance, Parameters, Scales

Tensor = torch.Tensor


class IntegerGrid(Grid):
    """Signed integers of some bits; a zero point per group unless `symmetric`. Scales have a dtype of 16 bits."""

    groups = 1

    def __init__(self, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self.bits, self.block, self.symmetric, self.dtype = bits, group, symmetric, dtype
        self.name = f"int{bits} in groups of {group}"
        self.low, self.high, self.has_offset = -(1 << (bits - 1)), (1 << (bits - 1)) - 1, not symmetric

    def fit(self, weight: Groups, importance: Importance = None) -> tuple[Scales, Scales]:
        """The scale that covers all weights, and with zero points also zero."""
        if self.symmetric:
            scale = weight.abs().amax(-1) / ((self.high - self.low) / 2)
            return scale, torch.zeros_like(scale)
        least = weight.amin(-1).clamp(max=0)
        scale = (weight.amax(-1).clamp(min=0) - least) / (self.high - self.low)
        return scale, least - self.low * scale

    def store(self, scale: Scales, offset: Scales) -> Parameters:
        """Round scales to 16 bits, and offsets to a zero point times the scale."""
        stored = scale.to(self.dtype)
        wide = stored.float()
        zero = torch.where(wide == 0, 0, -offset / wide).round().clamp(self.low, self.high)
        if self.symmetric:
            zero = torch.zeros_like(zero)
        return Parameters(wide, -(wide * zero), (stored[..., 0], zero[..., 0].to(torch.int32)))
