"""Options of the methods that draft with a cheaper version of the target."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from foretell.catalogue.options.draft_model import DraftModelOptions
from foretell.catalogue.options.fields import TOP_K, ChainConfidence, ChainLength, DraftSampling, ExitLayer, option
from foretell.catalogue.options.shared import RejectionOptions


class SelfDraftOptions(DraftModelOptions):
    """A chain of a cheaper version of the target."""

    num_speculative_tokens: ChainLength = 4
    confidence_threshold: ChainConfidence = 0.4


class LayerSkipOptions(SelfDraftOptions):
    """The target's first blocks."""

    exit_layer: ExitLayer = None
    exit_threshold: Annotated[
        float | None,
        option(
            "With fitted exits: a token is drafted by the first exit whose two largest probabilities differ by "
            "more than this, at the latest by the one after `exit_layer`. Unset: by that one.",
            ge=0,
            le=1,
        ),
    ] = None

    fallback_threshold: Annotated[
        float | None,
        option(
            "A chain ends before a token to which the exit gives a smaller probability. Unset: with fitted exits, "
            "which need not draft at every token, 0.3 to 0.6 by what a draft costs; else 0.",
            ge=0,
            le=1,
        ),
    ] = None
    exit_weights: Annotated[
        Literal["target", "int8", "int4"],
        option(
            "Weights of the exit's layers and blocks in drafts: the target's, or a copy in fewer bits with a cache "
            "of its own (CPU kernels)."
        ),
    ] = "target"
    eagle_topk: Annotated[
        int | None,
        option(
            "Nodes per level of a dynamic tree that are expanded, and children of each; such a tree takes the "
            "place of the chain, with num_speculative_tokens levels. Unset: a chain.",
            *TOP_K,
            ge=1,
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None, option("Most nodes of this tree. Unset: as many as pay, by measured times.", ge=1, le=1024)
    ] = None

    @model_validator(mode="after")
    def _one_exit(self) -> Self:
        tree = self.eagle_topk is not None
        if self.num_draft_tokens is not None and not tree:
            raise ValueError("num_draft_tokens is the size of a tree, and without eagle_topk the drafts are a chain")
        if self.exit_threshold is not None and (tree or self.exit_weights != "target"):
            raise ValueError("exit_threshold lets every token choose its exit; eagle_topk and exit_weights need one")
        chain = ("confidence_threshold", "fallback_threshold", "num_assistant_tokens_schedule", "draft_sample_method")
        unread = [name for name in chain if tree and self.is_set(name)]
        if unread:
            raise ValueError(f"{' and '.join(unread)} would not be read: with eagle_topk the drafts are a tree")
        return self


class SelfSpeculativeOptions(RejectionOptions):
    """The target without some sub-layers."""

    num_speculative_tokens: ChainLength = 8
    confidence_threshold: Annotated[
        float,
        option(
            "A chain ends with the first token to which the drafter gives a smaller probability; adjusted per "
            "request towards an acceptance rate of 0.9.",
            ge=0,
            le=1,
        ),
    ] = 0.8
    draft_sample_method: DraftSampling = "probabilistic"
    skip_set: Annotated[
        str | None,
        option(
            "File written by `foretell tune skip` with the sub-layers to leave out. Unset: the attention of every "
            "second middle block."
        ),
    ] = None


class QuantisedDraftOptions(SelfDraftOptions):
    """The quantised target."""

    quantization_bits: Annotated[
        int, option("Bits of the draft's weights; fewer than 8 are simulated.", ge=2, le=8)
    ] = 8
    quantization_group: Annotated[
        int, option("Input columns that share a scale in a simulated quantisation; 0: all.", ge=0)
    ] = 64


class PrunedDraftOptions(SelfDraftOptions):
    """The target without some blocks."""

    pruned_layers: Annotated[
        int | None, option("Blocks to leave out, least influential first. Unset: a quarter of them.", ge=0)
    ] = None


class SparseMlpDraftOptions(SelfDraftOptions):
    """The target with the neurons that its tokens choose."""

    sparsity: Annotated[
        str,
        option(
            "Directory of `foretell calibrate sparsity` or `foretell train sparsity`, which says what a token "
            "reads. Required."
        ),
    ] = ""


class MatFormerDraftOptions(SelfDraftOptions):
    """The target with its first neurons."""

    neuron_share: Annotated[float, option("Share of the neurons of every layer that the draft reads.", gt=0, le=1)] = (
        0.5
    )
