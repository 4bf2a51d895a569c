"""Two kinds of drafter side by side: what can be copied is copied, the rest is guessed by a model."""

from foretell.context import Context, Step
from foretell.draft.base import Drafter, Predictor, Retriever, narrowed
from foretell.ownership import Owner
from foretell.tree import TokenTree


class Hybrid(Drafter):
    """A retriever and a predictor; a shape such as `Fallback` decides per text and step which of them drafts.

    The predictor catches up by itself with what was decided in steps that it did not see.
    """

    label = "retrieval, and beside it a speculator, a draft model or the target's first blocks"

    def __init__(self, retriever: Retriever, predictor: Predictor) -> None:
        self.retriever, self.predictor = retriever, predictor
        self.taps = tuple(sorted({*retriever.taps, *predictor.taps}))
        self.reach = retriever.reach

    def probe(self, tree: TokenTree, context: Context) -> TokenTree:
        """The probes of both."""
        return self.predictor.probe(self.retriever.probe(tree, context), context)

    def keep(self, step: Step) -> None:
        """Tell both."""
        self.retriever.keep(narrowed(step, self.taps, self.retriever.taps))
        self.predictor.keep(narrowed(step, self.taps, self.predictor.taps))

    def clear(self, row: int) -> None:
        """Have both forget a row."""
        self.retriever.clear(row)
        self.predictor.clear(row)

    def rewind(self, row: int, length: int) -> int:
        """As far as both can."""
        length = self.predictor.rewind(row, self.retriever.rewind(row, length))
        return self.retriever.rewind(row, length)

    def claim(self, owner: Owner) -> bool:
        """With both."""
        return any([super().claim(owner), self.retriever.claim(owner), self.predictor.claim(owner)])
