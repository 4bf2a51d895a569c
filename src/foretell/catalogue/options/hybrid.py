"""Options of retrieval beside a drafter."""

from typing import Annotated

from pydantic import Field

from foretell.catalogue.options.fields import ExitLayer, OptionalRates, Tree
from foretell.catalogue.options.shared import HybridOptions


class HybridModelOptions(HybridOptions):
    """Retrieved continuations, and the options of the drafter beside them."""

    num_draft_tokens: Annotated[
        int, Field(ge=1, le=1024, description="Most nodes of the trie of retrieved continuations.")
    ] = 24
    num_speculative_tokens: Annotated[
        int | None,
        Field(ge=1, le=256, description="Draft tokens of the drafter. Unset: its own default; 5 for a draft model."),
    ] = None
    confidence_threshold: Annotated[
        float | None,
        Field(ge=0, le=1, description="Option of the drafter. Unset: its own default; 0.4 for a draft model."),
    ] = None
    eagle_topk: Annotated[int | None, Field(ge=1, description="Option of the drafter, where it has it.")] = None
    num_steps: Annotated[int | None, Field(ge=1, description="Option of the drafter, where it has it.")] = None
    acceptance: OptionalRates = None
    speculative_tree: Tree = None
    exit_layer: ExitLayer = None
