"""The matrices of gated feed-forward networks and of mixtures of experts, as a decoder or its checkpoint has them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float

from foretell.model.matrices.stored import Matrix

Tensor = torch.Tensor


@dataclass(frozen=True)
class GatedMatrices:
    """The matrices of a feed-forward network, and their biases (None: there are none)."""

    gate: Matrix | None
    up: Matrix
    down: Matrix
    gate_bias: Float[Tensor, " f"] | None = None
    up_bias: Float[Tensor, " f"] | None = None
    down_bias: Float[Tensor, " d"] | None = None


class ExpertNorms(NamedTuple):
    """Weights of the norms of experts beside a dense network: of the inputs of router and experts, and of the outputs
    of the experts and of the dense network.
    """

    router: Float[Tensor, " d"]
    input: Float[Tensor, " d"]
    output: Float[Tensor, " d"]
    dense: Float[Tensor, " d"]


@dataclass(frozen=True)
class ExpertMatrices:
    """The router, the experts and the shared expert of a layer. None: the architecture has none."""

    router: Float[Tensor, "e d"]
    experts: Iterable[GatedMatrices]
    """One after the other; may be read while it is iterated, and then only once."""
    router_bias: Float[Tensor, " e"] | None = None
    selection_bias: Float[Tensor, " e"] | None = None
    """Added to the router's scores where experts are chosen, but not to their weights."""
    shared: GatedMatrices | None = None
    shared_gate: Float[Tensor, "1 d"] | None = None
    expert_scale: Float[Tensor, " e"] | None = None
    """A factor on the weights of each expert."""
    norms: ExpertNorms | None = None
