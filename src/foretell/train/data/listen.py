"""What the target's layers make of the texts that it writes, kept for the trainings that will ask for it."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from foretell.context import Step, Text
from foretell.draft.base import Nothing
from foretell.train.data.features import Shelf


class Listener(Nothing):
    """Guesses nothing, and holds the target's states at every token of a text, for a shelf, until the step after its last one."""

    def __init__(self, shelf: Shelf) -> None:
        self.taps, self._shelf = shelf.taps, shelf
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
        self._over[text.tokens.astype(np.int32).tobytes()] = [
            torch.cat([tap, tap[-1:].expand(missing, -1)]) for tap in states
        ]

    def store(self, tokens: Sequence[int]) -> None:
        """Shelve the states of a text that ended in this step: the data set has just got it."""
        text = np.array(tokens, np.int32)
        self._shelf.append(text, self._over[text.tobytes()])
