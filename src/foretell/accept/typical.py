"""Medusa's typical acceptance: anything probable enough stands. Changes the law."""

import math
from dataclasses import dataclass

import torch

from foretell.accept.base import Accepted, Acceptor
from foretell.laws import Laws
from foretell.tree import TokenTree


@dataclass(frozen=True)
class Typical(Acceptor):
    """Accepts x when p(x) > min(epsilon, delta * exp(-H(p))), H the entropy in nats (Medusa, arXiv 2401.10774). Lossy.

    The longest accepted path wins, ties by probability; the token after it is the target's own draw. `delta` None stands for sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float | None = None

    lossless = False
    same_seed = False

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"typical acceptance: epsilon lies in (0, 1], found {self.epsilon}")

    def threshold(self, entropy: float) -> float:
        """Least probability that is accepted where the target's entropy is `entropy` nats."""
        delta = math.sqrt(self.epsilon) if self.delta is None else self.delta
        return min(self.epsilon, delta * math.exp(-entropy))

    def accept(self, tree: TokenTree, row: int, laws: Laws) -> Accepted:
        """Walk all accepted paths of text `row`."""
        children, root = tree.children(row), int(tree.trunk[row]) - 1
        best: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
        queue: list[tuple[int, float, tuple[int, ...]]] = [(root, 0.0, ())]
        while queue:
            node, score, path = queue.pop()
            best = max(best, (len(path), score, path), key=lambda x: x[:2])
            if node not in children:
                continue
            p = laws.probabilities(row, node)
            least = self.threshold(float(-torch.special.xlogy(p, p).sum()))
            for child in children[node]:
                chance = float(p[int(tree.token[row, child])])
                if chance > least:
                    queue.append((child, score + math.log(chance), (*path, child)))
        path = best[2]
        return Accepted(path, laws.draw(row, path[-1] if path else root))
