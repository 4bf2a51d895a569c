"""Block influence: how much each sub-layer changes the residual stream, to choose what a self-draft skips."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.tree import root_tree
from foretell.model.block.decoder import BlockRange, SkipSet
from foretell.model.cache.layout import Layout
from foretell.model.run.network import Network


@dataclass(frozen=True)
class BlockInfluence:
    """Mean of 1 - cos(input, output) per layer over the tokens of a sequence (ShortGPT, arXiv 2403.03853)."""

    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    block: tuple[float, ...]

    def least_influential_sublayers(self, count: int) -> SkipSet:
        """The attention and feed-forward sub-layers of least influence; ties go to the later layer."""
        ranked = sorted(
            [(v, -i, "attention") for i, v in enumerate(self.attention)]
            + [(v, -i, "mlp") for i, v in enumerate(self.mlp)]
        )[:count]
        return SkipSet(*(frozenset(-i for _, i, kind in ranked if kind == k) for k in ("attention", "mlp")))

    def least_influential_blocks(self, count: int) -> SkipSet:
        """Both sub-layers of the blocks of least influence; ties go to the later layer."""
        least = frozenset(-i for _, i in sorted((v, -i) for i, v in enumerate(self.block))[:count])
        return SkipSet(least, least)


@torch.inference_mode()
def measure_influence(network: Network, tokens: Sequence[int]) -> BlockInfluence:
    """Measure every sub-layer on a sequence, in one pass of the network and one of its attention sub-layers alone.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"the influence of layers is measured on a sequence of at least 2 tokens, found {len(tokens)}")
    layers = network.config.layers
    attention_only = network.without_sublayers(SkipSet(mlp=frozenset(range(layers))))
    tree = root_tree(tokens[-1:]).with_prefix([tokens])
    layout, _ = Layout.from_tree(tree, [0], np.zeros(1, np.int64), tree.active)
    cache = network.new_cache()
    cache.reserve([0], [len(tokens)])
    cache.begin([0], [0], [len(tokens)], len(tokens))
    x = network.embed(torch.from_numpy(tree.token[0]))
    distances: list[tuple[float, float, float]] = []
    for i in range(layers):
        (middle,) = attention_only.run(x, layout, cache, BlockRange(i, i + 1)).hidden_states
        (after,) = network.run(x, layout, cache, BlockRange(i, i + 1)).hidden_states
        distances.append((_cosine_distance(x, middle), _cosine_distance(middle, after), _cosine_distance(x, after)))
        x = after
    attention, mlp, block = zip(*distances, strict=True)
    return BlockInfluence(attention, mlp, block)


def _cosine_distance(before: Float[torch.Tensor, "t d"], after: Float[torch.Tensor, "t d"]) -> float:
    return float(1 - torch.cosine_similarity(before.double(), after.double(), -1).mean())
