"""Drafters: what guesses the next tokens. One file per guesser."""

from foretell.draft.base import Continuation, Drafter, Nothing, Predictor, Retriever
from foretell.draft.cascade import Cascade
from foretell.draft.eagle import Eagle
from foretell.draft.heads import Heads
from foretell.draft.hybrid import Hybrid
from foretell.draft.jacobi import Jacobi
from foretell.draft.lookahead import Lookahead
from foretell.draft.lookup import Lookup
from foretell.draft.mix import Mix
from foretell.draft.model import DraftModel
from foretell.draft.online import Online
from foretell.draft.parallel import ParallelSampling
from foretell.draft.phrases import PhraseRetrieval
from foretell.draft.recycling import Recycling
from foretell.draft.rest import Rest
from foretell.draft.stages import Stages
from foretell.draft.suffix import Suffix
from foretell.draft.together import Together
from foretell.draft.translate import Translated

__all__ = [
    "Cascade",
    "Continuation",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Heads",
    "Hybrid",
    "Jacobi",
    "Lookahead",
    "Lookup",
    "Mix",
    "Nothing",
    "Online",
    "ParallelSampling",
    "PhraseRetrieval",
    "Predictor",
    "Recycling",
    "Rest",
    "Retriever",
    "Stages",
    "Suffix",
    "Together",
    "Translated",
]
