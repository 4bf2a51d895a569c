"""Acceptors: which drafts stand. One file per rule."""

from foretell.accept.base import Accepted, Acceptor
from foretell.accept.block import Block
from foretell.accept.match import Match
from foretell.accept.rejection import Rejection
from foretell.accept.typical import Typical

__all__ = ["Accepted", "Acceptor", "Block", "Match", "Rejection", "Typical"]
