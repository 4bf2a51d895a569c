"""Acceptors: which drafts stand. One file per rule."""

from foretell.accept.base import Accepted, Acceptor
from foretell.accept.block import Block
from foretell.accept.blockwise import Near, Topmost
from foretell.accept.lenient import Lenient
from foretell.accept.match import Match
from foretell.accept.price import Price, Toll
from foretell.accept.rejection import Rejection
from foretell.accept.rollback import Rollback
from foretell.accept.tolerant import Tolerant
from foretell.accept.transport import Transport
from foretell.accept.typical import Typical

__all__ = [
    "Accepted",
    "Acceptor",
    "Block",
    "Lenient",
    "Match",
    "Near",
    "Price",
    "Rejection",
    "Rollback",
    "Tolerant",
    "Toll",
    "Topmost",
    "Transport",
    "Typical",
]
