"""Acceptors: rules that decide which drafted tokens are accepted. One file per rule."""

from foretell.accept.base import Acceptor, AcceptResult
from foretell.accept.bild import BiLDRollback
from foretell.accept.block import BlockVerification
from foretell.accept.blockwise import DistanceAcceptor, TopKAcceptor
from foretell.accept.early_exit import AcceptExits, AcceptReduced
from foretell.accept.fidelity import FidelityLoss, TokenFidelity
from foretell.accept.greedy_block import GreedyBlockVerification
from foretell.accept.lenient import LenientRejection
from foretell.accept.lossy import LossyAcceptor
from foretell.accept.match import Match
from foretell.accept.rejection import Rejection
from foretell.accept.spectr import KSequentialSelection
from foretell.accept.synthetic import SyntheticAcceptance
from foretell.accept.traversal import TraversalVerification
from foretell.accept.typical import TypicalAcceptance

__all__ = [
    "AcceptExits",
    "AcceptReduced",
    "AcceptResult",
    "Acceptor",
    "BiLDRollback",
    "BlockVerification",
    "DistanceAcceptor",
    "FidelityLoss",
    "GreedyBlockVerification",
    "KSequentialSelection",
    "LenientRejection",
    "LossyAcceptor",
    "Match",
    "Rejection",
    "SyntheticAcceptance",
    "TokenFidelity",
    "TopKAcceptor",
    "TraversalVerification",
    "TypicalAcceptance",
]
