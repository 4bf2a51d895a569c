"""Shapes: how a drafter's guesses become a token tree. One file per way to grow."""

from foretell.shape.adaptive import Adaptive, Schedule, Threshold
from foretell.shape.base import Growth, Root, Shape
from foretell.shape.beam import Beam
from foretell.shape.branch import Branch
from foretell.shape.chain import Chain
from foretell.shape.cost import PassCost
from foretell.shape.fallback import Fallback
from foretell.shape.fixed import Fixed
from foretell.shape.frugal import Frugal
from foretell.shape.measured import PathCounts
from foretell.shape.optimal import optimal
from foretell.shape.paced import Paced
from foretell.shape.trie import Trie

__all__ = [
    "Adaptive",
    "Beam",
    "Branch",
    "Chain",
    "Fallback",
    "Fixed",
    "Frugal",
    "Growth",
    "Paced",
    "PassCost",
    "PathCounts",
    "Root",
    "Schedule",
    "Shape",
    "Threshold",
    "Trie",
    "optimal",
]
