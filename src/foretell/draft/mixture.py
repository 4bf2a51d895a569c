"""Several drafters of one tree: the merged speculation of SpecInfer."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import BindingEngine
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor, with_hidden_layers


class MixtureDrafter(Predictor):
    """Averages the distributions of several drafters (the union of boost-tuned models in SpecInfer, arXiv 2305.09781,
    as one law).

    A draw from the average is a draw from one of the drafters chosen at random; averaging keeps one `q` per node, so
    every acceptor stays exact.
    """

    label = "several draft models, averaged"

    def __init__(self, drafters: Sequence[Predictor], weights: Sequence[float] | None = None) -> None:
        if not drafters:
            raise ValueError("a mix needs at least one drafter")
        weights = [1.0] * len(drafters) if weights is None else weights
        if len(weights) != len(drafters) or min(weights) <= 0:
            raise ValueError(
                f"a mix needs one positive weight per drafter: {len(drafters)} drafters, weights {list(weights)}"
            )
        self.drafters = tuple(drafters)
        self._log_weights = torch.tensor([w / sum(weights) for w in weights]).log()
        self.hidden_layers = tuple(sorted({t for d in drafters for t in d.hidden_layers}))
        self.max_context = min(d.max_context for d in drafters)

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As deep as all of them can draft."""
        return np.stack([d.max_depths(context) for d in self.drafters]).min(0)

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Log of the averaged distribution after the frontier."""
        parts = [d.expand(tree, frontier, context) for d in self.drafters]
        at = parts[0][1]
        rows, nodes = np.nonzero(at >= 0)
        order = at[rows, nodes]
        scores = [torch.log_softmax(logits[torch.from_numpy(where[rows, nodes])], -1) for logits, where in parts]
        mixed = torch.logsumexp(torch.stack(scores) + self._log_weights.to(scores[0])[:, None, None], 0)
        out = torch.empty_like(mixed)
        out[torch.from_numpy(order)] = mixed
        return out, at

    def observe(self, step: StepResult) -> None:
        """Tell every drafter."""
        for d in self.drafters:
            d.observe(with_hidden_layers(step, self.hidden_layers, d.hidden_layers))

    def release(self, row: int) -> None:
        """Forget a row."""
        for d in self.drafters:
            d.release(row)

    def rewind(self, row: int, length: int) -> int:
        """As far as all of them can."""
        for d in self.drafters:
            length = d.rewind(row, length)
        # Those that were asked first may know more than the last ones left.
        return min(d.rewind(row, length) for d in self.drafters)

    def bind(self, engine: BindingEngine) -> bool:
        """With all of them."""
        return any([super().bind(engine), *(d.bind(engine) for d in self.drafters)])
