"""Shapes: how a drafter's tokens are arranged into a token tree. One file per shape."""

from foretell.shape.base import RootOnly, Shape, TreeBuilder
from foretell.shape.beam_search import BeamSearch
from foretell.shape.branching_tree import BranchingTree
from foretell.shape.chain import Chain
from foretell.shape.dynamic_tree import DynamicTree
from foretell.shape.fixed_tree import FixedTree
from foretell.shape.hybrid_tree import HybridTree
from foretell.shape.llmcad import LLMCadTree
from foretell.shape.optimal_tree import optimal_tree
from foretell.shape.trie import Trie

__all__ = [
    "BeamSearch",
    "BranchingTree",
    "Chain",
    "DynamicTree",
    "FixedTree",
    "HybridTree",
    "LLMCadTree",
    "RootOnly",
    "Shape",
    "TreeBuilder",
    "Trie",
    "optimal_tree",
]
