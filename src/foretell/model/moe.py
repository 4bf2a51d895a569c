"""Mixture-of-experts feed-forward (Shazeer et al., arXiv 1701.06538; Mixtral, arXiv 2401.04088), dropless: no token
depends on its company.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.config import MoEConfig
from foretell.model.linear import Linear, widen


class ExpertFeedForward(nn.Module):
    """Router, experts and the optional shared expert of one block.

    `gate_up` is `[experts, 2 * ffn, hidden]` (gate rows first), `down` `[experts, hidden, ffn]`; each becomes one
    matrix per expert.
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
        parts: tuple[Linear | None, Linear | None, Linear | None] = shared or (None, None, None)
        self.shared_gate_up, self.shared_down, self.shared_gate = parts

    def route(self, x: Float[torch.Tensor, "t d"]) -> tuple[Float[torch.Tensor, "t k"], Int[torch.Tensor, "t k"]]:
        """Weight and index of the experts that each token visits."""
        weight, index = torch.softmax(widen(self.router(x)), -1).topk(self.experts.active, -1)
        return (weight / weight.sum(-1, keepdim=True) if self.experts.renormalize else weight), index

    def forward(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """Weighted sum of the visited experts, plus the shared one."""
        return self.visit(x)[0]

    def visit(self, x: Float[torch.Tensor, "t d"]) -> tuple[Float[torch.Tensor, "t d"], int]:
        """What `forward` gives, and how many distinct experts were read for it."""
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        visited = index.unique().tolist()
        for expert in visited:
            token, place = torch.nonzero(index == expert, as_tuple=True)
            gate, up = self.gate_up[expert](x[token]).chunk(2, -1)
            part = self.down[expert](F.silu(gate) * up)
            out.index_add_(0, token, part * weight[token, place, None].to(x.dtype))
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(x).chunk(2, -1)
            part = self.shared_down(F.silu(gate) * up)
            out = out + (part if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * part)
        return out, len(visited)
