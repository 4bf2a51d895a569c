"""Mixture-of-experts feed-forward network (Shazeer et al., arXiv 1701.06538; Mixtral, arXiv 2401.04088).

Dropless: a token's result does not depend on the other tokens of the pass.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.config import MoEConfig
from foretell.model.linear import Linear, widen


class ExpertFeedForward(nn.Module):
    """Router, experts and the optional shared expert of one block.

    `gate_up` is `[experts, 2 * ffn, hidden]` (gate rows first), `down` `[experts, hidden, ffn]`.
    """

    def __init__(
        self,
        experts: MoEConfig,
        router: Linear,
        gate_up: Float[torch.Tensor, "e f2 d"],
        down: Float[torch.Tensor, "e d f"],
        shared: tuple[Linear, Linear, Linear | None] | None = None,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.router = router
        self.gate_up = nn.ModuleList(Linear(weight) for weight in gate_up)
        self.down = nn.ModuleList(Linear(weight) for weight in down)
        modules: tuple[Linear | None, Linear | None, Linear | None] = shared or (None, None, None)
        self.shared_gate_up, self.shared_down, self.shared_gate = modules

    def route(self, x: Float[torch.Tensor, "t d"]) -> tuple[Float[torch.Tensor, "t k"], Int[torch.Tensor, "t k"]]:
        """Weights and indices of the experts of each token."""
        weight, index = torch.softmax(widen(self.router(x)), -1).topk(self.experts.active, -1)
        return (weight / weight.sum(-1, keepdim=True) if self.experts.renormalize else weight), index

    def forward(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """Weighted sum of each token's experts, plus the shared expert."""
        return self.forward_counting_experts(x)[0]

    def forward_counting_experts(self, x: Float[torch.Tensor, "t d"]) -> tuple[Float[torch.Tensor, "t d"], int]:
        """The output of `forward`, and the number of distinct experts it read."""
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        used = index.unique().tolist()
        for expert in used:
            token, place = torch.nonzero(index == expert, as_tuple=True)
            gate, up = self.gate_up[expert](x[token]).chunk(2, -1)
            part = self.down[expert](F.silu(gate) * up)
            out.index_add_(0, token, part * weight[token, place, None].to(x.dtype))
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(x).chunk(2, -1)
            part = self.shared_down(F.silu(gate) * up)
            out = out + (part if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * part)
        return out, len(used)
