"""Options of the methods that draft with a draft model."""

from typing import Annotated, Literal

from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.fields import (
    NODES,
    TOP_K,
    ChainConfidence,
    ChainLength,
    Depth,
    Rates,
    TreeNodes,
    TreeSampling,
    option,
)
from foretell.catalogue.options.shared import (
    BeamOptions,
    ChainOptions,
    FixedTreeOptions,
    RejectionOptions,
    TreeRejectionOptions,
)

_RATES_OF_RANKS = [0.6, 0.15, 0.07, 0.04, 0.025, 0.02, 0.015, 0.01]
"""Acceptance rate per rank of a draft model where none was measured."""


class DraftModelOptions(ChainOptions, RejectionOptions):
    """A chain of a draft model with rejection sampling."""


class UniversalDraftOptions(MethodOptions):
    """A draft model with another tokenizer."""

    num_speculative_tokens: Annotated[int, option("Most draft tokens, in tokens of the draft model.", ge=1, le=256)] = 6
    confidence_threshold: ChainConfidence = 0.3


class LLMCadOptions(MethodOptions):
    """LLMCad's tree."""

    num_draft_tokens: TreeNodes = 16
    confidence_threshold: Annotated[
        float,
        option(
            "Drafting ends where the best path has a smaller probability; halved after a step in which every draft "
            "was right, raised after any other.",
            gt=0,
            le=1,
        ),
    ] = 0.01


class SpecInferOptions(TreeRejectionOptions):
    """A tree with fixed branching."""

    num_draft_tokens: Annotated[
        int,
        option(
            "Most nodes of the tree, whose levels branch by 2 (or one per draft model), 2, 1, 1 and so on.",
            *NODES,
            ge=1,
            le=256,
        ),
    ] = 10


class SpecTrOptions(MethodOptions):
    """Independent chains."""

    eagle_topk: Annotated[int, option("Independent chains (k).", *TOP_K, ge=1)] = 4
    num_steps: Annotated[
        int,
        option("Tokens of each chain.", "num_steps", "num_speculative_tokens", "speculative_num_steps", ge=1, le=256),
    ] = 4
    rejection_sample_method: Annotated[
        Literal["optimal_transport", "greedy_block", "traversal"],
        option(
            "How the chains are accepted: SpecTr's optimal transport token by token, greedy block verification of "
            "the best chain, or traversal verification from the leaves."
        ),
    ] = "optimal_transport"


class SequoiaOptions(FixedTreeOptions, TreeRejectionOptions):
    """The optimal fixed tree for its number of nodes."""

    num_draft_tokens: TreeNodes = 16
    num_steps: Depth = 6
    acceptance: Rates = _RATES_OF_RANKS
    draft_sample_method: TreeSampling = "greedy"


class DynamicTreeOptions(BeamOptions):
    """A dynamic tree of a draft model."""

    num_steps: Depth = 5


class OnlineOptions(MethodOptions):
    """A draft model that keeps learning."""

    num_speculative_tokens: ChainLength = 5
    confidence_threshold: ChainConfidence = 0.0
    online_update_interval: Annotated[int, option("Requests between two optimiser steps; 0: no learning.", ge=0)] = 8
    online_buffer: Annotated[int, option("Most corrections kept to learn from.", ge=1)] = 2048
    online_learning_rate: Annotated[float, option("Learning rate of AdamW, constant.", gt=0)] = 1e-4
