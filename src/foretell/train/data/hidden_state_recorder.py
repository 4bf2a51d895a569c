"""What the target's layers make of the texts that it writes, kept for the trainings that will ask for it."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.context import StepResult, TokenBuffer
from foretell.draft.base import NoDrafter
from foretell.train.data.features import HiddenStateCache


class HiddenStateRecorder(NoDrafter):
    """Guesses nothing, and holds the target's states at every token of a text, for a shelf, until the step after its
    last one.
    """

    def __init__(self, shelf: HiddenStateCache) -> None:
        self.hidden_layers, self._cache = shelf.hidden_layers, shelf
        self._recorded: dict[int, tuple[TokenBuffer, list[list[Float[torch.Tensor, "n d"]]]]] = {}
        self._finished: dict[bytes, list[Float[torch.Tensor, "t d"]]] = {}

    def observe(self, step: StepResult) -> None:
        """Hear what was decided."""
        self._finished.clear()
        for i, (row, text) in enumerate(zip(step.context.rows, step.context.sequences, strict=True)):
            place = torch.from_numpy(step.output.hidden_index[i, list(step.paths[i])])
            states = [f[place.to(f.device)].to("cpu", torch.bfloat16) for f in step.output.hidden_states]
            self._recorded.setdefault(row, (text, []))[1].append(states)

    def release(self, row: int) -> None:
        """The row's text is over."""
        text, parts = self._recorded.pop(row)
        states = [torch.cat(hidden_layer) for hidden_layer in zip(*parts, strict=True)]
        # The last token was decided and never read. Nothing follows it that could be guessed from its states.
        missing = text.length - len(states[0])
        self._finished[text.tokens.astype(np.int32).tobytes()] = [
            torch.cat([hidden_layer, hidden_layer[-1:].expand(missing, -1)]) for hidden_layer in states
        ]

    def store(self, tokens: Sequence[int]) -> None:
        """Shelve the states of a text that ended in this step: the data set has just got it."""
        text = np.array(tokens, np.int32)
        self._cache.append(text, self._finished[text.tobytes()])
