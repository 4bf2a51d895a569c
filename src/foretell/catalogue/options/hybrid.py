"""Options of retrieval beside a drafter."""

from typing import Annotated

from foretell.catalogue.options.fields import ExitLayer, OptionalRates, Tree, option
from foretell.catalogue.options.shared import HybridOptions


class HybridModelOptions(HybridOptions):
    """Retrieved continuations, and the options of the drafter beside them."""

    num_draft_tokens: Annotated[int, option("Most nodes of the trie of retrieved continuations.", ge=1, le=1024)] = 24
    num_speculative_tokens: Annotated[
        int | None, option("Draft tokens of the drafter. Unset: its own default; 5 for a draft model.", ge=1, le=256)
    ] = None
    confidence_threshold: Annotated[
        float | None, option("Option of the drafter. Unset: its own default; 0.4 for a draft model.", ge=0, le=1)
    ] = None
    eagle_topk: Annotated[int | None, option("Option of the drafter, where it has it.", ge=1)] = None
    num_steps: Annotated[int | None, option("Option of the drafter, where it has it.", ge=1)] = None
    acceptance: OptionalRates = None
    speculative_tree: Tree = None
    exit_layer: ExitLayer = None
