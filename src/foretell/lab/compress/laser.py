"""LASER: one matrix of a late block is cut to a low rank, where that predicts a text best (Sharma et al., arXiv
2312.13558). It aims at accuracy: the matrix is stored dense, and no pass is cheaper.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from foretell.lab.compress.low_rank import rank_of
from foretell.lab.quantize.base import Role, linears
from foretell.lab.quantize.calibration import BlocksOnText, run_block
from foretell.lab.quantize.job import Source
from foretell.model.block.decoder import decoder_rope_tables
from foretell.model.block.layer import DecoderBlock
from foretell.model.load.build import build_without_blocks

Tensor = torch.Tensor
SHARES = (0.75, 0.5, 0.25, 0.1, 0.05, 0.01)
"""Shares of the full rank that are tried."""
_ROLES: tuple[Role, ...] = ("gate_up", "down")
"""The feed-forward matrices, where the paper finds its gains."""
_CHUNK = 256
"""Positions whose logits are computed at once."""


@dataclass(frozen=True)
class Reduction:
    """A matrix at a share of its rank, and the mean cross-entropy on the text in nats with it and without."""

    block: int
    role: Role
    share: float
    loss: float
    loss_before: float

    @property
    def amount(self) -> str:
        """In words."""
        return (
            f"{self.role} of block {self.block} at rank share {self.share:g} (loss on the calibration text "
            f"{self.loss:.4f}, before {self.loss_before:.4f})"
        )


@torch.inference_mode()
def best_reduction(
    source: Source, tokens: Int[Tensor, "b s"], shares: tuple[float, ...], progress: Callable[[int], None]
) -> tuple[Reduction, DecoderBlock]:
    """Try the feed-forward matrices of the last third of the blocks at every share; the best of all, and its block.

    `progress` is called with the number of blocks done.
    """
    late = _LateBlocks(source, tokens)
    before, reductions = late.loss(late.first, late.blocks[0]), list[Reduction]()
    progress(late.first)
    for i, block in enumerate(late.blocks, late.first):
        for role in _ROLES:
            for share, matrix in _truncations(linears(block)[role].weight.data, shares):
                whole = linears(block)[role].weight.data
                linears(block)[role].weight.data = matrix
                reductions.append(Reduction(i, role, share, late.loss(i, block), before))
                linears(block)[role].weight.data = whole
        progress(i + 1)
    best = min(reductions, key=lambda r: r.loss)
    block = late.blocks[best.block - late.first]
    linear = linears(block)[best.role]
    ((_, linear.weight.data),) = _truncations(linear.weight.data, (best.share,))
    return best, block


def _truncations(
    weight: Float[Tensor, "o i"], shares: tuple[float, ...]
) -> Iterator[tuple[float, Float[Tensor, "o i"]]]:
    """The nearest matrices of these shares of the rank."""
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    for share in shares:
        rank = rank_of(share, *weight.shape)
        yield share, ((left[:, :rank] * values[:rank]) @ right[:rank]).to(weight.dtype)


class _LateBlocks:
    """The last third of the blocks, what each of them reads on a text, and what follows them."""

    def __init__(self, source: Source, tokens: Int[Tensor, "b s"]) -> None:
        c = self._config = source.config
        self._tokens, self._ropes = tokens, decoder_rope_tables(c)
        self._shell = build_without_blocks(c, source.weights, torch.float32, torch.device("cpu"))
        self.first = min(c.layers - 1, c.layers - c.layers // 3)
        self.blocks, self._inputs = list[DecoderBlock](), list[Float[Tensor, "b s d"]]()
        walk = BlocksOnText(c, source.weights, self._shell.embed(tokens.flatten()).view(*tokens.shape, -1))
        for i, block in walk:
            if i >= self.first and walk.states is not None:
                self.blocks.append(block)
                self._inputs.append(walk.states)

    def loss(self, i: int, block: DecoderBlock) -> float:
        """Mean cross-entropy of the text with this block in the place of block `i`."""
        x = run_block(self._config, self._ropes, i, block, self._inputs[i - self.first])
        for j, later in enumerate(self.blocks[i - self.first + 1 :], i + 1):
            x = run_block(self._config, self._ropes, j, later, x)
        states, targets = self._shell.final_norm(x)[:, :-1].flatten(0, 1), self._tokens[:, 1:].flatten()
        total = 0.0
        for at in range(0, len(targets), _CHUNK):
            logits = self._shell.head(states[at : at + _CHUNK])
            total += float(torch.nn.functional.cross_entropy(logits, targets[at : at + _CHUNK], reduction="sum"))
        return total / len(targets)
