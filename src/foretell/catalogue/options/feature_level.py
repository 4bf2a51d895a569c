"""Options of the feature-level drafters."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.fields import NODES, STEPS, TOP_K, Depth, NodeConfidence, TreeSampling, option
from foretell.catalogue.options.shared import BeamOptions, FixedTreeOptions, TreeRejectionOptions


class FeatureTreeOptions(BeamOptions, FixedTreeOptions, TreeRejectionOptions):
    """A tree of a feature-level drafter."""

    num_draft_tokens: Annotated[
        int,
        option(
            "Most nodes of the draft tree. Unset, and confidence_threshold as well: as many as pay on this "
            "machine, at most 64; a fixed tree has 12.",
            *NODES,
            ge=1,
            le=1024,
        ),
    ] = 12
    confidence_threshold: NodeConfidence = 0.07
    draft_sample_method: TreeSampling = "greedy"

    _sampled_chain_options: ClassVar[tuple[str, ...]] = ("confidence_threshold",)
    """Options that a sampled chain reads and a sampled tree does not."""

    @model_validator(mode="after")
    def _fixed_or_dynamic(self) -> Self:
        if self.acceptance is not None:
            self._reject("acceptance asks for a fixed tree", "eagle_topk", "confidence_threshold")
        elif self.draft_sample_method == "probabilistic" and self.eagle_topk != 1:
            self._reject(
                "only a chain (eagle_topk 1) or a fixed tree can be sampled", "eagle_topk", *self._sampled_chain_options
            )
        return self


class MLPSpeculatorOptions(FeatureTreeOptions):
    """A tree of an MLP speculator; sampled drafts form a chain unless the tree is fixed."""

    _sampled_chain_options = ()

    num_steps: Annotated[int | None, option("Most levels of the tree. Unset: one for each stage.", *STEPS, ge=1)] = None


class DFlashOptions(MLPSpeculatorOptions):
    """A tree from the distributions of a block; sampled drafts form a chain unless the tree is fixed."""

    num_steps: Annotated[
        int | None, option("Most levels of the tree. Unset: as many as tokens that a block predicts.", *STEPS, ge=1)
    ] = None


class BeamSearchOptions(MethodOptions):
    """Beam search."""

    num_beams: Annotated[
        int, option("Sequences that are kept per level and verified together.", "num_beams", "beam_width", ge=1, le=64)
    ] = 4
    num_steps: Annotated[
        int | None, option("Length of the sequences. Unset: that which the speculator was trained for.", *STEPS, ge=1)
    ] = None


class EagleTreeOptions(FeatureTreeOptions):
    """EAGLE-2's and EAGLE-3's tree."""

    num_steps: Annotated[
        int | None,
        option(
            "Most levels of the tree. Unset: 8; where num_draft_tokens is set, 5 and one more for every 30 nodes.",
            *STEPS,
            ge=1,
        ),
    ] = None

    prompt_window: Annotated[
        int | None,
        option(
            "Last tokens of a prompt that the drafter reads: behind long prompts it may guess better and costs "
            "less. Unset: all.",
            ge=1,
        ),
    ] = None


class EagleOptions(FixedTreeOptions, TreeRejectionOptions):
    """EAGLE-1's fixed tree."""

    num_draft_tokens: Annotated[
        int | None,
        option("Nodes of the optimal fixed tree. Unset: the paper's tree of 25 nodes.", *NODES, ge=1, le=1024),
    ] = None
    eagle_topk: Annotated[Literal[1] | None, option("1: a chain.", *TOP_K)] = None
    num_steps: Depth = 5
    draft_sample_method: TreeSampling = "greedy"
