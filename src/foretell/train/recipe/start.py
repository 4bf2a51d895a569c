"""Where EAGLE's layers begin: near the target's own last block, saying what the target's head said last."""

import torch
from torch import nn

from foretell.model.decoder import Decoder, DecoderBlock, FeedForward
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleNetwork
from foretell.speculator.network.layer import Eagle3FirstLayer, EagleLayer

SMALL = 0.2
"""What matrices that write to the residual stream are scaled by, so that the identity dominates at first."""


@torch.no_grad()
def start(network: EagleNetwork, decoder: Decoder | None, seed: int) -> None:
    """Give a fresh network its first weights: small noise, the identity where features pass, and blocks of the target
    where the sizes agree.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.02)
            if module.bias is not None:
                module.bias.zero_()
    pass_through(network)
    if decoder is not None and decoder.config.hidden == network.target_info.hidden:
        blocks = [b for b in decoder.blocks if isinstance(b, DecoderBlock)]
        for layer, block in zip(network.layers, blocks[-len(network.layers) :], strict=True):
            assert isinstance(layer, EagleLayer | Eagle3FirstLayer)
            inherit(layer, block)
        if isinstance(network, Eagle3):
            finish(network, decoder)


def pass_through(network: EagleNetwork) -> None:
    """Let the last tapped state be the feature."""
    assert isinstance(network, Eagle1 | Eagle3)
    d = network.target_info.hidden
    network.fc.weight[:, -d:] += torch.eye(d)


def inherit(layer: EagleLayer | Eagle3FirstLayer, block: DecoderBlock) -> None:
    """Take over a block of the target, as far as it is dense and has the same sizes."""
    attention, d = layer.self_attn, layer.post_attention_layernorm.weight.shape[0]
    if block.qkv.weight.shape[0] == attention.qkv_proj.weight.shape[0]:
        # What reads a token's embedding (EAGLE-3's first half of the inputs) stays noise: the block knew only states.
        attention.qkv_proj.weight[:, -d:] = block.qkv.weight
        attention.o_proj.weight.copy_(block.output.weight * SMALL)
        norm = layer.hidden_norm if isinstance(layer, Eagle3FirstLayer) else layer.input_layernorm
        if norm is not None:
            norm.weight.copy_(block.attention_norm.weight)
    if isinstance(block.mlp, FeedForward) and block.mlp.down.weight.shape == layer.mlp.down_proj.weight.shape:
        layer.mlp.gate_up_proj.weight.copy_(block.mlp.gate_up.weight)
        layer.mlp.down_proj.weight.copy_(block.mlp.down.weight * SMALL)
        layer.post_attention_layernorm.weight.copy_(block.mlp_norm.weight)


def finish(network: Eagle3, decoder: Decoder) -> None:
    """Norm the output as the target does; a state that its head has seen was scaled by that norm already."""
    weight = decoder.norm.weight
    seen = network.hidden_layers[-1] == network.target_info.layers + 1
    network.norm.weight.copy_(weight.square().mean().sqrt() if seen else weight)
