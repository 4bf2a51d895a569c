"""Heads that correct what the slots of a block predict by the tokens drafted before them: DFlash-2's selector,
Domino, XPress and LiLiCorr. Their parameters have the names of published checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import nn

from foretell.speculator.network.base import TokenSubset
from foretell.speculator.network.layer import make_norm
from foretell.utils.validation import FrozenModel

Embed = Callable[[Int[torch.Tensor, "*t"]], Float[torch.Tensor, "*t d"]]
"""The target's embedding of tokens."""
Columns: TypeAlias = Int[torch.Tensor, " w"] | None
"""The tokens of the draft vocabulary that logits are of; None: all of them."""
Logits: TypeAlias = Float[torch.Tensor, "k w"]
_FEATURES = 5
"""What LiLiCorr reads of a candidate: log-probability, probability, distance from the best, rank, if it is best."""


class Blocks(NamedTuple):
    """`n` blocks that one pass predicted."""

    states: Float[torch.Tensor, "n s d"]
    """Inputs of the output head at all slots."""
    logits: Float[torch.Tensor, "n p w"]
    """Of the predicting slots, the last `p`."""
    feature: Float[torch.Tensor, "n d"]
    """What the drafter made of the target's states at the last position before the anchor."""
    prepared: tuple[torch.Tensor, ...] = ()
    """What a head computes once for a block."""

    def state_at(self, nodes: "Nodes") -> Float[torch.Tensor, "k d"]:
        """Inputs of the output head at the slots of nodes."""
        return self.states[:, -self.logits.shape[1] :][nodes.block, nodes.slot]

    def logits_at(self, nodes: "Nodes") -> Float[torch.Tensor, "k w"]:
        """The uncorrected logits after nodes."""
        return self.logits[nodes.block, nodes.slot]


class Nodes(NamedTuple):
    """Nodes after which a token is predicted."""

    block: Int[torch.Tensor, " k"]
    slot: Int[torch.Tensor, " k"]
    """Which predicting slot of the block predicts it: the number of drafted tokens up to the node."""
    path: Int[torch.Tensor, "k t"]
    """The token before the anchor, the anchor, and the drafted tokens up to the node; what follows has no meaning."""

    @property
    def token(self) -> Int[torch.Tensor, " k"]:
        """The last token of every path."""
        return self.path.gather(1, self.slot[:, None] + 1)[:, 0]


class Candidates(NamedTuple):
    """The tokens that a head chooses among after `k` nodes, the right one first."""

    scores: Float[torch.Tensor, "k c"]
    index: Int[torch.Tensor, "k c"]
    """Where they stand among the logits."""


class CorrectionConfig(FrozenModel):
    """Configuration of such a head."""


class Correction(nn.Module, ABC):
    """A head over blocks of `slots` slots of width `hidden`, whose tokens are `vocab` of the target, `outputs` of them
    drafted.
    """

    def prepare(self, blocks: Blocks, embed: Embed, subset: TokenSubset | None = None) -> Blocks:
        """The blocks with what is computed once for each; `subset`: their logits are of these tokens."""
        return blocks

    @abstractmethod
    def forward(self, blocks: Blocks, nodes: Nodes, embed: Embed, columns: Columns = None) -> Logits:
        """The corrected logits after nodes."""


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
        self, right: Int[torch.Tensor, " k"], blocks: Blocks, nodes: Nodes, columns: Int[torch.Tensor, " w"] | None
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

    def score_with(self, right: Int[torch.Tensor, " k"], blocks: Blocks, nodes: Nodes) -> Candidates:
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
