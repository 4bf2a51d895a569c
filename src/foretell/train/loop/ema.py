"""Exponential moving average of weights."""

import torch
from torch import nn


class ExponentialMovingAverage:
    """Moving average of a module's trainable parameters.

    The decay of step `n` is at most `(1 + n) / (10 + n)`, so that the initial weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        self.values = {n: p.detach().clone() for n, p in _trainable_parameters(module).items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step number `step`, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, parameter in _trainable_parameters(self._module).items():
            self.values[name].lerp_(parameter.detach(), 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the module's weights."""
        for name, parameter in _trainable_parameters(self._module).items():
            weight = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(weight)


def _trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in module.named_parameters() if p.requires_grad}
