"""Recording of the target's hidden states while it generates answers, so that training need not compute them again."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.context import StepResult, TokenBuffer
from foretell.draft.base import NoDrafter
from foretell.train.data.hidden_state_cache import HiddenStateCache


class HiddenStateRecorder(NoDrafter):
    """A drafter without drafts that records the target's hidden states at every token of a sequence.

    States of a finished sequence stay until the next step; `store` writes them to the cache.
    """

    def __init__(self, cache: HiddenStateCache) -> None:
        self.hidden_layers, self._cache = cache.hidden_layers, cache
        self._recorded: dict[int, tuple[TokenBuffer, list[list[Float[torch.Tensor, "n d"]]]]] = {}
        self._finished: dict[bytes, list[Float[torch.Tensor, "t d"]]] = {}

    def observe(self, step: StepResult) -> None:
        """Record the states of the accepted tokens."""
        self._finished.clear()
        for i, (row, sequence) in enumerate(zip(step.context.rows, step.context.sequences, strict=True)):
            index = torch.from_numpy(step.output.hidden_index[i, list(step.paths[i])])
            states = [f[index.to(f.device)].to("cpu", torch.bfloat16) for f in step.output.hidden_states]
            self._recorded.setdefault(row, (sequence, []))[1].append(states)

    def release(self, row: int) -> None:
        """Keep the states of a finished sequence until the next step."""
        if row not in self._recorded:
            return
        sequence, parts = self._recorded.pop(row)
        states = [torch.cat(layer) for layer in zip(*parts, strict=True)]
        # The target never read the last tokens. Nothing follows them that could be predicted from their states, so
        # copies of the last state stand for them.
        missing = sequence.length - len(states[0])
        self._finished[sequence.tokens.astype(np.int32).tobytes()] = [
            torch.cat([layer, layer[-1:].expand(missing, -1)]) for layer in states
        ]

    def store(self, tokens: Sequence[int]) -> None:
        """Append the states of a sequence that finished in this step and was just added to the data set."""
        array = np.array(tokens, np.int32)
        self._cache.append(array, self._finished[array.tobytes()])
