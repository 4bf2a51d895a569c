"""What a drafter may look at before a step, and what it is told after one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.core.tree import TokenTree


class TokenBuffer:
    """The decided tokens of one request, prompt first; grows in place so that looking at it never copies."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self._buffer = np.zeros(max(64, 2 * len(prompt)), np.int64)
        self._buffer[: self.length] = prompt

    @property
    def tokens(self) -> Int[np.ndarray, " t"]:
        """All tokens, as a view."""
        return self._buffer[: self.length]

    @property
    def generated(self) -> Int[np.ndarray, " t"]:
        """Tokens after the prompt, as a view."""
        return self._buffer[self.prompt_length : self.length]

    def prefix(self, length: int) -> "TokenBuffer":
        """The text as it stood at an earlier length."""
        out = TokenBuffer(())
        out.prompt_length, out.length = min(self.prompt_length, length), length
        out._buffer = self._buffer[:length]
        return out

    def append(self, tokens: Sequence[int]) -> None:
        """Add decided tokens."""
        end = self.length + len(tokens)
        if end > len(self._buffer):
            grown = np.zeros(2 * end, np.int64)
            grown[: self.length] = self.tokens
            self._buffer = grown
        self._buffer[self.length : end] = tokens
        self.length = end


@dataclass(frozen=True)
class Context:
    """The `b` texts that a step continues.

    `rows[i]` names text `i` for its whole life; stateful parts index their memory by it.
    """

    rows: tuple[int, ...]
    sequences: tuple[TokenBuffer, ...]
    sampling_params: tuple[SamplingParams, ...]
    rngs: tuple[CounterRNG, ...]
    max_depth: Int[np.ndarray, " b"]
    """Deepest draft worth making per text: tokens still wanted after the next one."""

    @property
    def last_tokens(self) -> list[int]:
        """The last decided token of every text: the roots."""
        return [int(t.tokens[-1]) for t in self.sequences]

    def select(self, indices: Sequence[int]) -> "Context":
        """The context of these texts only, in this order."""
        if tuple(indices) == tuple(range(len(self.rows))):
            return self
        return Context(
            rows=tuple(self.rows[i] for i in indices),
            sequences=tuple(self.sequences[i] for i in indices),
            sampling_params=tuple(self.sampling_params[i] for i in indices),
            rngs=tuple(self.rngs[i] for i in indices),
            max_depth=self.max_depth[list(indices)],
        )


@dataclass(frozen=True)
class ModelOutput:
    """What one pass of a model gave for the nodes it was asked about.

    `at[i, j]` is the row of `logits` for node `j` of text `i`, -1 where none was computed. `features` holds one tensor
    per tapped layer, with a row for every node read: `feature_at` maps as `at` does.
    """

    logits: Float[torch.Tensor, "k v"]
    logit_index: Int[np.ndarray, "b n"]
    hidden_states: tuple[Float[torch.Tensor, "t d"], ...] = ()
    hidden_index: Int[np.ndarray, "b n"] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    experts: tuple[int, ...] = ()
    """Distinct experts that the pass read in each mixture-of-experts layer."""


@dataclass(frozen=True)
class StepResult:
    """What happened to the texts of `context`, which already hold the new tokens.

    `paths[i]` lists the nodes of `tree` that were kept for text `i`, trunk included; `decided[i]` the tokens that the
    step added.
    """

    context: Context
    tree: TokenTree
    output: ModelOutput
    paths: tuple[tuple[int, ...], ...]
    new_tokens: tuple[tuple[int, ...], ...]
    start_positions: tuple[int, ...]
    """How many tokens of each text the target had read before the step: the position of node 0."""
    draft_seconds: float = 0.0
    """What proposing the trees took."""
    pass_seconds: float = 0.0
    """What the target's pass took, with accepting and keeping."""
