"""Compresses models by pruning, low rank or fewer blocks: methods, calibration, and checkpoints with a card."""

from collections.abc import Callable, Mapping

from foretell.lab.compress.allocation import LOSS, OWL
from foretell.lab.compress.base import Compressor
from foretell.lab.compress.low_rank import ASVD, SVD, SVDLLM, LowRankCompressor
from foretell.lab.compress.pruning import Magnitude, Wanda
from foretell.lab.compress.sparsegpt import SparseGPT
from foretell.lab.compress.sparsity import Sparsity

SPARSEGPT = "sparsegpt"
"""The method whose weights that stay make up for those that are pruned."""
PRUNING: Mapping[str, Callable[[Sparsity], Compressor]] = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    SPARSEGPT: SparseGPT,
}
"""Methods that set weights to zero, by name."""
LOW_RANK: Mapping[str, Callable[[float], LowRankCompressor]] = {"svd": SVD, "asvd": ASVD, "svd_llm": SVDLLM}
"""Methods that replace matrices by products of two thin ones, by name; made of the share of the rank that is kept."""
SHORTGPT = "shortgpt"
"""The method that leaves out blocks."""
SLICEGPT = "slicegpt"
"""The method that rotates the residual stream and cuts it."""
LASER = "laser"
"""The method that lowers the rank of one matrix."""
LLM_PRUNER = "llm_pruner"
"""The method that removes heads and channels."""
METHODS = (*PRUNING, *LOW_RANK, SHORTGPT, SLICEGPT, LASER, LLM_PRUNER)
"""Names of all methods."""
ALLOCATIONS: Mapping[str, tuple[str, ...]] = {OWL: tuple(PRUNING), LOSS: ("svd_llm",)}
"""Ways to share an amount out among the blocks, with the methods that they are for."""

__all__ = ["ALLOCATIONS", "LASER", "LLM_PRUNER", "LOW_RANK", "METHODS", "PRUNING", "SHORTGPT", "SLICEGPT", "SPARSEGPT"]
