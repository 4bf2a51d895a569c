"""What the target's layers make of the texts that it writes, kept for the trainings that will ask for it."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from foretell.context import Step, Text
from foretell.draft.base import Nothing


class Listener(Nothing):
    """Guesses nothing, and holds the target's states at every token of a text until the step after its last one."""

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self._heard: dict[int, tuple[Text, list[list[Float[torch.Tensor, "n d"]]]]] = {}
        self._over: dict[bytes, list[Float[torch.Tensor, "t d"]]] = {}

    def keep(self, step: Step) -> None:
        """Hear what was decided."""
        self._over.clear()
        for i, (row, text) in enumerate(zip(step.context.rows, step.context.texts, strict=True)):
            place = torch.from_numpy(step.output.feature_at[i, list(step.paths[i])])
            states = [f[place.to(f.device)].to("cpu", torch.bfloat16) for f in step.output.features]
            self._heard.setdefault(row, (text, []))[1].append(states)

    def clear(self, row: int) -> None:
        """The row's text is over."""
        text, parts = self._heard.pop(row)
        states = [torch.cat(tap) for tap in zip(*parts, strict=True)]
        # The last token was decided and never read. Nothing follows it that could be guessed from its states.
        missing = text.length - len(states[0])
        self._over[_key(text.tokens)] = [torch.cat([tap, tap[-1:].expand(missing, -1)]) for tap in states]

    def take(self, tokens: Sequence[int]) -> list[Float[torch.Tensor, "t d"]]:
        """The states of a text that ended in this step, bfloat16, one tensor per tap."""
        return self._over[_key(tokens)]


def _key(tokens: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
