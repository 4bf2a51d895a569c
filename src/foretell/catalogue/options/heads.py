"""Options of the methods that draft with heads on the target."""

from typing import Annotated, Self

from pydantic import model_validator

from foretell.catalogue.options.fields import TreeNodes, option
from foretell.catalogue.options.shared import FixedTreeOptions


class MedusaOptions(FixedTreeOptions):
    """The fixed tree of heads; by default the nodes that training measured as the most often accepted."""

    num_draft_tokens: TreeNodes = 8


class BlockwiseOptions(FixedTreeOptions):
    """A chain of heads, or a tree where an option asks for one."""

    num_speculative_tokens: Annotated[
        int | None, option("Most tokens of the chain. Unset: one for each head.", ge=0, le=256)
    ] = None
    num_draft_tokens: Annotated[int | None, option("Nodes of a tree, which replaces the chain.", ge=1, le=1024)] = None

    @property
    def is_tree(self) -> bool:
        """Whether an option asks for a tree."""
        return any(v is not None for v in (self.num_draft_tokens, self.acceptance, self.speculative_tree))

    @model_validator(mode="after")
    def _chain_or_tree(self) -> Self:
        if self.is_tree:
            self._reject("a tree was asked for, whose size is num_draft_tokens", "num_speculative_tokens")
        return self
