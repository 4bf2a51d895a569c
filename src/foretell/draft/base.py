"""The contract of a drafter: it guesses, and it learns from what became of its guesses."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import BindingEngine, EngineBound
from foretell.core.tree import TokenTree
from foretell.distributions.topk import top_probabilities


class Drafter(EngineBound, ABC):
    """Guesses what the target will say. Memory is indexed by `context.rows`.

    A step may propose twice before it is kept: for each request alone, where proposing for all of them raised an
    exception.
    """

    label: ClassVar[str] = ""
    """What drafts, in a few words, for the table of methods."""
    learns: ClassVar[bool] = False
    """Whether it is trained while it serves."""

    hidden_layers: tuple[int, ...] = ()
    """Target layers whose hidden states it needs; see `Runner.forward`."""
    max_context: int = 1 << 31
    """Longest text it can read, in tokens; longer ones are decoded without drafts."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """Deepest drafts that it can make for the texts now, at most `context.room`; 0 where it does not know enough
        yet.
        """
        lengths = np.array([t.length for t in context.sequences])
        return np.minimum(context.max_depth, np.maximum(0, self.max_context + 1 - lengths))

    def observe(self, step: StepResult) -> None:
        """Learn what happened, after every pass of the target (the reading of a prompt included)."""
        return

    def release(self, row: int) -> None:
        """Forget a row: its request is over."""
        return

    def rewind(self, row: int, length: int) -> int:
        """Prepare a row for a request that begins with the first `length` tokens of its last one, which the target will
        not read again.

        How many of them (0 to `length`) the drafter can do without seeing once more; the target reads on from there.
        What depends on how the last request went on is forgotten.
        """
        self.release(row)
        return 0 if self.hidden_layers else length

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Add nodes that the target shall read for the drafter's own sake."""
        return tree


def with_hidden_layers(step: StepResult, available_layers: Sequence[int], hidden_layers: Sequence[int]) -> StepResult:
    """The step as one of several drafters sees it: of the features of `available_layers` layers, those of
    `hidden_layers`, in that order; with none it looks at none.
    """
    if not hidden_layers or tuple(available_layers) == tuple(hidden_layers):
        return step
    features = tuple(step.output.hidden_states[available_layers.index(t)] for t in hidden_layers)
    return replace(step, output=replace(step.output, hidden_states=features))


class NoDrafter(Drafter):
    """Guesses nothing: plain decoding."""

    label = "nothing"

    def bind(self, engine: BindingEngine) -> bool:
        """There is no state: any number of engines may share it."""
        return False


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens after some nodes, best first: `token[at[i, j]]` after node `j` of text `i`, with their
    probabilities.
    """

    probability: Float[np.ndarray, "k c"]
    """Under the drafter's own softmax, before any sampling parameter."""
    token: Int[np.ndarray, "k c"]
    logit_index: Int[np.ndarray, "b n"]

    @staticmethod
    def of(
        chances: Float[torch.Tensor, "k c"],
        columns: Int[torch.Tensor, "k c"],
        at: Int[np.ndarray, "b n"],
        token_of: Int[np.ndarray, " w"] | None = None,
    ) -> "TopTokens":
        """From what was drafted best; `token_of` gives the token of every column."""
        places = columns.cpu().numpy()
        return TopTokens(chances.double().cpu().numpy(), places if token_of is None else token_of[places], at)


def top_tokens(
    logits: Float[torch.Tensor, "k w"],
    at: Int[np.ndarray, "b n"],
    count: int,
    token_of: Int[np.ndarray, " w"] | None = None,
) -> TopTokens:
    """The `count` best tokens of every row of scores, or as many as there are."""
    if not len(logits):
        return TopTokens(np.zeros((0, 0)), np.zeros((0, 0), np.int64), at)
    return TopTokens.of(*top_probabilities(logits, min(count, logits.shape[1])), at, token_of)


class Predictor(Drafter):
    """Gives distributions for the children of tree nodes, level by level."""

    def top_tokens(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> TopTokens:
        """The `count` likeliest tokens after the live nodes of `frontier`: all that a shape needs which picks.

        Called instead of `expand`.
        """
        return top_tokens(*self.expand(tree, frontier, context), count)

    def grow_dynamic_tree(
        self, context: Context, sizes: tuple[int, int, int], bounds: tuple[float, float]
    ) -> TokenTree | None:
        """The tree that `shape.Beam` would grow from this drafter, in one go; None: let it be grown level by level.

        `sizes`: depth, width and budget. `bounds`: the least score of a node, and that of one to be gone on from.
        """
        return None

    @abstractmethod
    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Scores of what follows the live nodes of `frontier`, and where each node's are (as `ModelOutput.at`).

        `tree` grows from call to call within a step, starting with roots only (trunk 1); nodes never change once handed
        over.
        """


@dataclass(frozen=True)
class Continuation:
    """Tokens that may follow a text, and for each the estimated probability that it is accepted (falling along the
    way).
    """

    tokens: tuple[int, ...]
    cumulative_acceptance: tuple[float, ...]


class Retriever(Drafter):
    """Finds whole continuations."""

    single: ClassVar[bool] = False
    """Whether it offers one continuation at most, of which a trie is a chain."""

    @abstractmethod
    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """Continuations per text, best first, of about `budget` tokens in all."""
