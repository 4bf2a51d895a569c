"""The state of the requests before a step, and the result of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.draft_origins import DraftOrigins
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.core.token_rules import TokenRules
from foretell.core.tree import TokenTree, TreeBounds

T = TypeVar("T")


class TokenBuffer:
    """Prompt and generated tokens of one request; grows in place, so that reading it never copies."""

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
    def last_token(self) -> int:
        """The newest token."""
        return int(self._buffer[self.length - 1])

    @property
    def generated(self) -> Int[np.ndarray, " t"]:
        """Tokens after the prompt, as a view."""
        return self._buffer[self.prompt_length : self.length]

    def prefix(self, length: int) -> "TokenBuffer":
        """The sequence as it was at an earlier length, as a view."""
        out = TokenBuffer(())
        out.prompt_length, out.length = min(self.prompt_length, length), length
        out._buffer = self._buffer[:length]
        return out

    def append(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""
        end = self.length + len(tokens)
        if end > len(self._buffer):
            grown = np.zeros(2 * end, np.int64)
            grown[: self.length] = self.tokens
            self._buffer = grown
        self._buffer[self.length : end] = tokens
        self.length = end


def common_prefix(a: Int[np.ndarray, " s"], b: Int[np.ndarray, " t"]) -> int:
    """Number of tokens at their beginning that two sequences share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@dataclass(frozen=True)
class Context:
    """The `b` requests of a step.

    `rows[i]`: the engine's row of request `i`, the same in all of its steps; parts with state index it by this number.
    """

    rows: tuple[int, ...]
    sequences: tuple[TokenBuffer, ...]
    sampling_params: tuple[SamplingParams, ...]
    rngs: tuple[CounterRNG, ...]
    max_depth: Int[np.ndarray, " b"]
    """Greatest useful depth of drafts per request: the tokens it may still get after the next one."""
    coupled: bool = False
    """Whether the acceptor keeps the drafts that the target samples itself, so that drafters may know its noise."""
    rules: tuple[TokenRules | None, ...] = ()
    """Which tokens may follow, per request; empty: no request has rules."""
    max_drafts: tuple[int | None, ...] = ()
    """Greatest number of drafted tokens per request; None: no limit. Empty: no limit for any."""
    least_score: float = 0.0
    """Least score of a draft that is worth its place in the pass."""
    least_expanded: float = 0.0
    """Least score of a draft below which further ones are worth drafting."""
    origins: DraftOrigins | None = None
    """Where the parts of a method record what they draft; None: no request asks."""
    cache_salts: tuple[str, ...] = ()
    """Per request: what drafters learn from it serves only requests of the same salt. Empty: all have the empty one."""
    kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """What the parts of a method keep of this step until they observe it; see `StepState`."""

    @property
    def last_tokens(self) -> list[int]:
        """The last token of every sequence: the roots of the drafts."""
        return [t.last_token for t in self.sequences]

    def limited(self, depths: Sequence[int], coupled: bool, least: TreeBounds = (0.0, 0.0)) -> "Context":
        """The same requests with other greatest depths and least scores, for an acceptor that is `coupled` or not; no
        drafts lie deeper than their greatest number allows.
        """
        if self.max_drafts:
            pairs = zip(depths, self.max_drafts, strict=True)
            depths = [depth if most is None else min(depth, most) for depth, most in pairs]
        score, expanded = least
        depth = np.array(depths, np.int64)
        return replace(self, max_depth=depth, coupled=coupled, least_score=score, least_expanded=expanded)

    def select(self, indices: Sequence[int]) -> "Context":
        """The context of these requests only, in this order."""
        if tuple(indices) == tuple(range(len(self.rows))):
            return self
        return Context(
            rows=tuple(self.rows[i] for i in indices),
            sequences=tuple(self.sequences[i] for i in indices),
            sampling_params=tuple(self.sampling_params[i] for i in indices),
            rngs=tuple(self.rngs[i] for i in indices),
            max_depth=self.max_depth[list(indices)],
            coupled=self.coupled,
            rules=tuple(self.rules[i] for i in indices) if self.rules else (),
            max_drafts=tuple(self.max_drafts[i] for i in indices) if self.max_drafts else (),
            least_score=self.least_score,
            least_expanded=self.least_expanded,
            origins=self.origins,
            cache_salts=tuple(self.cache_salts[i] for i in indices) if self.cache_salts else (),
            kept=self.kept,
        )


class StepState(Generic[T]):
    """What a drafter or shape knows of a step between its drafts and `observe`.

    The value lies in the step's context, not in the part: a step that fails takes it along, so that what a later step
    observes is its own.
    """

    def put(self, context: Context, value: T) -> None:
        """Keep a value for the step of this context, or of a part of it; it replaces another one."""
        context.kept[self] = value

    def of(self, context: Context, default: T) -> T:
        """The value that was kept for the step; `default`: none was, as the part did not draft."""
        value: T = context.kept.get(self, default)
        return value


@dataclass(frozen=True)
class ModelOutput:
    """Output of one forward pass.

    `logits[logit_index[i, j]]` are the logits at node `j` of request `i`; an index of -1: none were computed.
    `hidden_states` holds one tensor per requested layer, with a row for every node read, indexed by `hidden_index` in
    the same way.
    """

    logits: Float[torch.Tensor, "k v"]
    logit_index: Int[np.ndarray, "b n"]
    hidden_states: tuple[Float[torch.Tensor, "t d"], ...] = ()
    hidden_index: Int[np.ndarray, "b n"] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    experts: tuple[int, ...] = ()
    """Distinct experts that the pass read in each mixture-of-experts layer."""
    argmax: Int[np.ndarray, " k"] | None = None
    """Index of the largest of every row of logits, the lowest of equals; None: the pass did not compute it."""
    sampled: Int[np.ndarray, "b n"] | None = None
    """The token that the target samples after every node, -1 where none may follow and -2 where the pass sampled none;
    None: it sampled nowhere.
    """
    routes: tuple[Int[np.ndarray, "t e"], ...] = ()
    """Experts of every node read, in each mixture-of-experts layer, indexed by `hidden_index`; empty where nodes were
    read in several parts.
    """


def count_experts(routes: Sequence[Int[np.ndarray, "t e"]]) -> tuple[int, ...]:
    """Number of distinct experts per layer."""
    return tuple(len(set(layer.ravel().tolist())) for layer in routes)


@dataclass(frozen=True)
class StepResult:
    """Result of a step; the sequences of `context` already hold the new tokens.

    `paths[i]`: the nodes of `tree` whose keys and values were kept for request `i`, its prefix included.
    `new_tokens[i]`: the tokens that the step added.
    """

    context: Context
    tree: TokenTree
    output: ModelOutput
    paths: tuple[tuple[int, ...], ...]
    new_tokens: tuple[tuple[int, ...], ...]
    start_positions: tuple[int, ...]
    """Tokens of each sequence that were in the target's cache before the step: the position of node 0."""
    drafting: bool = True
    """False: the method is not asked for drafts for now, so what only its next drafts need may be left out."""
    budgeted: bool = False
    """Whether the budget chooses the requests that the method drafts for: what only drafts of a request need may wait
    until it is asked for.
    """

    def select(self, indices: Sequence[int]) -> "StepResult":
        """The part of these requests, in this order."""
        if tuple(indices) == tuple(range(len(self.paths))):
            return self
        rows = np.array(indices, np.int64)
        hidden_index = self.output.hidden_index
        return replace(
            self,
            context=self.context.select(indices),
            tree=self.tree.select(rows),
            output=replace(
                self.output,
                logit_index=self.output.logit_index[rows],
                hidden_index=hidden_index[rows] if len(hidden_index) else hidden_index,
            ),
            paths=tuple(self.paths[i] for i in indices),
            new_tokens=tuple(self.new_tokens[i] for i in indices),
            start_positions=tuple(self.start_positions[i] for i in indices),
        )

    def num_drafted(self, i: int) -> int:
        """Drafted tokens of request `i`."""
        return self.tree.drafted_counts[i]

    def num_accepted(self, i: int) -> int:
        """Drafted tokens of request `i` that were accepted."""
        return len(self.paths[i]) - int(self.tree.prefix_length[i])
