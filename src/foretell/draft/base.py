"""The interfaces of drafters: `Predictor` gives distributions, `Retriever` gives continuations."""

import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.noise import LevelNoise
from foretell.core.tree import TokenTree, TreeBounds, TreeSizes
from foretell.distributions.coupling import add_noise
from foretell.model.kernels import NodeLimits
from foretell.model.run.runner import Runner
from foretell.model.run.topk import top_probabilities
from foretell.utils.transfer import to_host

T = TypeVar("T")
_ROLE = re.compile("(Drafter|Retriever)$")
Frontier: TypeAlias = Int[np.ndarray, "b f"]
"""Nodes of every tree of a batch whose children are drafted next."""
NodeLogits: TypeAlias = tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]
"""Logits after some nodes, and the row of every node in them, as `ModelOutput.logit_index`."""


class BindingEngine(Protocol):
    """What a drafter is bound to: an engine, as far as it runs one method."""

    @property
    def busy(self) -> bool:
        """Whether any request of the method is waiting or running."""

    def unbind(self) -> None:
        """Learn that the drafter serves something else from now on."""


class Drafter(ABC):
    """Proposes tokens that the target may accept. Its state is indexed by `context.rows`, so it belongs to one method
    of one engine at a time.

    A step may call it twice before `observe`: when proposing for all requests raises an exception, the engine proposes
    for each request separately.
    """

    label: ClassVar[str] = ""
    """What drafts, in a few words, for the table of methods."""
    learns: ClassVar[bool] = False
    """Whether it is trained while it serves."""
    resumes: bool = False
    """Whether it may begin to observe in the middle of a sequence, if it needs hidden states at all."""
    drafts_forced: bool = True
    """Whether the tokens that the constraint of a request leaves next are drafted too."""

    exact_keys: bool = True
    """Whether the target's cache after an answer is that of passes of all layers over the same text, so that other
    requests may begin with its tokens.
    """

    hidden_layers: tuple[int, ...] = ()
    """Target layers whose hidden states it needs; see `Runner.forward`."""
    max_context: int = 1 << 31
    """Longest sequence it can read, in tokens; longer ones are decoded without drafts."""

    _engine: "weakref.ref[BindingEngine] | None" = None

    def bind(self, engine: BindingEngine) -> bool:
        """Bind this to `engine`; whether it was bound to another one before, whose rows must be released.

        Raises:
            ValueError: it is bound to another method or engine whose requests are not over.
        """
        known = self._engine
        before = None if known is None else known()
        if before is engine:
            return False
        if before is not None:
            if before.busy:
                raise ValueError(
                    "a drafter of this method serves another engine or another method, which is busy: build parts "
                    "of its own for every method and engine that runs at the same time"
                )
            before.unbind()
        self._engine = weakref.ref(engine)
        return known is not None

    @property
    def origin(self) -> str:
        """Its name where the origin of a draft is reported: that of its class, in lower case with hyphens."""
        name = _ROLE.sub("", type(self).__name__)
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """Maximum depth of the next draft per request, at most `context.max_depth`; 0 where it cannot draft yet."""
        pairs = zip(context.max_depth.tolist(), context.sequences, strict=True)
        return np.array([max(0, min(depth, self.max_context + 1 - t.length)) for depth, t in pairs], np.int64)

    def attach(self, runner: Runner) -> None:
        """Learn which runner runs the target, before the first draft in an engine."""
        return

    def observe(self, step: StepResult) -> None:
        """Update its state after every pass of the target, prefill included."""
        return

    def unread(self, context: Context, i: int) -> int:
        """About how many tokens of request `i` it reads before its next draft for it; reading takes time."""
        return 0

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        return

    def rewind(self, row: int, length: int) -> int:
        """Prepare a row for a request that shares its first `length` tokens with the row's last request; the target
        keeps them in its cache.

        Returns how many of these tokens (0 to `length`) the drafter need not observe again; the target reads from
        there. State that depends on the later tokens of the last request is forgotten.
        """
        self.release(row)
        return 0 if self.hidden_layers else length

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Prepare row `target` for a request that shares its first `length` tokens with the request of row `source`,
        which may be running; the target copies them in its cache.

        Returns how many of these tokens (0 to `length`) the drafter need not observe; the target reads from there.
        """
        self.release(target)
        return self.rewind(target, length)

    def rereads_from(self, row: int, length: int, prompt_length: int) -> int | None:
        """For drafts that change the text of a seed: whether what is kept of the first `length` tokens of a row serves
        a request with a prompt of `prompt_length` tokens.

        None: it is what the drafter would know had the request read them in an empty row. Otherwise the number of these
        tokens that it can do without in an empty row.
        """
        return None

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Add nodes that the target reads for the drafter and never accepts."""
        return tree


def with_hidden_layers(step: StepResult, available_layers: Sequence[int], hidden_layers: Sequence[int]) -> StepResult:
    """The step with the hidden states of `hidden_layers`, in this order, out of those of `available_layers`; unchanged
    if `hidden_layers` is empty.
    """
    if not hidden_layers or tuple(available_layers) == tuple(hidden_layers):
        return step
    features = tuple(step.output.hidden_states[available_layers.index(t)] for t in hidden_layers)
    return replace(step, output=replace(step.output, hidden_states=features))


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    label = "nothing"
    drafts_forced = False

    def bind(self, engine: BindingEngine) -> bool:
        """Do nothing: without state, any number of engines may share it."""
        return False


class CompositeDrafter(Drafter):
    """A drafter made of several, all of which observe every step.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("a drafter made of several needs at least one")
        self._all = tuple(drafters)
        self.hidden_layers = tuple(sorted({layer for d in drafters for layer in d.hidden_layers}))
        self.resumes = all(d.resumes for d in drafters if d.hidden_layers)

    def attach(self, runner: Runner) -> None:
        """Attach all drafters."""
        for d in self._all:
            d.attach(runner)

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """The probes of all drafters."""
        for d in self._all:
            tree = d.add_probes(tree, context)
        return tree

    def observe(self, step: StepResult) -> None:
        """Update all drafters, each with the hidden states it needs."""
        for d in self._all:
            d.observe(with_hidden_layers(step, self.hidden_layers, d.hidden_layers))

    def release(self, row: int) -> None:
        """Release a row in all drafters."""
        for d in self._all:
            d.release(row)

    def rewind(self, row: int, length: int) -> int:
        """The least of what all drafters keep."""
        for d in self._all:
            length = d.rewind(row, length)
        # The first ones may have kept more than the last ones.
        return min(d.rewind(row, length) for d in self._all)

    def copy_row(self, source: int, target: int, length: int) -> int:
        """The least of what all drafters copy."""
        for d in self._all:
            length = d.copy_row(source, target, length)
        return min(d.rewind(target, length) for d in self._all)

    def rereads_from(self, row: int, length: int, prompt_length: int) -> int | None:
        """The least number that any drafter can do without, where one has to begin anew."""
        least = [d.rereads_from(row, length, prompt_length) for d in self._all]
        if all(n is None for n in least):
            return None
        pairs = zip(self._all, least, strict=True)
        return min(n if n is not None else 0 if d.hidden_layers else length for d, n in pairs)

    def bind(self, engine: BindingEngine) -> bool:
        """Claim all drafters."""
        return any([super().bind(engine), *(d.bind(engine) for d in self._all)])


@dataclass(frozen=True)
class TopTokens:
    """The most probable tokens after some nodes, best first: `token[logit_index[i, j]]` after node `j` of batch row
    `i`, with their probabilities.
    """

    probability: Float[np.ndarray, "k c"]
    """Under the drafter's own softmax, before any sampling parameter."""
    token: Int[np.ndarray, "k c"]
    logit_index: Int[np.ndarray, "b n"]

    @staticmethod
    def of(
        probability: Float[torch.Tensor, "k c"],
        columns: Int[torch.Tensor, "k c"],
        logit_index: Int[np.ndarray, "b n"],
        token_of: Int[np.ndarray, " w"] | None = None,
    ) -> "TopTokens":
        """From probabilities and indices into the draft vocabulary, whose tokens are `token_of`."""
        scores, best = to_host([probability.double(), columns])
        token = best.numpy()
        return TopTokens(scores.numpy(), token if token_of is None else token_of[token], logit_index)


def top_tokens(
    logits: Float[torch.Tensor, "k w"],
    logit_index: Int[np.ndarray, "b n"],
    count: int,
    token_of: Int[np.ndarray, " w"] | None = None,
    noise: LevelNoise | None = None,
) -> TopTokens:
    """The `count` most probable tokens of every row of logits, or as many as there are; with `noise`, given that."""
    if not len(logits):
        return TopTokens(np.zeros((0, 0)), np.zeros((0, 0), np.int64), logit_index)
    if noise is not None:
        logits = add_noise(logits, logit_index, noise, token_of)
    return TopTokens.of(*top_probabilities(logits, min(count, logits.shape[1])), logit_index, token_of)


class Predictor(Drafter):
    """Gives distributions for the children of tree nodes, level by level."""

    def top_tokens(
        self, tree: TokenTree, frontier: Frontier, context: Context, count: int, noise: LevelNoise | None = None
    ) -> TopTokens:
        """The `count` most probable tokens after the valid nodes of `frontier`, given the `noise` that the target
        samples with, if it is known. Shapes that do not sample call it instead of `expand`.
        """
        return top_tokens(*self.expand(tree, frontier, context), count, noise=noise)

    def grow_dynamic_tree(self, context: Context, sizes: TreeSizes, bounds: TreeBounds) -> TokenTree | None:
        """The tree that `shape.DynamicTree` would grow from this drafter, in one call; None: it is grown by levels.

        `sizes`: depth, width and budget. `bounds`: the minimum score of a node, and of a node that is expanded.
        """
        return None

    def grow_chain(self, context: Context, length: int, limits: NodeLimits) -> TokenTree | None:
        """Chains of the drafter's most probable tokens, up to `length` each, in one call; None: they are grown token by
        token.
        """
        return None

    @abstractmethod
    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the valid nodes of `frontier`, and the row of every node (as `ModelOutput.logit_index`).

        `tree` grows from call to call within a step, starting with the roots; its nodes do not change.
        """


def in_engine(part: T | None) -> T:
    """What a drafter has learned of its target.

    Raises:
        ValueError: it has not, as it is in no engine.
    """
    if part is None:
        raise ValueError("a drafter that shares the cache of its target works in an engine only")
    return part


class TargetCachePredictor(Predictor):
    """Drafts in the cache of its target. There is no draft for the first token of an answer, so that drafts do not
    depend on how the prompt was read, and none where the target is behind.
    """

    _runner: Runner | None = None

    @property
    def _target(self) -> Runner:
        return in_engine(self._runner)

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As `Drafter.max_depths`; 0 where there is no draft yet."""
        pairs = zip(context.rows, context.sequences, strict=True)
        ready = [s.length > s.prompt_length and self._is_read(row, s.length - 1) for row, s in pairs]
        return np.where(ready, super().max_depths(context), 0)

    def _is_read(self, row: int, length: int) -> bool:
        """Whether exactly so many tokens of a row are read."""
        return self._target.length(row) == length


class RootStateNetwork(Protocol):
    """What such a drafter needs of its network."""

    token_of: torch.Tensor | None

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def target_vocab(self) -> int: ...  # noqa: D102
    def to_target_vocab(self, logits: torch.Tensor) -> torch.Tensor: ...  # noqa: D102


class RootStatePredictor(Predictor):
    """A predictor that drafts from the target's hidden state at the root only; it needs no earlier states."""

    network: RootStateNetwork

    def __init__(self, network: RootStateNetwork) -> None:
        self.network, self.hidden_layers = network, network.hidden_layers
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._root_states = weakref.WeakKeyDictionary[TokenBuffer, tuple[int, torch.Tensor]]()
        """Per sequence its length when a state produced its last token, and that state: a request that is paused keeps
        it.
        """

    def _ready(self, context: Context) -> list[bool]:
        """Whether the state at the root is known, per request."""
        return [self._root_states.get(text, (-1,))[0] == text.length for text in context.sequences]

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """0 for requests whose root state is not known."""
        return np.where(self._ready(context), super().max_depths(context), 0)

    @abstractmethod
    def _scores(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits over the draft vocabulary after the frontier, and the row of every node; -1: none, as at the maximum
        depth and for requests without a root state.
        """

    def _no_logits(self) -> Float[torch.Tensor, "0 w"]:
        return torch.zeros(0, self.network.target_vocab if self._token_of is None else len(self._token_of))

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits over the target's vocabulary after the frontier."""
        logits, logit_index = self._scores(tree, frontier, context)
        return self.network.to_target_vocab(logits), logit_index

    def top_tokens(
        self, tree: TokenTree, frontier: Frontier, context: Context, count: int, noise: LevelNoise | None = None
    ) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        return top_tokens(*self._scores(tree, frontier, context), count, self._token_of, noise)

    def _prepare_states(self, hidden_states: Sequence[Float[torch.Tensor, "b d"]]) -> Float[torch.Tensor, "b e"]:
        """What is kept of the target's hidden states, one tensor per layer."""
        return hidden_states[0]

    def observe(self, step: StepResult) -> None:
        """Keep the state that produced the newest token of every request."""
        last = [index[path[-1]] for index, path in zip(step.output.hidden_index.tolist(), step.paths, strict=True)]
        states = self._prepare_states([_rows_of(h, last) for h in step.output.hidden_states])
        for i, text in enumerate(step.context.sequences):
            if step.new_tokens[i]:
                self._root_states[text] = text.length, states[i]

    def rewind(self, row: int, length: int) -> int:
        """Keep everything: every step brings the state that the next draft needs."""
        return length


def _rows_of(states: Float[torch.Tensor, "n d"], index: Sequence[int]) -> Float[torch.Tensor, "b d"]:
    """Some rows; a single one as a view, which takes a third of the time."""
    if len(index) == 1:
        return states[index[0] : index[0] + 1]
    return states.index_select(0, torch.tensor(index, device=states.device))


@dataclass(frozen=True)
class Continuation:
    """Tokens that may follow a sequence, and for each the estimated probability that it and its predecessors are
    accepted.
    """

    tokens: tuple[int, ...]
    cumulative_acceptance: tuple[float, ...]


class Retriever(Drafter):
    """Proposes whole continuations."""

    single: ClassVar[bool] = False
    """Whether it proposes at most one continuation, so that its trie is a chain."""

    @abstractmethod
    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """Continuations per request, best first, of about `budget` tokens in all."""
