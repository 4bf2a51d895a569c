"""A decoding method: a drafter, a shape that arranges its tokens into a tree, and an acceptor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from foretell.accept.base import Acceptor
from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree, TreeBounds
from foretell.draft.base import Drafter, Predictor, Retriever
from foretell.engine.drafter_check import DrafterCheck
from foretell.shape.base import Shape, Source
from foretell.shape.constrained import fit_to_rules

D = TypeVar("D", bound=Drafter)


@dataclass(frozen=True)
class Method(Generic[D]):
    """Drafter x shape x acceptor.

    Raises:
        ValueError: the shape cannot grow from this kind of drafter.
    """

    draft: D
    tree: Shape[D]
    accept: Acceptor
    name: str = field(default="custom", kw_only=True)
    drafter_label: str = field(default="", kw_only=True)
    """What drafts, in a few words; empty: the drafter's own label."""
    inputs: frozenset[str] = field(default=frozenset(), kw_only=True)
    """What it was built from besides the target: `drafts`, `speculators`, `references`."""
    drafter_key: str = field(default="", kw_only=True)
    """Identifies what it was told to draft with; empty: nothing. What is measured of its drafter is kept under it."""
    check: DrafterCheck | None = field(default=None, kw_only=True, compare=False)
    """Switches the drafter off if it does not fit the target."""

    def __post_init__(self) -> None:
        if not isinstance(self.draft, self.tree.drafter_type):
            shape, drafter, kinds = type(self.tree).__name__, type(self.draft).__name__, self.tree.drafter_type
            needed = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
            fitting = {
                Predictor: "Chain, BranchingTree, FixedTree or DynamicTree",
                Retriever: "Trie",
                Drafter: "RootOnly",
            }
            suggestion = next(names for kind, names in fitting.items() if isinstance(self.draft, kind))
            raise ValueError(f"{shape} needs a {needed}, and {drafter} is not one; try {suggestion} as the tree")

    @property
    def lossless(self) -> bool:
        """Whether answers follow the target's distribution exactly."""
        return self.accept.lossless

    @property
    def needs_own_rows(self) -> bool:
        """Whether a request can reuse the prefixes of this method's requests alone: the drafter needs hidden states of
        all that the target reads, or what it drafts may change the text.
        """
        return bool(self.draft.hidden_layers) and not (self.draft.resumes and self.accept.same_seed)

    def propose(self, context: Context) -> TokenTree:
        """Trees for the requests of `context`: those that `grow` gives, with the drafter's probes."""
        return self.draft.add_probes(self.grow(context), context)

    def grow(self, context: Context) -> TokenTree:
        """Drafts for the requests of `context`, no deeper than their maximum depth and the drafter's, and at most as
        many as they allow.
        """
        depths = self.draft.max_depths(context).tolist()
        if self.check is not None and self.check.stops(context, self.accept.same_seed):
            depths = [0] * len(depths)
        return self.finish(self.draft_from((self.draft, self.tree), context, depths), context)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The drafters that offer drafts, with their shapes."""
        return self.tree.sources(self.draft)

    def check_of(self, number: int) -> DrafterCheck | None:
        """The check of the drafter of this number: of several, the last one is the model."""
        return self.check if number == len(self.sources) - 1 else None

    def draft_from(
        self, source: Source, context: Context, depths: Sequence[int], least: TreeBounds = (0.0, 0.0)
    ) -> TokenTree:
        """What one of its drafters offers, within these depths; `least`: least scores, see `Context`."""
        drafter, shape = source
        limited = context.limited(depths, self.accept.same_seed, least)
        return shape.grow(drafter, limited).limit_depth(limited.max_depth)

    def finish(self, tree: TokenTree, context: Context) -> TokenTree:
        """Drafted trees that obey the limits and rules of their requests."""
        return self.fit(tree.limit_drafts(context.max_drafts), context).limit_drafts(context.max_drafts)

    def fit(self, tree: TokenTree, context: Context) -> TokenTree:
        """The tree without drafts that the rules of its requests forbid, and with the tokens that they force."""
        accept = self.accept
        prunes_sampled = accept.same_seed or not accept.lossless
        return fit_to_rules(tree, context, prunes_sampled, accept.takes_added and self.draft.drafts_forced)

    def observe(self, step: StepResult) -> None:
        """Update drafter and shape after a pass of the target."""
        self.draft.observe(step)
        self.tree.observe(step)

    def release(self, row: int) -> None:
        """Forget a row whose request is over."""
        self.draft.release(row)


AnyMethod = Method[Any]


class BoundMethod:
    """A method in an engine. While requests of it wait or run, no other method or engine may use its parts."""

    def __init__(self, method: AnyMethod) -> None:
        self.method = method
        self.requests = 0
        """Requests that wait or run."""
        self._owns_parts = False

    @property
    def busy(self) -> bool:
        """Whether any request of the method is waiting or running."""
        return self.requests > 0

    def bind(self) -> bool:
        """Claim the method's parts; whether they may hold state of the rows of another engine.

        Raises:
            ValueError: one of them serves another method or engine whose requests are not over.
        """
        draft: Drafter = self.method.draft
        changed, self._owns_parts = draft.bind(self), True
        return changed

    def unbind(self) -> None:
        """Give up the parts: they serve another method or engine from now on."""
        self._owns_parts = False

    def release(self, row: int) -> None:
        """Forget a row, unless the parts serve another method or engine by now."""
        if self._owns_parts:
            self.method.release(row)

    def take_prefix(self, source: int, row: int, length: int, prompt_length: int) -> int:
        """Prepare a row for a request, with a prompt of `prompt_length` tokens, that shares its first `length` tokens
        with the request of row `source`, which may be the same row; see `Drafter.rewind` and `Drafter.copy_row`.

        Where drafts change the text, the drafter keeps what it would know in an empty row, or begins anew.
        """
        if not self.method.accept.same_seed:
            least: int | None = self.method.draft.rereads_from(source, length, prompt_length)
            if least is not None:
                self.release(row)
                return least
        draft: Drafter = self.method.draft
        return draft.rewind(row, length) if row == source else draft.copy_row(source, row, length)
