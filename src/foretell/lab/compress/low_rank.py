"""Low rank: a matrix W [o, i] becomes A B, A [o, r] and B [r, i], whose outputs are near on the inputs it sees.

All three methods are one projection, A = E and B = E^T W, with E the r main directions of the outputs W S^(1/2): their
singular value decompositions of W, W D and W L differ only in the moment S = 1, D^2 or L L^T of the inputs.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.lab.compress.base import Compressor
from foretell.lab.quantize.base import InputStatistics
from foretell.lab.quantize.layout import shapes_of
from foretell.model.block.linear import AnyLinear, FactoredLinear, Linear
from foretell.model.config.compressed import LowRank
from foretell.model.config.model import ModelConfig

Tensor = torch.Tensor
_DAMPING = 1e-6
"""Added to the moment's diagonal, as a share of its mean, so that fewer tokens than inputs still span all of them."""
_LEAST = 1e-30
"""Mean of the diagonal of inputs that are all zero."""
_RANK_STEP = 32
"""Outputs that the kernels multiply together."""
_ASVD_EXPONENT = 0.5
"""Of the mean magnitudes of the inputs in ASVD (alpha in the paper)."""


def ranks_of(config: ModelConfig, compressor: Compressor | None) -> LowRank:
    """The ranks of the matrices of a model that a method stores as two factors."""
    if not isinstance(compressor, LowRankCompressor):
        return LowRank()
    return LowRank(**{role: compressor.stored_rank(*shape) for role, shape in shapes_of(config).items()})


def check_share(share: float) -> None:
    """Refuse a share of a rank.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"--rank-share {share:g}: the share of the rank that is kept lies above 0, up to 1")


def saves(rank: int, outputs: int, inputs: int) -> bool:
    """Whether two factors of this rank have fewer numbers than the matrix."""
    return rank * (outputs + inputs) < outputs * inputs


def fitting(rank: int, outputs: int, inputs: int) -> int:
    """A rank that the kernels have panels for: from 32 on a multiple of 32, or the full one."""
    return rank if rank < _RANK_STEP or rank == min(outputs, inputs) else rank - rank % _RANK_STEP


def rank_of(share: float, outputs: int, inputs: int) -> int:
    """The rank that is a share of the full one, at least 1."""
    return max(1, round(share * min(outputs, inputs)))


@dataclass(frozen=True)
class LowRankCompressor(Compressor):
    """`share`: of the full rank, min(o, i), that is kept; ranks from 32 on are multiples of 32, as the kernels multiply
    so many outputs at a time. `given`: the rank itself, 0: the matrix stays as it is.

    Raises:
        ValueError: a share that is not above 0 and at most 1.
    """

    share: float
    given: int | None = None

    def __post_init__(self) -> None:
        check_share(self.share)

    def rank(self, outputs: int, inputs: int) -> int:
        """The rank of a matrix of this shape."""
        if self.given is not None:
            return self.given or min(outputs, inputs)
        return fitting(rank_of(self.share, outputs, inputs), outputs, inputs)

    def stored_rank(self, outputs: int, inputs: int) -> int:
        """The rank with which a matrix of this shape is stored as two factors; 0: they would be no smaller, and their
        product is stored.
        """
        rank = self.rank(outputs, inputs)
        return rank if saves(rank, outputs, inputs) else 0

    @abstractmethod
    def moment(self, inputs: InputStatistics | None, width: int) -> Float[Tensor, "i i"]:
        """The moment S of the inputs that the method takes."""

    def factors(
        self, weight: Float[Tensor, "o i"], inputs: InputStatistics | None
    ) -> tuple[Float[Tensor, "o r"], Float[Tensor, "r i"]]:
        """A, whose columns are orthonormal, and B, in float64."""
        wide = weight.double()
        return project(wide, self.moment(inputs, weight.shape[1]).double(), self.rank(*weight.shape))

    def compress(self, weight: Float[Tensor, "o i"], inputs: InputStatistics | None) -> Float[Tensor, "o i"]:
        """The product of the two thin matrices."""
        first, second = self.factors(weight, inputs)
        return (first @ second).to(weight.dtype)

    def replace(self, linear: Linear, inputs: InputStatistics | None, dtype: torch.dtype) -> AnyLinear:
        """As two factors, whose numbers are in `dtype`, where these are smaller."""
        if not self.stored_rank(*linear.weight.shape):
            return super().replace(linear, inputs, dtype)
        outer, inner = (factor.to(dtype).float() for factor in self.factors(linear.weight.data, inputs))
        return FactoredLinear(Linear(inner), Linear(outer, linear.bias))


class SVD(LowRankCompressor):
    """The nearest matrix of this rank, whatever the inputs."""

    calibrated = False

    def moment(self, inputs: InputStatistics | None, width: int) -> Float[Tensor, "i i"]:
        """The identity."""
        return torch.eye(width)


class ASVD(LowRankCompressor):
    """Weighs every input by the root of its mean magnitude (Yuan et al., arXiv 2312.05821)."""

    def moment(self, inputs: InputStatistics | None, width: int) -> Float[Tensor, "i i"]:
        """Squared weights on the diagonal."""
        assert inputs is not None
        return inputs.mean_magnitude.pow(2 * _ASVD_EXPONENT).diag()


class SVDLLM(LowRankCompressor):
    """Least mean squared error of the outputs on the calibration text: truncation-aware whitening (Wang et al., arXiv
    2403.07378).
    """

    def moment(self, inputs: InputStatistics | None, width: int) -> Float[Tensor, "i i"]:
        """The second moment of the inputs."""
        assert inputs is not None
        return inputs.second_moment


def require_finite(moment: Float[Tensor, "i i"]) -> None:
    """Raises ValueError where a moment of inputs is not finite."""
    if not moment.isfinite().all():
        raise ValueError("the calibration inputs of a matrix are not finite; give other --text")


def project(
    weight: Float[Tensor, "o i"], moment: Float[Tensor, "i i"], rank: int
) -> tuple[Float[Tensor, "o r"], Float[Tensor, "r i"]]:
    """E [o, r] and E^T W, with E the main directions of W S W^T; both in float64.

    Raises:
        ValueError: the moment is not finite.
    """
    require_finite(moment)
    damping = _DAMPING * moment.diagonal().mean().clamp_min(_LEAST)
    damped = moment + damping * torch.eye(len(moment), dtype=moment.dtype)
    if len(weight) <= weight.shape[1]:
        directions = torch.linalg.eigh(weight @ damped @ weight.T).eigenvectors[:, -rank:]
    else:
        # A root of the moment that exists for fewer calibration tokens than inputs, too.
        values, vectors = torch.linalg.eigh(damped)
        outputs = weight @ (vectors * values.clamp_min(0).sqrt())
        main = torch.linalg.eigh(outputs.T @ outputs).eigenvectors[:, -rank:]
        directions = torch.linalg.qr(outputs @ main).Q
    return directions, directions.T @ weight
