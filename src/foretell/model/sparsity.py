"""Feed-forward networks that read a part of their neurons, and the rules by which a token chooses them.

`SparseFeedForward` is the reference in torch; `kernels/sparse.py` packs the same for the CPU kernels, which read only
what was chosen.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import nn

from foretell.model.activation import activated, gated
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder, DecoderBlock, FeedForward
from foretell.model.linear import Linear

Tensor = torch.Tensor
GATED = ("silu", "gelu_tanh")
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
class PredictedNeurons:
    """A neuron is read where its score `outputs @ inputs @ x + bias` is greater (Deja Vu, arXiv 2310.17157); `x` is the
    input of the network.
    """

    inputs: Float[Tensor, "r d"]
    outputs: Float[Tensor, "f r"]
    threshold: float
    bias: Float[Tensor, " f"]


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
    found = {
        "a mixture of experts": config.experts is not None,
        "recurrent states": config.state is not None,
        "latent attention": config.latent is not None,
        "per-layer inputs": config.layer_inputs is not None,
        "feed-forward networks without a gate": not config.gated,
        "layers without a feed-forward network": bool(config.mlp_free_layers),
        "biases in its feed-forward networks": config.mlp_bias,
        "matrices of low rank": bool(config.low_rank),
        "a sliced residual stream": config.shortcuts,
        f"the activation {config.activation}": config.activation not in GATED,
    }
    what = next((name for name, present in found.items() if present), "")
    if what:
        raise ValueError(
            f"sparse feed-forward networks are supported with SiLU and GELU gates, and this model "
            f"({config.architecture}) has {what}; run it dense"
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
        inputs, outputs, bias = (
            part.float().to(x.device) for part in (self.rule.inputs, self.rule.outputs, self.rule.bias)
        )
        return x.float() @ inputs.T @ outputs.T + bias > self.rule.threshold

    def forward(self, x: Float[Tensor, "*t d"]) -> Float[Tensor, "*t d"]:
        """The dense network with the other neurons at zero."""
        inner = activated(self.gate_up(x), self.activation)
        out: Tensor = self.down(inner.masked_fill(~self.choose(x), 0))
        return out


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
    out = copy.copy(dense)
    out._modules = dict(dense._modules)
    out.gate_up = _Beside(Linear(gate[:size]), Linear(up[:size]))  # type: ignore[assignment]
    out.down = Linear(dense.down.weight.data[:, :size])
    return out


def sparse_block(block: DecoderBlock, rule: NeuronRule) -> DecoderBlock:
    """A block with this rule, sharing all weights."""
    out = copy.copy(block)
    out._modules = dict(block._modules)
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
    return out


def sparse_decoder(decoder: Decoder, rules: Sequence[NeuronRule], label: str = "") -> Decoder:
    """A decoder with a rule per layer, sharing all weights; `label`: see `Backend.sparsity`.

    Raises:
        ValueError: see `check_sparse`.
    """
    check_sparse(decoder.config, rules)
    blocks = [sparse_block(decoder.block(i), rule) for i, rule in enumerate(rules)]
    out = Decoder(
        decoder.config, decoder.embedding.data, blocks, decoder.norm, decoder.head, decoder.skip, decoder.layer_inputs
    )
    out.sparsity = label
    return out
