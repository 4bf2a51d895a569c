"""How much of a training is done, by its steps or by a budget of processor time, and the learning rate there."""

import math

from foretell.train.loop.settings import TrainingSettings

_MIN_LR_FACTOR = 0.1
"""Share of the learning rate that is left at the end of the cosine schedule."""


class Progress:
    """Counts the steps of a training and their processor time; measurements and checkpoints do not count."""

    def __init__(self, settings: TrainingSettings, num_steps: int) -> None:
        self._settings, self._num_steps = settings, num_steps
        self.step = 0
        """Finished steps."""
        self.cpu_seconds = 0.0
        """Processor time of these steps, of all threads and processes."""

    def add_step(self, cpu_seconds: float) -> None:
        """Count a step."""
        self.step += 1
        self.cpu_seconds += cpu_seconds

    @property
    def finished(self) -> bool:
        """Whether the last step or the end of the budget is reached."""
        return self.step >= self._num_steps or self._spent >= 1

    @property
    def share(self) -> float:
        """The finished share of the training, 0 to 1."""
        return min(1.0, max(self.step / self._num_steps, self._spent))

    @property
    def lr_factor(self) -> float:
        """Share of the learning rate: linear warm-up, then a cosine down to `_MIN_LR_FACTOR` or a constant."""
        s = self._settings
        warm = min(1.0, (self.step + 1) / s.warmup) if s.warmup else 1.0
        if s.schedule == "constant":
            return warm
        done = max(max(self.step - s.warmup, 0) / max(self._num_steps - s.warmup, 1), self._spent)
        return warm * (_MIN_LR_FACTOR + (1 - _MIN_LR_FACTOR) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    @property
    def _spent(self) -> float:
        """Spent share of the budget; 0: there is none."""
        budget = 60 * self._settings.cpu_minutes
        return self.cpu_seconds / budget if budget else 0.0
