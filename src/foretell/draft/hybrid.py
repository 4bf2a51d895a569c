"""Two kinds of drafter side by side: what can be copied is copied, the rest is guessed by a model."""

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import BindingEngine
from foretell.core.tree import TokenTree
from foretell.draft.base import Drafter, Predictor, Retriever, with_hidden_layers


class HybridDrafter(Drafter):
    """A retriever and a predictor; a shape such as `RetrievalOrModel` decides per text and step which of them drafts.

    The predictor catches up by itself with what was decided in steps that it did not see.
    """

    label = "retrieval, and beside it a speculator, a draft model or the target's first blocks"

    def __init__(self, retriever: Retriever, predictor: Predictor) -> None:
        self.retriever, self.predictor = retriever, predictor
        self.hidden_layers = tuple(sorted({*retriever.hidden_layers, *predictor.hidden_layers}))
        self.max_context = retriever.max_context

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """The probes of both."""
        return self.predictor.add_probes(self.retriever.add_probes(tree, context), context)

    def observe(self, step: StepResult) -> None:
        """Tell both."""
        self.retriever.observe(with_hidden_layers(step, self.hidden_layers, self.retriever.hidden_layers))
        self.predictor.observe(with_hidden_layers(step, self.hidden_layers, self.predictor.hidden_layers))

    def release(self, row: int) -> None:
        """Have both forget a row."""
        self.retriever.release(row)
        self.predictor.release(row)

    def rewind(self, row: int, length: int) -> int:
        """As far as both can."""
        length = self.predictor.rewind(row, self.retriever.rewind(row, length))
        return self.retriever.rewind(row, length)

    def bind(self, engine: BindingEngine) -> bool:
        """With both."""
        return any([super().bind(engine), self.retriever.bind(engine), self.predictor.bind(engine)])
