"""The approximate acceptance criteria of blockwise parallel decoding. They change the text."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor


@dataclass(frozen=True)
class TopKAcceptor(LossyAcceptor):
    """Tolerates the `count` most probable tokens of the target (Stern et al., arXiv 1811.03115, 5.1); 1 is greedy
    decoding. Lossy.
    """

    label = "the target's top k"

    count: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise ValueError(f"at least the best token must be tolerated, found the best {self.count}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """The best tokens, never an impossible one."""
        best = torch.zeros_like(p, dtype=torch.bool)
        best[p.topk(min(self.count, len(p))).indices] = True
        return best & (p > 0)


@dataclass(frozen=True)
class DistanceAcceptor(LossyAcceptor):
    """Tolerates tokens whose number is at most `distance` from that of the target's best one: for ordered vocabularies,
    such as pixel intensities.

    Stern et al. (arXiv 1811.03115, 5.2); 0 is greedy decoding. Lossy.
    """

    label = "distance in token number"

    distance: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distance < 0:
            raise ValueError(f"a distance is 0 or more, found {self.distance}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """The tokens around the best."""
        return (torch.arange(len(p), device=p.device) - p.argmax()).abs() <= self.distance
