"""How much of a training is done, by its steps or by a budget of time, and the learning rate there."""

import math

from foretell.train.loop.settings import TrainingSettings

_MIN_LR_FACTOR = 0.1
"""Share of the learning rate that is left at the end of the cosine schedule."""


class Progress:
    """Counts the steps of a training and their time; measurements and checkpoints count in minutes, and not in
    processor time.
    """

    def __init__(self, settings: TrainingSettings, num_steps: int) -> None:
        self._settings, self._num_steps = settings, num_steps
        self.step = 0
        """Finished steps."""
        self.cpu_seconds = 0.0
        """Processor time of these steps, of all threads and processes."""
        self.seconds = 0.0
        """Time since the first step began."""

    def add_step(self, cpu_seconds: float, seconds: float) -> None:
        """Count a step, which took this processor time and ended so many seconds after the first one began."""
        self.step += 1
        self.cpu_seconds += cpu_seconds
        self.seconds = seconds

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
        """Spent share of the budgets; 0: there is none."""
        s = self._settings
        budgets = (self.cpu_seconds, s.cpu_minutes), (self.seconds, s.minutes)
        return max(spent / (60 * minutes) if minutes else 0.0 for spent, minutes in budgets)
