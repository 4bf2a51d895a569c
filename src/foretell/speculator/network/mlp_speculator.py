"""The multi-stage MLP speculator: a recurrent network from the target's last hidden state over the drafted tokens."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.linear import widen
from foretell.model.kernels import NativeStages
from foretell.speculator.network.base import Speculator, TokenSubset
from foretell.speculator.network.recurrent import RecurrentConfig, RecurrentNetwork

NORM_EPS = 1e-6
_INIT_LOGIT_STD = 2.5
"""Standard deviation of logits at initialisation, of the order of a language model's."""
_INIT_TOKEN_STD = 0.5
"""Standard deviation of the embedding's part of a stage's input at initialisation; that of the state's part is 1."""
_SAMPLED_ROWS = 1000
"""Rows of a matrix from which its mean row norm is estimated."""


class MLPSpeculatorConfig(RecurrentConfig):
    """Configuration of a multi-stage MLP speculator."""

    kind: Literal["mlp_speculator"] = "mlp_speculator"
    stages: int = Field(default=4, ge=1, le=16)
    inner: int = Field(default=1024, ge=1)
    """Width of the state that is passed from stage to stage."""
    tied: bool = False
    """All stages share their weights, except the first projection, whose input has another width."""
    scale_input: bool = False
    """The target's hidden state is normalised to variance 1/2 first."""
    own_embedding: bool = False
    """The published form: every stage has its own embedding and head of width `inner` over the whole vocabulary."""
    more_hidden_layers: tuple[int, ...] = ()
    """Further layers of the target whose normalised hidden states are inputs of the first stage, after the last one.

    Published formats do not support them.
    """

    @model_validator(mode="after")
    def _published_form(self) -> "MLPSpeculatorConfig":
        if self.own_embedding and (self.draft_vocab is not None or self.own_head or self.more_hidden_layers):
            raise ValueError(
                "the published form of the MLP speculator has neither a draft_vocab, an own_head nor more_hidden_layers"
            )
        return self

    @property
    def state_weight(self) -> float:
        """Factor of the state per stage, so that the last stage has half of the first state's variance."""
        return float(0.5 ** (0.5 / self.stages))

    @property
    def emb_weight(self) -> float:
        """Factor of an embedding of variance `1 / inner`, which restores the variance that the state loses."""
        return math.sqrt((1 - self.state_weight**2) * self.inner / 2)


class RMSNormWithBias(nn.Module):
    """RMS norm with scale and bias, as in the released speculators (eps 1e-6)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[torch.Tensor, "*t e"]) -> Float[torch.Tensor, "*t e"]:
        """Normalise in float32 or wider, scale and add the bias."""
        return _rms_norm(x) * self.weight + self.bias


def _rms_norm(x: Float[torch.Tensor, "*t e"]) -> Float[torch.Tensor, "*t e"]:
    wide = widen(x)
    return F.rms_norm(wide, (x.shape[-1],), eps=NORM_EPS).to(x.dtype)


class MLPSpeculator(RecurrentNetwork):
    """`stages` predictions, each from the previous state and the previous token (Wertheimer et al., arXiv 2404.19124).

    ``s_i = GELU(norm_i(project_i s_{i-1} + w emb_i(token_{i-1})))``, ``logits_i = head_i s_i``, where `s_0` is the
    input of the target's head. The published form has its own embeddings and heads (`own_embedding`). In the small form
    `w emb_i` is a learned projection of the target's frozen embedding, and `head_i` is a learned projection followed by
    the target's frozen head; `published_tensors` multiplies these out.
    """

    kind = "mlp_speculator"
    config: MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        n, e, d, v = config.stages, config.inner, embedding_and_head.hidden, embedding_and_head.vocab
        shared = 1 if config.tied else n
        first = d * (1 + len(config.more_hidden_layers))
        widths = [first] + [e] * ((min(n, 2) if config.tied else n) - 1)
        self.project = nn.ModuleList(nn.Linear(width, e, bias=False) for width in widths)
        self.norm = nn.ModuleList(RMSNormWithBias(e) for _ in range(shared))
        self.token: nn.ModuleList
        """Per stage: the embedding, or the projection of the target's embedding."""
        self.output: nn.ModuleList
        """Per stage: the head, or the projection to the input of the target's head."""
        if config.own_embedding:
            self.token = nn.ModuleList(nn.Embedding(v, e) for _ in range(shared))
            self.output = nn.ModuleList(nn.Linear(e, v, bias=False) for _ in range(shared))
            self._init_published()
        else:
            self.token = nn.ModuleList(nn.Linear(d, e, bias=False) for _ in range(shared))
            self.output = nn.ModuleList(nn.Linear(e, d, bias=False) for _ in range(shared))
            self._init_identity(embedding_and_head)
        self.native: NativeStages | None = None
        """The stages on the CPU kernels, set by `pack_network`."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The input of the target's output head, and the further layers."""
        return (self.target_info.layers + 1, *self.config.more_hidden_layers)

    def adapt_state_dict(self, smaller: Speculator) -> dict[str, torch.Tensor]:
        """The state dict of a network whose `more_hidden_layers` are the first of these."""
        out, name = smaller.state_dict(), "project.0.weight"
        out[name] = F.pad(
            out[name], (0, (len(self.hidden_layers) - len(smaller.hidden_layers)) * self.target_info.hidden)
        )
        return out

    def initial_state(self, features: Sequence[Float[torch.Tensor, "*t d"]]) -> Float[torch.Tensor, "*t w"]:
        """The state before the first stage, from one tensor per layer of `hidden_layers`."""
        last, *more = (f.to(self.dtype) for f in features)
        if self.config.scale_input:
            last = _rms_norm(last) * 0.5**0.5
        return torch.cat([last, _rms_norm(torch.stack(more, -2)).flatten(-2)], -1) if more else last

    def next_state(
        self, state: Float[torch.Tensor, "*t w"], token: Int[torch.Tensor, "*t"], stage: int
    ) -> Float[torch.Tensor, "*t e"]:
        """The state of stage `stage` (from 0) after the previous stage's token (for stage 0 the target's)."""
        project, norm = self.project[min(stage, len(self.project) - 1)], self.norm[stage % len(self.norm)]
        return F.gelu(norm(project(state) + self._embedded(token, stage)))

    def draft_step(
        self, state: Float[torch.Tensor, "k i"], token: Int[torch.Tensor, " k"], stage: int
    ) -> tuple[Float[torch.Tensor, "k e"], Float[torch.Tensor, "k w"]]:
        """As `RecurrentNetwork.draft_step`; on the CPU kernels after `pack_network`."""
        if self.native is not None:
            state, logits = self.native[stage](state, self.embed(token))
            return state, self._apply_softcap(logits)
        return super().draft_step(state, token, stage)

    def _embedded(self, token: Int[torch.Tensor, "*t"], stage: int) -> Float[torch.Tensor, "*t e"]:
        module = self.token[stage % len(self.token)]
        if self.config.own_embedding:
            out: torch.Tensor = module(token) * (self.config.emb_weight / self.config.state_weight)
        else:
            out = module(self.embed(token))
        return out

    def head_input(self, state: Float[torch.Tensor, "*t e"], stage: int) -> Float[torch.Tensor, "*t r"]:
        """The input of a stage's output head: in the small form that of the target's head, in the published form the
        state.
        """
        out: torch.Tensor = state if self.config.own_embedding else self.output[stage % len(self.output)](state)
        return out

    def head_logits(
        self, head_input: Float[torch.Tensor, "*t r"], stage: int, subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t w"]:
        """Logits over the draft vocabulary, or a subset of it, from inputs of a stage's output head."""
        if not self.config.own_embedding:
            return super().head_logits(head_input, stage, subset)
        head = self.output[stage % len(self.output)]
        if subset is None:
            return widen(head(head_input))
        return widen(F.linear(head_input, head.get_parameter("weight")[subset.columns])) + subset.logit_offset

    @torch.no_grad()
    def published_tensors(self) -> dict[str, Float[torch.Tensor, "r c"] | Float[torch.Tensor, " r"]]:
        """The weights under the names and in the shapes of the released checkpoints, with the same logits.

        Tokens outside the draft vocabulary, which those heads score too, get the logits of the target's head.

        Raises:
            ValueError: the network has a part that the format does not support.
        """
        c = self.config
        if c.more_hidden_layers or self.softcap:
            layers = f"layers {list(c.more_hidden_layers)} of the target"
            raise ValueError(
                f"the published form of the MLP speculator has no place for "
                f"{layers if c.more_hidden_layers else 'a bound on the logits'}, which this one has; train one without "
                f"to export it"
            )
        scale = self.embedding_scale * c.state_weight / c.emb_weight
        embedding, head = self.get_buffer("_embedding"), self.full_lm_head
        out = dict[str, torch.Tensor]()
        for i, (token, output) in enumerate(zip(_weights(self.token), _weights(self.output), strict=True)):
            own = c.own_embedding
            out[f"emb.{i}.weight"] = token if own else _product(embedding, token.T) * scale
            out[f"head.{i}.weight"] = output if own else _product(head, output)
        out |= {f"proj.{i}.weight": p for i, p in enumerate(_weights(self.project))}
        out |= {f"ln.{name}": tensor for name, tensor in self.norm.state_dict().items()}
        return {name: tensor.detach().to(self.dtype) for name, tensor in out.items()}

    def _init_published(self) -> None:
        """Initialise as the released speculators: matrices of variance `1 / inner`."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0, self.config.inner**-0.5)

    def _init_identity(self, embedding_and_head: EmbeddingAndHead) -> None:
        """Initialise such that every stage passes the target's hidden state on to the next stage and to the head.

        GELU(x) - GELU(-x) = x: pairs of units of opposite sign are the identity. So training begins in the target's own
        coordinates, with logits of the right size. Units beyond the pairs are random.
        """
        d, e = embedding_and_head.hidden, self.config.inner
        pairs = min(d, e // 2)
        for i, project in enumerate(self.project):
            assert isinstance(project, nn.Linear)
            nn.init.normal_(project.weight, 0, 0.5 * project.in_features**-0.5)
            with torch.no_grad():
                project.weight[: 2 * pairs] *= 0.1
                _add_identity_pairs(project.weight, pairs, 1.0, inputs=1 if i == 0 else 2)
        embedding = _mean_row_norm(embedding_and_head.embedding) * embedding_and_head.embedding_scale
        head = _mean_row_norm(embedding_and_head.head)
        for token, output in zip(_weights(self.token), _weights(self.output), strict=True):
            nn.init.normal_(token, 0, _INIT_TOKEN_STD / embedding)
            nn.init.normal_(output, 0, 0.1 * e**-0.5 * _INIT_LOGIT_STD / head)
            with torch.no_grad():
                _add_identity_pairs(output.T, pairs, _INIT_LOGIT_STD / head, inputs=1)


def _add_identity_pairs(weight: Float[torch.Tensor, "e w"], pairs: int, size: float, inputs: int) -> None:
    """Add the identity and its negative, times `size`; with two `inputs`, the inputs are such pairs themselves."""
    which = torch.arange(pairs)
    for i in range(2):
        for j in range(inputs):
            weight[which + i * pairs, which + j * pairs] += size if i == j else -size


def _mean_row_norm(matrix: Float[torch.Tensor, "v d"]) -> float:
    """Mean norm of the first rows."""
    return float(matrix[:_SAMPLED_ROWS].float().norm(dim=-1).mean())


def _weights(layers: nn.ModuleList) -> list[torch.Tensor]:
    """The matrices of linear layers or embeddings."""
    return [layer.get_parameter("weight") for layer in layers]


def _product(left: Float[torch.Tensor, "v d"], right: Float[torch.Tensor, "d e"]) -> Float[torch.Tensor, "v e"]:
    """A product in float32 or wider."""
    return widen(left) @ widen(right)
