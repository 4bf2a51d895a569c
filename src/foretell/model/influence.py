"""How much each sub-layer changes the residual stream: what can be left out of a draft."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.tree import root_tree
from foretell.model.decoder import BlockRange, SkipSet
from foretell.model.layout import Layout
from foretell.model.runner import Network


@dataclass(frozen=True)
class BlockInfluence:
    """Mean of 1 - cos(input, output) per layer, over the tokens of a text (block influence: Men et al., arXiv
    2403.03853).
    """

    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    block: tuple[float, ...]

    def least_influential_sublayers(self, sublayers: int) -> SkipSet:
        """The `sublayers` least influential attention and feed-forward parts; ties go to the later layer."""
        ranked = sorted(
            [(v, -i, "attention") for i, v in enumerate(self.attention)]
            + [(v, -i, "mlp") for i, v in enumerate(self.mlp)]
        )[:sublayers]
        return SkipSet(*(frozenset(-i for _, i, kind in ranked if kind == k) for k in ("attention", "mlp")))

    def least_influential_blocks(self, blocks: int) -> SkipSet:
        """The `blocks` least influential whole blocks; ties go to the later layer."""
        least = frozenset(-i for _, i in sorted((v, -i) for i, v in enumerate(self.block))[:blocks])
        return SkipSet(least, least)


@torch.inference_mode()
def measure_influence(network: Network, tokens: Sequence[int]) -> BlockInfluence:
    """Measure every sub-layer on a text, in one pass of the network and one of its attention parts alone.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"the influence of layers is measured on a text of at least 2 tokens, found {len(tokens)}")
    layers = network.config.layers
    attention_only = network.without_sublayers(SkipSet(mlp=frozenset(range(layers))))
    tree = root_tree(tokens[-1:]).with_prefix([tokens])
    layout, _ = Layout.from_tree(tree, [0], np.zeros(1, np.int64), tree.active)
    cache = network.new_cache()
    cache.reserve(1, len(tokens))
    x = network.embed(torch.from_numpy(tree.token[0]))
    found: list[tuple[float, float, float]] = []
    for i in range(layers):
        (middle,) = attention_only.run(x, layout, cache, BlockRange(i, i + 1)).hidden_states
        (after,) = network.run(x, layout, cache, BlockRange(i, i + 1)).hidden_states
        found.append((_turn(x, middle), _turn(middle, after), _turn(x, after)))
        x = after
    attention, mlp, block = zip(*found, strict=True)
    return BlockInfluence(attention, mlp, block)


def _turn(before: Float[torch.Tensor, "t d"], after: Float[torch.Tensor, "t d"]) -> float:
    return float(1 - torch.cosine_similarity(before.double(), after.double(), -1).mean())
