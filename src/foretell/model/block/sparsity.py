"""Feed-forward networks that read a part of their neurons, and the rules by which a token chooses them.

`SparseFeedForward` is the reference in torch; `kernels/sparse.py` packs the same for the CPU kernels, which read only
what was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import nn

from foretell.model.block.activation import activated, gated
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock, FeedForward, sharing
from foretell.model.block.linear import Linear
from foretell.model.config.model import ModelConfig

Tensor = torch.Tensor
GATED = ("silu", "gelu_tanh", "relu")
"""Activations whose neurons are zero where the activated gate is zero."""


@dataclass(frozen=True)
class GateThreshold:
    """A neuron is read where `|activation(gate)|` is greater (CATS, arXiv 2404.08763); all gates are computed."""

    threshold: float


@dataclass(frozen=True)
class InputThresholds:
    """Inputs of the matrices of a block count as zero up to these magnitudes (TEAL, arXiv 2408.14690)."""

    qkv: float
    output: float
    gate_up: float
    down: float


@dataclass(frozen=True, eq=False)
class Predictor:
    """A unit is read where its score `outputs @ inputs @ x + bias` is greater (Deja Vu, arXiv 2310.17157); `x` is the
    input of the sub-layer or, `ahead`, of that of the layer before. The first layer that runs and has no such input
    reads all.
    """

    inputs: Float[Tensor, "r d"]
    outputs: Float[Tensor, "u r"]
    threshold: float
    bias: Float[Tensor, " u"]
    ahead: bool = False

    def choose(self, x: Float[Tensor, "*t d"]) -> Bool[Tensor, "*t u"]:
        """The units that each token reads."""
        inputs, outputs, bias = (part.float().to(x.device) for part in (self.inputs, self.outputs, self.bias))
        return x.float() @ inputs.T @ outputs.T + bias > self.threshold


@dataclass(frozen=True, eq=False)
class PredictedNeurons(Predictor):
    """The neurons that a predictor chooses, `unit` consecutive ones together; and the query heads that another one
    chooses, `heads`. Keys and values of all heads are computed.
    """

    unit: int = 1
    heads: Predictor | None = None


@dataclass(frozen=True)
class FirstNeurons:
    """The first `size` neurons are read, whatever the token (MatFormer, arXiv 2310.07707)."""

    size: int


NeuronRule = GateThreshold | InputThresholds | PredictedNeurons | FirstNeurons
"""How the tokens of one layer choose what they read."""


def check_sparse(config: ModelConfig, rules: Sequence[NeuronRule]) -> None:
    """Refuse models whose blocks are no plain attention with a gated network, and rules of another number of layers.

    Raises:
        ValueError: one of these.
    """
    unsupported = {
        "a mixture of experts": config.experts is not None,
        "recurrent states": config.state is not None,
        "latent attention": config.latent is not None,
        "per-layer inputs": config.layer_inputs is not None,
        "feed-forward networks without a gate": not config.gated,
        "layers without a feed-forward network": bool(config.mlp_free_layers),
        "biases in its feed-forward networks": config.mlp_bias,
        "matrices of low rank": bool(config.low_rank),
        "a sliced residual stream": config.shortcuts,
        "parallel blocks": config.parallel_blocks,
        f"the activation {config.activation}": config.activation not in GATED,
    }
    what = next((name for name, present in unsupported.items() if present), "")
    if what:
        raise ValueError(
            f"sparse feed-forward networks are supported with SiLU, GELU and ReLU gates, and this model "
            f"({config.architecture}) has {what}; run it dense"
        )
    chooses_heads = any(isinstance(rule, PredictedNeurons) and rule.heads is not None for rule in rules)
    if chooses_heads and (config.attention_gate or config.kv_layers):
        raise ValueError(
            f"heads are chosen in plain attention, and that of this model ({config.architecture}) has gates or reads "
            "the keys of other layers; make its feed-forward networks alone sparse"
        )
    if len(rules) != config.layers:
        raise ValueError(f"{len(rules)} layers are described, and the model has {config.layers}")
    for i, rule in enumerate(rules):
        if isinstance(rule, FirstNeurons) and not 0 < rule.size <= config.ffn_of(i):
            raise ValueError(f"layer {i} cannot have {rule.size} neurons: the model has {config.ffn_of(i)}")


class ThresholdLinear(Linear):
    """A linear layer of which inputs up to a magnitude count as zero."""

    def __init__(self, linear: Linear, threshold: float) -> None:
        super().__init__(linear.weight.data, None if linear.bias is None else linear.bias.data)
        self.threshold = threshold

    def forward(self, x: Float[Tensor, "*t i"]) -> Float[Tensor, "*t o"]:
        """Apply to the last axis."""
        return super().forward(x.masked_fill(x.abs() <= self.threshold, 0))


class SparseFeedForward(FeedForward):
    """A gated feed-forward network of whose neurons a token reads those that a rule chooses."""

    def __init__(self, dense: FeedForward, rule: GateThreshold | PredictedNeurons) -> None:
        super().__init__(dense.gate_up, dense.down, dense.activation)
        self.rule = rule

    def choose(self, x: Float[Tensor, "*t d"]) -> Bool[Tensor, "*t f"]:
        """The neurons that each token reads."""
        if isinstance(self.rule, GateThreshold):
            gate = self.gate_up(x).chunk(2, -1)[0]
            return gated(gate, torch.ones_like(gate), self.activation).abs() > self.rule.threshold
        return self.rule.choose(x).repeat_interleave(self.rule.unit, -1)

    def forward(self, x: Float[Tensor, "*t d"]) -> Float[Tensor, "*t d"]:
        """The dense network with the other neurons at zero."""
        inner = activated(self.gate_up(x), self.activation)
        out: Tensor = self.down(inner.masked_fill(~self.choose(x), 0))
        return out


class HeadChoice(Linear):
    """The projection to queries, keys and values, which notes what heads its tokens read."""

    def __init__(self, linear: Linear, predictor: Predictor) -> None:
        super().__init__(linear.weight.data, None if linear.bias is None else linear.bias.data)
        self.predictor = predictor
        self.chosen: Bool[Tensor, "*t h"] | None = None

    def forward(self, x: Float[Tensor, "*t i"]) -> Float[Tensor, "*t o"]:
        """Apply to the last axis."""
        self.chosen = self.predictor.choose(x)
        return super().forward(x)


class ChosenHeads(Linear):
    """The output of attention, of which the heads count that the tokens of the projection before it have chosen."""

    def __init__(self, linear: Linear, choice: HeadChoice) -> None:
        super().__init__(linear.weight.data, None if linear.bias is None else linear.bias.data)
        self.choice = (choice,)

    def forward(self, x: Float[Tensor, "*t i"]) -> Float[Tensor, "*t o"]:
        """Apply to the last axis."""
        chosen = self.choice[0].chosen
        assert chosen is not None
        return super().forward(x.masked_fill(~chosen.repeat_interleave(x.shape[-1] // chosen.shape[-1], -1), 0))


class _Beside(nn.Module):
    """Outputs of two linear layers side by side."""

    def __init__(self, first: Linear, second: Linear) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Float[Tensor, "*t i"]) -> Float[Tensor, "*t o"]:
        """Apply to the last axis."""
        return torch.cat((self.first(x), self.second(x)), -1)


def first_neurons(dense: FeedForward, size: int) -> FeedForward:
    """The first neurons of a gated network, as views of its weights."""
    gate, up = dense.gate_up.weight.data.chunk(2)
    out = sharing(dense)
    out.gate_up = _Beside(Linear(gate[:size]), Linear(up[:size]))  # type: ignore[assignment]
    out.down = Linear(dense.down.weight.data[:, :size])
    return out


def sparse_block(block: DecoderBlock, rule: NeuronRule) -> DecoderBlock:
    """A block with this rule, sharing all weights."""
    out = sharing(block)
    dense = block.mlp
    assert isinstance(dense, FeedForward)
    if isinstance(rule, FirstNeurons):
        out.mlp = first_neurons(dense, rule.size)
    elif isinstance(rule, InputThresholds):
        assert isinstance(block.qkv, Linear) and isinstance(block.output, Linear)
        assert isinstance(dense.gate_up, Linear) and isinstance(dense.down, Linear)
        out.qkv = ThresholdLinear(block.qkv, rule.qkv)
        out.output = ThresholdLinear(block.output, rule.output)
        out.mlp = FeedForward(
            ThresholdLinear(dense.gate_up, rule.gate_up), ThresholdLinear(dense.down, rule.down), dense.activation
        )
    else:
        out.mlp = SparseFeedForward(dense, rule)
        if isinstance(rule, PredictedNeurons) and rule.heads is not None:
            assert isinstance(block.qkv, Linear) and isinstance(block.output, Linear)
            out.qkv = HeadChoice(block.qkv, rule.heads)
            out.output = ChosenHeads(block.output, out.qkv)
    return out


def sparse_decoder(decoder: Decoder, rules: Sequence[NeuronRule], label: str = "") -> Decoder:
    """A decoder with a rule per layer, sharing all weights; `label`: see `Backend.sparsity`.

    Raises:
        ValueError: see `check_sparse`.
    """
    check_sparse(decoder.config, rules)
    if any(isinstance(rule, PredictedNeurons) and (rule.ahead or (rule.heads and rule.heads.ahead)) for rule in rules):
        raise ValueError(
            "predictors that look ahead by a layer run on the CPU kernels only; train them without --look-ahead"
        )
    out = decoder.with_blocks([sparse_block(decoder.block(i), rule) for i, rule in enumerate(rules)])
    out.sparsity = label
    return out
