"""A drafter with UNO's adapter that notes what it drafts from."""

import torch

from foretell.draft import UnoDrafter


class Recording(UnoDrafter):
    """Notes the logits of every depth and the random tokens by the text before."""

    noted: dict[tuple[int, ...], tuple[torch.Tensor, list[int]]]

    def _predict(self, context):  # type: ignore[no-untyped-def]
        logits = super()._predict(context)
        for i, text in enumerate(context.sequences):
            self.noted[tuple(text.tokens.tolist())] = logits[:, i].clone(), self.last[i][1:]
        return logits

    def _forward(self, network, context, tree, active, scored):  # type: ignore[no-untyped-def]
        self.last = tree.token.tolist()
        return super()._forward(network, context, tree, active, scored)
