"""Drafters: they propose the next tokens. One file per drafter."""

from foretell.draft.assistant import AssistantDrafter
from foretell.draft.base import Continuation, Drafter, NoDrafter, Predictor, Retriever
from foretell.draft.cascade import CascadeDrafter
from foretell.draft.combined import CombinedRetriever
from foretell.draft.cross_tokenizer import CrossTokenizerDrafter
from foretell.draft.datastore import DatastoreRetriever
from foretell.draft.dflash import DFlashDrafter
from foretell.draft.draft_model import DraftModel
from foretell.draft.eagle import EagleDrafter, MTPDrafter
from foretell.draft.early_exit import EarlyExitDrafter
from foretell.draft.heads import HeadsDrafter
from foretell.draft.hybrid import HybridDrafter
from foretell.draft.jacobi import JacobiDrafter
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.masked_diffusion import MaskedDiffusionDrafter
from foretell.draft.mlp_speculator import MLPSpeculatorDrafter, ReDrafterDrafter
from foretell.draft.mtp_modules import MTPModulesDrafter
from foretell.draft.online import OnlineDrafter
from foretell.draft.p_eagle import PEagleDrafter
from foretell.draft.parallel_sampling import ParallelDrafter
from foretell.draft.pard import Pard2Drafter, PardDrafter
from foretell.draft.phrases import PhraseRetriever
from foretell.draft.prompt_lookup import PromptLookup
from foretell.draft.recycling import TokenRecycling
from foretell.draft.skip_decode import SkipDecodeDrafter
from foretell.draft.sparse_cache import SparseCacheDrafter
from foretell.draft.sparse_target import SparseTargetDrafter, UnoDrafter
from foretell.draft.suffix import SuffixRetriever
from foretell.draft.union import DrafterUnion

__all__ = [
    "AssistantDrafter",
    "CascadeDrafter",
    "CombinedRetriever",
    "Continuation",
    "CrossTokenizerDrafter",
    "DFlashDrafter",
    "DatastoreRetriever",
    "DraftModel",
    "Drafter",
    "DrafterUnion",
    "EagleDrafter",
    "EarlyExitDrafter",
    "HeadsDrafter",
    "HybridDrafter",
    "JacobiDrafter",
    "LookaheadDrafter",
    "MLPSpeculatorDrafter",
    "MTPDrafter",
    "MTPModulesDrafter",
    "MaskedDiffusionDrafter",
    "NoDrafter",
    "OnlineDrafter",
    "PEagleDrafter",
    "ParallelDrafter",
    "Pard2Drafter",
    "PardDrafter",
    "PhraseRetriever",
    "Predictor",
    "PromptLookup",
    "ReDrafterDrafter",
    "Retriever",
    "SkipDecodeDrafter",
    "SparseCacheDrafter",
    "SparseTargetDrafter",
    "SuffixRetriever",
    "TokenRecycling",
    "UnoDrafter",
]
