"""Gradient descent on parameters of exits and of the model's own blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi

import numpy as np
import torch
from jaxtyping import Float

from foretell.model.kernels.instruction_sets import has_bfloat16_units
from foretell.train.exits.checkpoints import Checkpoints

OnStep = Callable[[int, float], None]
"""Gets the number of steps done and the loss."""


def ignore_step(step: int, loss: float) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Descent:
    """`steps` steps of Adam with a learning rate that falls from `rate` to 0.

    Heads are trained with the defaults, blocks of a transformer as `Descent.of_blocks` says.
    """

    steps: int
    rate: float
    warm_up: int = 0
    """Steps until the rate is reached, which then falls along a cosine; 0: it falls linearly."""
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    largest_gradient: float = float("inf")
    """Norm to which the gradient is scaled down."""
    mixed: bool = False
    """Whether the loss is computed in bfloat16 where autocast does so and the processor has units for it."""

    @staticmethod
    def of_blocks(steps: int, rate: float, warm_up: int = 20) -> "Descent":
        """For blocks of a transformer."""
        return Descent(steps, rate, warm_up, decay=0.01, betas=(0.9, 0.95), largest_gradient=1.0, mixed=True)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step; steps begin with 0."""
        done = step / self.steps
        if not self.warm_up:
            return self.rate * (1 - done)
        return self.rate * min(1, (step + 1) / self.warm_up) * 0.5 * (1 + cos(pi * done))

    def run(
        self,
        parameters: Sequence[torch.nn.Parameter],
        loss_of: Callable[[int], Float[torch.Tensor, ""]],
        on_step: OnStep = ignore_step,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Train parameters, in place, on the losses that `loss_of` computes after so many steps; nothing requires a
        gradient before and after. With `checkpoints` a training goes on after the latest one: `on_step` gets the steps
        before it, too, and `loss_of` draws with torch's own generator alone, whose state they hold.

        Raises:
            ValueError: a checkpoint is damaged or of another training, or cannot be written.
            KeyboardInterrupt: `checkpoints.should_stop` returned True; a checkpoint was written.
        """
        for p in parameters:
            p.requires_grad_()
        device = parameters[0].device.type
        mixed = self.mixed and has_bfloat16_units(device)
        optimizer = torch.optim.AdamW(parameters, self.rate, self.betas, weight_decay=self.decay)
        losses = [] if checkpoints is None else checkpoints.resume(optimizer)
        for step, earlier in enumerate(losses, 1):
            on_step(step, earlier)
        for step in range(len(losses), self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.rate_at(step)
            with torch.autocast(device, torch.bfloat16, enabled=mixed):
                loss = loss_of(step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, self.largest_gradient)
            optimizer.step()
            losses.append(loss.item())
            on_step(step + 1, losses[-1])
            if checkpoints is not None:
                checkpoints.after_step(optimizer, losses, step + 1 == self.steps)
        for p in parameters:
            p.requires_grad_(False)


def random_batches(lengths: Sequence[int], num_tokens: int, seed: int) -> Iterator[list[int]]:
    """Indices of texts of these lengths in a random order, without end, in batches of at least `num_tokens` tokens."""
    generator, queue = np.random.default_rng(seed), list[int]()
    while True:
        chosen, tokens = list[int](), 0
        while tokens < num_tokens:
            queue = queue or generator.permutation(len(lengths)).tolist()
            chosen.append(queue.pop())
            tokens += lengths[chosen[-1]]
        yield chosen
