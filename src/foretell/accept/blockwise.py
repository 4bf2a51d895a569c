"""The approximate acceptance criteria of blockwise parallel decoding (Stern et al., arXiv 1811.03115). Lossy."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor


@dataclass(frozen=True)
class TopKAcceptor(LossyAcceptor):
    """Accepts the `count` most probable tokens of the target (section 5.1); 1 is greedy decoding.

    Raises:
        ValueError: a count below 1.
    """

    label = "the target's top k"

    count: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise ValueError(f"at least the best token must be acceptable, found the best {self.count}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """The most probable tokens, of equals the lower ids, except those of probability 0."""
        least = p.topk(min(self.count, len(p))).values[-1]
        above, equal = p > least, p == least
        return (above | (equal & (equal.cumsum(0) <= self.count - above.sum()))) & (p > 0)


@dataclass(frozen=True)
class DistanceAcceptor(LossyAcceptor):
    """Accepts tokens whose id is at most `distance` from that of the target's most probable one (section 5.2): for
    ordered vocabularies, such as pixel intensities. 0 is greedy decoding.

    Raises:
        ValueError: a negative distance.
    """

    label = "distance in token id"

    distance: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distance < 0:
            raise ValueError(f"a distance is 0 or more, found {self.distance}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """The tokens around the most probable one."""
        return (torch.arange(len(p), device=p.device) - p.argmax()).abs() <= self.distance
