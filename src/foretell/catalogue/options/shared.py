"""Options of parts that several families have: chains, fixed and dynamic trees, tries."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.fields import (
    BeamWidth,
    ChainConfidence,
    ChainLength,
    DraftSampling,
    NodeConfidence,
    OptionalRates,
    Schedule,
    Tree,
    TreeNodes,
    TrieConfidence,
    TrieNodes,
    option,
)

_TREE_SIZES = (
    "num_draft_tokens",
    "num_speculative_tokens",
    "num_steps",
    "eagle_topk",
    "acceptance",
    "confidence_threshold",
)


class FixedTreeOptions(MethodOptions):
    """A fixed tree, by its paths or by acceptance rates."""

    acceptance: OptionalRates = None
    speculative_tree: Tree = None

    @model_validator(mode="after")
    def _one_tree(self) -> Self:
        if self.speculative_tree is not None:
            self._reject("speculative_tree names every node of the tree", *_TREE_SIZES)
        return self

    def _reject(self, reason: str, *names: str) -> None:
        unread = [name for name in names if self.is_set(name)]
        if unread:
            raise ValueError(f"{reason}, so {' and '.join(unread)} would not be read: leave that out")


class RejectionOptions(MethodOptions):
    """How sampled drafts are accepted."""

    rejection_sample_method: Annotated[
        Literal["standard", "block"], option("Rejection sampling token by token, or block verification.")
    ] = "standard"


class TreeRejectionOptions(MethodOptions):
    """How trees of sampled drafts are accepted."""

    rejection_sample_method: Annotated[
        Literal["standard", "traversal"],
        option(
            "How sampled drafts are accepted: token by token from the root (standard), or by traversal "
            "verification, which tests paths jointly from the leaves."
        ),
    ] = "standard"


class ChainOptions(MethodOptions):
    """A draft chain."""

    num_speculative_tokens: ChainLength = 5
    confidence_threshold: ChainConfidence = 0.0
    draft_sample_method: DraftSampling = "probabilistic"
    num_assistant_tokens_schedule: Schedule = "constant"


class TrieOptions(MethodOptions):
    """A trie of retrieved continuations."""

    num_speculative_tokens: TrieNodes = 8
    confidence_threshold: TrieConfidence = 0.1


class HybridOptions(MethodOptions):
    """A trie of retrieved continuations of the most profitable size."""

    num_draft_tokens: TreeNodes = 24


class BeamOptions(MethodOptions):
    """A dynamic tree: nodes are expanded where the drafter is confident."""

    num_draft_tokens: TreeNodes = 16
    eagle_topk: BeamWidth = None
    confidence_threshold: NodeConfidence = 0.01
