"""LiLiCorr's head (arXiv 2608.20530), which compares the candidates of neighbouring slots."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import nn

from foretell.speculator.network.base import TokenSubset
from foretell.speculator.network.correction_base import (
    Blocks,
    Candidates,
    Columns,
    Correction,
    CorrectionConfig,
    Embed,
    Logits,
    Nodes,
)
from foretell.speculator.network.layer import make_norm

_FEATURES = 5
"""What LiLiCorr reads of a candidate: log-probability, probability, distance from the best, rank, if it is best."""


class LatticeConfig(CorrectionConfig):
    """LiLiCorr (arXiv 2608.20530); no value of it follows from the tensors' shapes alone."""

    kind: Literal["lattice"] = "lattice"
    candidates: int = Field(8, ge=1)
    width: int = Field(1024, ge=1)
    layers: int = Field(2, ge=1)
    heads: int = Field(8, ge=1)
    mlp_ratio: float = Field(2.0, gt=0)
    factors: int = Field(ge=1)
    """Numbers by which two candidates are compared."""
    vector_eps: float = Field(1e-4, gt=0)
    logit_scale: float = Field(8.0, gt=0)


def _network_of_two(inputs: int, inner: int, outputs: int) -> nn.Module:
    return nn.ModuleDict({"up_proj": nn.Linear(inputs, inner), "down_proj": nn.Linear(inner, outputs)})


def _apply_two(parts: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = parts["down_proj"](F.silu(parts["up_proj"](x)))  # type: ignore[index]
    return out


class _LatticeAttention(nn.Module):
    """The parameters of `torch.nn.MultiheadAttention`, over all candidates of a block with a bias per head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Float[torch.Tensor, "n t e"], bias: Float[torch.Tensor, "h t t"]) -> torch.Tensor:
        """Attention of every candidate to all, its own slot's too."""
        q, k, v = (
            part.view(*x.shape[:2], self._heads, -1).transpose(1, 2)
            for part in F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))
        mixed: torch.Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return mixed


class _LatticeLayer(nn.Module):
    def __init__(self, config: LatticeConfig, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = make_norm(config.width, eps), make_norm(config.width, eps)
        self.attn = _LatticeAttention(config.width, config.heads)
        self.mlp = _network_of_two(config.width, int(config.width * config.mlp_ratio), config.width)

    def forward(self, x: Float[torch.Tensor, "n t e"], bias: Float[torch.Tensor, "h t t"]) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        out: torch.Tensor = x + _apply_two(self.mlp, self.mlp_norm(x))
        return out


class Lattice(Correction):
    """A small encoder over the likeliest `candidates` of all slots, whose outputs say how well two candidates of
    neighbouring slots follow each other. The probabilities of the slots are inputs of it only.
    """

    def __init__(self, config: LatticeConfig, hidden: int, vocab: int, outputs: int, slots: int, eps: float) -> None:
        super().__init__()
        self._config, width = config, config.width
        self.token_proj = nn.Linear(hidden, width) if hidden != width else None
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.feature_norm = nn.LayerNorm(_FEATURES)
        self.feature_mlp = _network_of_two(_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.heads, 2 * slots - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.heads))
        self.layers = nn.ModuleList(_LatticeLayer(config, eps) for _ in range(config.layers))
        self.output_norm, self.anchor_norm = make_norm(width, eps), make_norm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head = nn.Linear(width, config.factors), nn.Linear(width, config.factors)
        self.anchor_out_head = nn.Linear(width, config.factors)

    def prepare(self, blocks: Blocks, embed: Embed, subset: TokenSubset | None = None) -> Blocks:
        """The candidates of every slot, and their scores after the anchor and after those of the slot before."""
        c = self._config
        log_p = torch.log_softmax(blocks.logits.float(), -1)
        log_p = log_p if subset is None else log_p - subset.logit_offset
        best = log_p.topk(min(c.candidates, log_p.shape[-1]))
        tokens = best.indices if subset is None else subset.columns[best.indices]
        x = self._nodes(best.values, embed(tokens), blocks.states[:, -log_p.shape[1] :])
        bias = self._bias(*tokens.shape[1:])
        for layer in self.layers:
            x = layer(x, bias)
        z = self.output_norm(x).view(*tokens.shape, -1)
        anchor = self.anchor_norm(self.context_proj(blocks.feature))
        beside = anchor[:, None, None].expand_as(z)
        f = F.silu(self.factor_input_proj(torch.cat((z, beside, z * beside), -1)))
        from_, to, start = (
            F.normalize(head(part).float(), dim=-1, eps=c.vector_eps)
            for head, part in ((self.out_head, f), (self.in_head, f), (self.anchor_out_head, anchor))
        )
        first = (start[:, None] @ to[:, 0].transpose(1, 2))[:, 0]
        pairs = from_[:, :-1] @ to[:, 1:].transpose(-1, -2)
        scores = c.logit_scale * first, c.logit_scale * pairs
        return blocks._replace(prepared=(best.indices, tokens, best.values, *scores))

    def _nodes(
        self,
        log_p: Float[torch.Tensor, "n p c"],
        embedded: Float[torch.Tensor, "n p c d"],
        states: Float[torch.Tensor, "n p d"],
    ) -> Float[torch.Tensor, "n pc e"]:
        """The inputs of the encoder."""
        rank = torch.arange(log_p.shape[-1], device=log_p.device)
        parts = (log_p, log_p.exp(), log_p - log_p[..., :1], rank / max(log_p.shape[-1] - 1, 1), (rank == 0).float())
        features = torch.stack([part.expand_as(log_p) for part in parts], -1).to(states.dtype)
        x = embedded if self.token_proj is None else self.token_proj(embedded)
        x = x + self.pass_hidden_proj(states)[:, :, None] + _apply_two(self.feature_mlp, self.feature_norm(features))
        return (x + self.slot_embedding[0] + self.rank_embedding[0, ..., : log_p.shape[-1], :]).flatten(1, 2)

    def _bias(self, slots: int, candidates: int) -> Float[torch.Tensor, "h t t"]:
        """What the distance of two candidates' slots adds to the attention."""
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(candidates)
        distance = slot[:, None] - slot
        bias = self.relative_slot_bias[:, distance + self.relative_slot_bias.shape[1] // 2]
        return bias + (distance == 0) * self.same_slot_bias[:, None, None]

    def forward(self, blocks: Blocks, nodes: Nodes, embed: Embed, columns: Columns = None) -> Logits:
        """The scores of the candidates, and minus infinity; after a token that was none, their log-probabilities."""
        index, scores, _ = self._scores_after(blocks, nodes)
        out = torch.full_like(blocks.logits_at(nodes), float("-inf"))
        return out.scatter(1, index, scores.to(out.dtype))

    def score_with(
        self, right: Int[torch.Tensor, " k"], blocks: Blocks, nodes: Nodes, columns: Columns = None
    ) -> Candidates:
        """The candidates with the right tokens first. Where these or the tokens before are none, nothing is to be
        learned: the first is certain then.
        """
        index, scores, known = self._scores_after(blocks, nodes)
        is_right = index == right[:, None]
        order = is_right.int().argsort(dim=-1, descending=True, stable=True)
        certain = torch.full_like(scores, float("-inf"))
        certain[:, 0] = 0
        learned = (known & is_right.any(-1))[:, None]
        return Candidates(torch.where(learned, scores.gather(1, order), certain), index.gather(1, order))

    def _scores_after(
        self, blocks: Blocks, nodes: Nodes
    ) -> tuple[Int[torch.Tensor, "k c"], Float[torch.Tensor, "k c"], Bool[torch.Tensor, " k"]]:
        """Where the candidates of the next slot stand among the logits, their scores, and whether the nodes' tokens are
        candidates themselves.
        """
        index, tokens, log_p, first, pairs = blocks.prepared
        earlier, begins = (nodes.slot - 1).clamp_min(0), nodes.slot == 0
        same = tokens[nodes.block, earlier] == nodes.token[:, None]
        row = log_p[nodes.block, nodes.slot]
        if pairs.shape[1]:
            after = pairs[nodes.block, earlier, same.int().argmax(-1)]
            row = torch.where(same.any(-1, keepdim=True), after, row)
        row = torch.where(begins[:, None], first[nodes.block], row)
        return index[nodes.block, nodes.slot], row, begins | same.any(-1)
