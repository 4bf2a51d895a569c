"""The rejection test of sampled drafts below many nodes at once, on the device of the distributions: the host waits for
the results of all nodes together, and walks down the trees by itself. `model.triton.acceptance` does the same.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int


class NodeDrafts(NamedTuple):
    """The sampled drafts below `m` nodes, at most `t` each, in the order in which they are tested."""

    draft: Int[torch.Tensor, "m t"]
    """Their tokens."""
    source: Int[torch.Tensor, "m t"]
    """The rows of the drafters' distributions that they were sampled from."""
    count: Int[torch.Tensor, " m"]
    distinct: Bool[torch.Tensor, " m"]
    """Whether they were drawn without replacement."""
    uniform: Float[torch.Tensor, "m u"]
    """Random numbers in [0, 1): one for every test, and the last one for the token after them; `u = t + 1`."""


class NodeTests(NamedTuple):
    """Results of the tests below `m` nodes."""

    accepted: Int[torch.Tensor, " m"]
    """The number of the accepted draft; -1: none."""
    token: Int[torch.Tensor, " m"]
    """The token after the node."""
    chance: Float[torch.Tensor, "m t 2"]
    """What each test compared, up to the accepted draft: the drafter's probability of the draft, and the target's."""
    left: Float[torch.Tensor, "m v"]
    """The distribution of the token after the refused drafts."""


def test_drafts(
    weights: Int[torch.Tensor, "r v"], place: Int[torch.Tensor, " m"], q: Float[torch.Tensor, "s v"], drafts: NodeDrafts
) -> NodeTests:
    """Accept each draft with probability min(1, p/q); after a rejection p becomes the normalised max(0, p - q), and
    where drafts are distinct their token leaves q. `weights[place[i]]`: those of the tokens after node `i`; see
    `distributions.sampler`.
    """
    p = weights[place] / weights[place].sum(-1, keepdim=True).double()
    accepted, chances = torch.full_like(place, -1, dtype=torch.int64), list[torch.Tensor]()
    draft, source = drafts.draft.long(), drafts.source.long()
    for t in range(draft.shape[1]):
        x = q[source[:, t]].double()
        if t:
            left = x.scatter(1, draft[:, :t], 0.0)
            total = left.sum(-1, keepdim=True)
            x = torch.where(drafts.distinct[:, None], torch.where(total > 0, left / total, left), x)
        chance = torch.cat([x.gather(1, draft[:, t : t + 1]), p.gather(1, draft[:, t : t + 1])], 1)
        chances.append(chance)
        is_tested = (accepted < 0) & (t < drafts.count)
        passes = is_tested & (drafts.uniform[:, t] * chance[:, 0] < chance[:, 1])
        accepted = torch.where(passes, t, accepted)
        left = (p - x).clamp_min(0)
        total = left.sum(-1, keepdim=True)
        p = torch.where((is_tested & ~passes)[:, None] & (total > 0), left / total, p)
    cumulative = p.cumsum(-1)
    sampled = (cumulative <= cumulative[:, -1:] * drafts.uniform[:, -1:]).sum(-1)
    last = p.shape[1] - 1 - (p > 0).flip(-1).long().argmax(-1)
    sampled = torch.where(sampled < p.shape[1], sampled, last)
    held = draft.gather(1, accepted.clamp(min=0)[:, None])[:, 0]
    return NodeTests(accepted, torch.where(accepted >= 0, held, sampled), torch.stack(chances, 1), p)
