"""A retriever and a predictor side by side."""

from foretell.draft.base import CompositeDrafter, Predictor, Retriever


class HybridDrafter(CompositeDrafter):
    """A retriever and a predictor; `HybridTree` offers the drafts of both.

    The predictor reads the tokens of steps in which it did not draft before its next draft.
    """

    label = "retrieval, and beside it a speculator, a draft model or the target's first blocks"

    def __init__(self, retriever: Retriever, predictor: Predictor) -> None:
        super().__init__((retriever, predictor))
        self.retriever, self.predictor = retriever, predictor
        self.max_context = retriever.max_context

    @property
    def origin(self) -> str:
        """The retriever's; drafts of the predictor are recorded by the shape."""
        return self.retriever.origin
