"""Mixture-of-experts feed-forward network (Shazeer et al., arXiv 1701.06538; Mixtral, arXiv 2401.04088).

Dropless: a token's result does not depend on the other tokens of the pass.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import nn

from foretell.model.block.activation import activated
from foretell.model.block.linear import Linear, widen
from foretell.model.config.model import Activation, MoEConfig

_LEAST_SUM = 1e-20
"""Added to the sum of a token's weights before they are divided by it (as in transformers)."""


class ExpertFeedForward(nn.Module):
    """Router, experts and the optional shared expert of one block; gate rows, if there are any, come before up rows.

    `selection_bias`: added to the router's scores where experts are chosen, but not to their weights (DeepSeek-V3,
    arXiv 2412.19437). `shared`: gate and up, down, and the gate of the shared expert.
    `expert_scale`: a factor on the weights of each expert.
    """

    def __init__(
        self,
        experts: MoEConfig,
        router: Linear,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        shared: tuple[Linear, Linear, Linear | None] | None = None,
        selection_bias: Float[torch.Tensor, " e"] | None = None,
        activation: Activation = "silu",
        expert_scale: Float[torch.Tensor, " e"] | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.activation = experts, activation
        self.router = router
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)
        modules: tuple[Linear | None, Linear | None, Linear | None] = shared or (None, None, None)
        self.shared_gate_up, self.shared_down, self.shared_gate = modules
        self.selection_bias = None if selection_bias is None else nn.Parameter(selection_bias, requires_grad=False)
        self.expert_scale = None if expert_scale is None else nn.Parameter(expert_scale, requires_grad=False)

    def route(self, x: Float[torch.Tensor, "t d"]) -> tuple[Float[torch.Tensor, "t k"], Int[torch.Tensor, "t k"]]:
        """Weights and indices of the experts of each token."""
        c, logits = self.experts, widen(self.router(x))
        score = torch.sigmoid(logits) if c.scoring == "sigmoid" else torch.softmax(logits, -1)
        # Large logits have equal sigmoids, so that logits decide where nothing is added to the scores.
        plain = logits if c.scoring == "sigmoid" else score
        wanted = plain if self.selection_bias is None else score + self.selection_bias.to(score.dtype)
        index = self._exclude_groups(wanted).topk(c.active, -1).indices
        weight = score.gather(-1, index)
        if c.renormalize:
            weight = weight / (weight.sum(-1, keepdim=True) + _LEAST_SUM)
        if self.expert_scale is not None:
            weight = weight * self.expert_scale[index].to(weight.dtype)
        return (weight if c.scale == 1 else weight * c.scale), index

    def _exclude_groups(self, score: Float[torch.Tensor, "t e"]) -> Float[torch.Tensor, "t e"]:
        """The scores, -infinity outside the best groups: those with the largest sum of their best experts' scores."""
        c = self.experts
        if c.active_groups == c.groups:
            return score
        groups = score.view(len(score), c.groups, -1)
        best = groups.topk(c.ranked_by, -1).values.sum(-1).topk(c.active_groups, -1).indices
        excluded = torch.ones(len(score), c.groups, dtype=torch.bool, device=score.device).scatter(1, best, False)
        return groups.masked_fill(excluded[:, :, None], float("-inf")).flatten(1)

    def forward(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """Weighted sum of each token's experts, plus the shared expert."""
        return self.forward_with_routes(x)[0]

    def forward_with_routes(
        self, x: Float[torch.Tensor, "t d"], router_input: Float[torch.Tensor, "t d"] | None = None
    ) -> tuple[Float[torch.Tensor, "t d"], Int[torch.Tensor, "t k"]]:
        """The output of `forward`, and every token's experts; `router_input`: None: `x`."""
        weight, index = self.route(x if router_input is None else router_input)
        out = torch.zeros_like(x)
        for expert in index.unique().tolist():
            token, place = torch.nonzero(index == expert, as_tuple=True)
            own = weight[token, place, None].to(x.dtype)
            if self.experts.weighs_inputs:
                part = self._expert(x[token] * own, self.gate_up[expert], self.down[expert])
            else:
                part = self._expert(x[token], self.gate_up[expert], self.down[expert]) * own
            out.index_add_(0, token, part)
        if self.shared_gate_up is not None and self.shared_down is not None:
            part = self._expert(x, self.shared_gate_up, self.shared_down)
            out = out + (part if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * part)
        return out, index

    def _expert(self, x: Float[torch.Tensor, "n d"], gate_up: nn.Module, down: nn.Module) -> Float[torch.Tensor, "n d"]:
        out: torch.Tensor = down(activated(gate_up(x), self.activation))
        return out


class DenseAndExperts(nn.Module):
    """A dense network beside a mixture of experts that has its own norms (Gemma 4); the sum of both is the output."""

    def __init__(
        self,
        dense: nn.Module,
        dense_norm: nn.Module,
        experts: ExpertFeedForward,
        experts_input_norm: nn.Module,
        experts_norm: nn.Module,
        router_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.dense, self.dense_norm, self.experts = dense, dense_norm, experts
        self.experts_input_norm, self.experts_norm, self.router_norm = experts_input_norm, experts_norm, router_norm

    def forward_with_routes(
        self, normed: Float[torch.Tensor, "t d"], x: Float[torch.Tensor, "t d"]
    ) -> tuple[Float[torch.Tensor, "t d"], Int[torch.Tensor, "t k"]]:
        """The output, and every token's experts; `normed`: input of the dense network, `x`: the residual stream."""
        part, index = self.experts.forward_with_routes(self.experts_input_norm(x), self.router_norm(x))
        out: torch.Tensor = self.dense_norm(self.dense(normed)) + self.experts_norm(part)
        return out, index
