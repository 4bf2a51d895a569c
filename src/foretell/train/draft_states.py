"""What the output head of a speculator reads along texts, and the tokens that follow there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from foretell.model.run.network import Network
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.speculator.network.eagle import EagleNetwork
from foretell.train.data.dataset import Document
from foretell.train.exits.states import document_states, texts_to_learn

STEPS = 3
"""Draft steps of an EAGLE: the first reads the target's features, later ones the layer's own."""
_LONGEST = 256
"""Tokens of a document that are read."""


@dataclass(frozen=True)
class DraftStates:
    """Inputs of the output head, and the tokens of the text that they predict."""

    inputs: Float[torch.Tensor, "n d"]
    following: Int[torch.Tensor, " n"]

    def __len__(self) -> int:
        return len(self.inputs)


@torch.inference_mode()
def draft_states(
    target: Network, network: EagleNetwork | DraftNetwork, documents: Sequence[Document], num_tokens: int
) -> DraftStates:
    """At the tokens to learn of documents, about `num_tokens` of them; with an EAGLE, at `STEPS` draft steps each.

    Raises:
        ValueError: the documents have no token to learn.
    """
    if isinstance(network, EagleNetwork):
        parts = _eagle_states(target, network, documents, num_tokens)
    else:
        parts = _model_states(network, documents, num_tokens)
    inputs, following = (torch.cat(part) for part in zip(*parts, strict=True))
    return DraftStates(inputs.float(), following)


def _eagle_states(
    target: Network, network: EagleNetwork, documents: Sequence[Document], num_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for tokens, first, states in document_states(target, documents, network.hidden_layers, num_tokens, _LONGEST):
        position = torch.arange(len(tokens) - 1)
        masks = [((position >= first - 1) & (position < len(tokens) - 2 - i))[None] for i in range(STEPS)]
        token, features = torch.tensor(tokens), [s[None].to(network.lm_head.device) for s in states]
        for i, step in enumerate(network(token[None].to(network.lm_head.device), features, masks)):
            yield step.state.cpu(), token[position[masks[i][0]] + 2 + i]


def _model_states(
    network: DraftNetwork, documents: Sequence[Document], num_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for tokens, first in texts_to_learn(documents, num_tokens, _LONGEST):
        token = torch.tensor(tokens)
        yield network.hidden_states(token[None].to(network.lm_head.device))[0, first:-1].cpu(), token[first + 1 :]
