"""Heads that correct what the slots of a block predict by the tokens drafted before them: DFlash-2's selector,
Domino, XPress and LiLiCorr. Their parameters have the names of published checkpoints.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
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
from foretell.speculator.network.lattice import Lattice, LatticeConfig


class SelectorConfig(CorrectionConfig):
    """DFlash-2's selector."""

    kind: Literal["selector"] = "selector"
    rank: int = Field(256, ge=1)
    candidates: int = Field(16, ge=1)


class Selector(Correction):
    """Scores the likeliest `candidates` of a slot by the token before, through a low rank; the others are left out."""

    def __init__(self, config: SelectorConfig, hidden: int, vocab: int, outputs: int, slots: int, eps: float) -> None:
        super().__init__()
        self._candidates = config.candidates
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, config.rank))
        self.hidden_projection = nn.Linear(hidden, config.rank, bias=False)

    def forward(self, blocks: Blocks, nodes: Nodes, embed: Embed, columns: Columns = None) -> Logits:
        """The scores of the candidates, and minus infinity."""
        logits = blocks.logits_at(nodes)
        best = logits.topk(min(self._candidates, logits.shape[-1]))
        tokens = best.indices if columns is None else columns[best.indices]
        scores = best.values + self.pair_scores(blocks, nodes, tokens)
        return torch.full_like(logits, float("-inf")).scatter(1, best.indices, scores)

    def score_with(
        self, right: Int[torch.Tensor, " k"], blocks: Blocks, nodes: Nodes, columns: Columns = None
    ) -> Candidates:
        """The right tokens (of the logits' columns) and the likeliest others, as many as candidates."""
        logits = blocks.logits_at(nodes)
        others = logits.scatter(1, right[:, None], float("-inf"))
        best = others.topk(min(self._candidates - 1, logits.shape[-1] - 1)).indices
        index = torch.cat((right[:, None], best), -1)
        tokens = index if columns is None else columns[index]
        return Candidates(logits.gather(1, index) + self.pair_scores(blocks, nodes, tokens), index)

    def pair_scores(self, blocks: Blocks, nodes: Nodes, tokens: Int[torch.Tensor, "k c"]) -> Float[torch.Tensor, "k c"]:
        """What these tokens get for following the nodes' tokens."""
        row = self.predecessor_codebook[nodes.token] * self.hidden_projection(blocks.state_at(nodes))
        return (row[:, None] * self.successor_codebook[tokens]).sum(-1).float()


class DominoConfig(CorrectionConfig):
    """Domino (arXiv 2605.29707)."""

    kind: Literal["domino"] = "domino"
    inner: int = Field(1024, ge=1)
    """Width of the state of the tokens before."""
    rank: int = Field(256, ge=1)
    uncorrected: int = Field(1, ge=0)
    """First predicting slots that keep their logits."""


class _Recurrence(nn.Module):
    """The matrices of a gated recurrent unit without biases, by the names of `torch.nn.GRU`."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.randn(3 * width, inputs) * inputs**-0.5)
        self.weight_hh_l0 = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)

    def forward(self, x: Float[torch.Tensor, "k t d"]) -> Float[torch.Tensor, "k t i"]:
        """The states after every input."""
        state, states = x.new_zeros(len(x), self.weight_hh_l0.shape[1]), []
        for step in x.unbind(1):
            state = torch.gru_cell(step, state, self.weight_ih_l0, self.weight_hh_l0)
            states.append(state)
        return torch.stack(states, 1)


class Domino(Correction):
    """Adds logits of low rank from the slot's state and a recurrent state of the anchor and the drafted tokens."""

    def __init__(self, config: DominoConfig, hidden: int, vocab: int, outputs: int, slots: int, eps: float) -> None:
        super().__init__()
        self._uncorrected = config.uncorrected
        self.prefix_gru = _Recurrence(hidden, config.inner)
        down, up = nn.Linear(hidden + config.inner, config.rank, bias=False), nn.Linear(config.rank, vocab, bias=False)
        self.embed_proj = nn.Sequential(down, nn.SiLU(), up)

    def forward(self, blocks: Blocks, nodes: Nodes, embed: Embed, columns: Columns = None) -> Logits:
        """The logits with what the tokens before add."""
        logits, states = blocks.logits_at(nodes), self.prefix_gru(embed(nodes.path[:, 1:]))
        state = states[torch.arange(len(states), device=states.device), nodes.slot]
        added = self.embed_proj[:2](torch.cat((blocks.state_at(nodes), state), -1))
        added = read_out(self.embed_proj[2], added, columns)
        return torch.where((nodes.slot >= self._uncorrected)[:, None], logits + added, logits)


class RefinerConfig(CorrectionConfig):
    """XPress (arXiv 2608.02438)."""

    kind: Literal["refiner"] = "refiner"
    rank: int = Field(256, ge=1)
    ratio: int = Field(2, ge=1)
    """Width of its feed-forward network by its rank."""
    passes: int = Field(6, ge=1)
    """Passes over a block in which other engines refine it; here every node is refined by its own path, which a block
    equals after as many passes as it has slots.
    """


class Refiner(Correction):
    """Adds logits of low rank from the states of all slots and the tokens before every slot, mixed causally."""

    def __init__(self, config: RefinerConfig, hidden: int, vocab: int, outputs: int, slots: int, eps: float) -> None:
        super().__init__()
        r = config.rank
        self.token_embed = nn.Embedding(vocab, r)
        self.down_h, self.down_g = nn.Linear(hidden, r, bias=False), nn.Linear(hidden, r, bias=False)
        self.in_proj = nn.Linear(3 * r, r, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(r, slots, slots))
        """Per channel, the share of every slot (last axis) in another."""
        self.mlp_gate, self.mlp_up = (nn.Linear(r, r * config.ratio, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(r * config.ratio, r, bias=False)
        self.readout = nn.Linear(r, outputs, bias=False)

    def prepare(self, blocks: Blocks, embed: Embed, subset: TokenSubset | None = None) -> Blocks:
        """What the slots' states and their mean contribute, [n s 2r]."""
        mean = self.down_g(blocks.states.mean(1, keepdim=True))
        own = self.down_h(blocks.states)
        return blocks._replace(prepared=(torch.cat((own, mean.expand_as(own)), -1),))

    def forward(self, blocks: Blocks, nodes: Nodes, embed: Embed, columns: Columns = None) -> Logits:
        """The logits with what the block adds."""
        (given,), (_, slots, _) = blocks.prepared, blocks.states.shape
        silent = slots - blocks.logits.shape[1]
        # The token before a slot of the block; where the anchor's slot predicts nothing, its own is read one earlier.
        before = nodes.path[:, 1 - silent :][:, :slots]
        before = F.pad(before, (0, slots - before.shape[1]))
        x = self.in_proj(torch.cat((given[nodes.block], self.token_embed(before)), -1))
        slot, each = nodes.slot + silent, torch.arange(len(x), device=x.device)
        share = self.mix_l.permute(1, 0, 2)[slot] * (torch.arange(slots, device=x.device) <= slot[:, None])[:, None]
        own = x[each, slot] + torch.einsum("krs,ksr->kr", share, x)
        own = own + self.mlp_down(F.silu(self.mlp_gate(own)) * self.mlp_up(own))
        return blocks.logits_at(nodes) + read_out(self.readout, own, columns)


def read_out(
    layer: nn.Module, x: Float[torch.Tensor, "k r"], columns: Int[torch.Tensor, " w"] | None
) -> Float[torch.Tensor, "k w"]:
    """The outputs of a linear layer, all or these."""
    if columns is None:
        out: torch.Tensor = layer(x)
    else:
        out = F.linear(x, layer.get_parameter("weight")[columns].to(x.dtype))
    return out.float()


AnyCorrection = SelectorConfig | DominoConfig | RefinerConfig | LatticeConfig
_HEADS = {"selector": Selector, "domino": Domino, "refiner": Refiner, "lattice": Lattice}


def make_correction(config: AnyCorrection, hidden: int, vocab: int, outputs: int, slots: int, eps: float) -> Correction:
    """The head of a configuration; `eps`: that of its RMS norms."""
    head: Correction = _HEADS[config.kind](config, hidden, vocab, outputs, slots, eps)
    return head
