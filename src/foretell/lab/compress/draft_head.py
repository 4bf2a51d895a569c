"""A draft head in two stages: all tokens are scored through a low rank, and the best of them again exactly.

The factors are those of the least squared error of the scores on the states that the head reads while drafting, in
closed form (SVD-LLM, arXiv 2403.07378); nothing is trained. The target verifies whatever is drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float

from foretell.lab.compress.low_rank import project
from foretell.model.run.network import Network
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.eagle import EagleNetwork
from foretell.speculator.network.p_eagle import PEagle
from foretell.speculator.network.pack import pack_network
from foretell.train.data.dataset import Document
from foretell.train.draft_states import STEPS, draft_states

_RANK_STEP = 32
"""Inputs that the kernels multiply together."""
_CHUNK = 256
BEST = 4
"""Tokens after a node that are compared; few nodes have more children."""


@dataclass(frozen=True)
class HeadRecall:
    """How a head in two stages does on states that it was not fitted on."""

    states: int
    best: float
    """Share of the states whose most probable token is that of the whole head."""
    best_few: float
    """Share of the whole head's `BEST` most probable tokens that are among its own `BEST`."""


def draft_head_network(network: Speculator, rank: int, candidates: int) -> EagleNetwork:
    """The network, if its head can have two stages of these sizes.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(network, EagleNetwork) or isinstance(network, PEagle):
        raise ValueError(
            f"a head in two stages is for eagle and eagle3, and this is a speculator of kind {network.kind}"
        )
    rows, width = network.lm_head.shape
    if rank % _RANK_STEP or not 0 < rank < width:
        raise ValueError(f"--rank {rank}: a multiple of {_RANK_STEP} below {width}, the width of a state, was expected")
    if not 0 < candidates <= rows:
        raise ValueError(f"--candidates {candidates}: 1 to {rows} were expected, the tokens that are drafted")
    return network


def weights_read(network: EagleNetwork) -> tuple[int, int]:
    """Weights that are read for a state: by the head in two stages, and by the whole head."""
    c, (rows, width) = network.config, network.lm_head.shape
    return c.head_rank * (rows + width) + c.head_candidates * width, rows * width


@torch.inference_mode()
def fit_draft_head(
    target: Network, network: EagleNetwork, documents: Sequence[Document], num_tokens: int, rank: int, candidates: int
) -> HeadRecall:
    """Fit the factors of a network's head on the draft states of half of the documents, and compare on the other half.

    `num_tokens`: of all documents, at most.

    Raises:
        ValueError: documents with too few tokens to fit so high a rank.
    """
    fitted, held_out = (
        draft_states(target, network, documents[i::2], num_tokens // 2).inputs[: STEPS * num_tokens // 2]
        for i in range(2)
    )
    if len(fitted) < rank:
        raise ValueError(
            f"too few tokens: {len(fitted)} states in half of the documents, and --rank {rank} takes as many; give "
            "more --tokens, or a larger set"
        )
    network.set_head_factors(*head_factors(network.lm_head, fitted, rank), candidates)
    packed = pack_network(network)
    best, best_few = 0.0, 0.0
    for state in torch.split(held_out, _CHUNK):
        whole = F.linear(state, network.lm_head.float()).topk(BEST).indices
        own = packed.compute_logits(state).topk(BEST).indices
        best += float((own[:, 0] == whole[:, 0]).sum()) / len(held_out)
        best_few += float((own[:, None] == whole[:, :, None]).sum()) / whole.shape[1] / len(held_out)
    return HeadRecall(len(held_out), best, best_few)


def head_factors(
    head: Float[torch.Tensor, "v d"], states: Float[torch.Tensor, "n d"], rank: int
) -> tuple[Float[torch.Tensor, "d r"], Float[torch.Tensor, "r d"]]:
    """The factors with the least squared error of `states @ (head @ outer @ inner).T`, in float32."""
    wide, rows = states.double(), head.double()
    directions, inner = project(rows, wide.T @ wide / len(wide), rank)
    return torch.linalg.lstsq(rows, directions).solution.float(), inner.float()
