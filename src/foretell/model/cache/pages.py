"""Pages of keys, of which a decoded token attends to those that may matter most to it (Quest, arXiv 2406.10774).

The kernels do the same, and read the selected pages only; here the others are masked.
"""

import torch
from jaxtyping import Bool, Float

from foretell.model.cache.layout import PaddedLayout
from foretell.model.config.model import ModelConfig

PAGE = 16
"""Slots of a page; `kPage` of csrc/pages.h."""
RECENT = 64
"""Last slots, of which a token leaves none out; `kRecentSlots` of csrc/pages.h."""
LEAST_BUDGET = RECENT + 4 * PAGE
"""Least number of keys that a token attends to."""


def page_policy(config: ModelConfig) -> str:
    """The policy of a target whose tokens select pages; empty: they do not."""
    return f"quest@{config.page_budget}" if config.page_budget else ""


def optional_slots(position: int) -> int:
    """The first slots of a text, whole pages, which the token at a position may leave out."""
    return max(0, position + 1 - RECENT) // PAGE * PAGE


def page_bounds(
    queries: Float[torch.Tensor, "*b q e"], keys: Float[torch.Tensor, "*b n e"]
) -> Float[torch.Tensor, "*b q p"]:
    """Upper bounds of the scores in every page: the sum over dimensions of the larger product of a query with the least
    and the greatest number of the page's keys; `n` is a multiple of `PAGE`.
    """
    pages = keys.unflatten(-2, (-1, PAGE))
    least, most = pages.amin(-2), pages.amax(-2)
    bounds: Float[torch.Tensor, "*b q p"] = queries.clamp(min=0) @ most.mT + queries.clamp(max=0) @ least.mT
    return bounds


def selected_mask(
    queries: Float[torch.Tensor, "b h q n e"], keys: Float[torch.Tensor, "b h s e"], padded: PaddedLayout, budget: int
) -> Bool[torch.Tensor, "b h n s"]:
    """Which slots the tokens attend to, as far as they see them: the first page, the slots from `optional_slots` on,
    and of the pages between those with the highest bounds over the query heads of a group, so that it is `budget` keys
    in all. Tokens that do not select attend to all slots.
    """
    slots, position = keys.shape[2], padded.position[padded.token_index]
    seen = torch.ones(*queries.shape[:2], queries.shape[3], slots, dtype=torch.bool, device=keys.device)
    pages = slots // PAGE
    if not pages:
        return seen
    optional = (position + 1 - RECENT).clamp(min=0) // PAGE  # pages
    kept = (budget // PAGE - (position // PAGE + 1 - optional)).clamp(min=1).minimum(optional)
    whole = keys[:, :, : pages * PAGE].float()
    bounds = page_bounds(queries.float().flatten(2, 3), whole).unflatten(2, queries.shape[2:4]).amax(2)
    number = torch.arange(pages, device=keys.device)
    bounds = bounds.masked_fill(number == 0, float("inf"))
    bounds = bounds.masked_fill(number >= optional[:, None, :, None], float("-inf"))
    rank = torch.argsort(bounds, dim=-1, descending=True, stable=True).argsort(-1)
    chosen = (rank < kept[:, None, :, None]) | (number >= optional[:, None, :, None])
    chosen |= ~padded.in_pages[padded.token_index][:, None, :, None]
    seen[..., : pages * PAGE] = chosen.repeat_interleave(PAGE, -1)
    return seen
