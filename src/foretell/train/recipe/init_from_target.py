"""Initial weights of EAGLE's and DFlash's layers, taken from the target's last blocks."""

import torch
from torch import nn

from foretell.model.decoder import Decoder, DecoderBlock, FeedForward
from foretell.model.linear import Linear
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.block_layer import TwoTapConvolution
from foretell.speculator.network.cached_layers import CachedLayersNetwork
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleNetwork
from foretell.speculator.network.layer import Eagle3FirstLayer, EagleLayer
from foretell.speculator.network.p_eagle import PEagle

OUTPUT_SCALE = 0.2
"""Scale of matrices that write to the residual stream, so that the identity dominates at first."""
DRAFT_SCALE = 0.5
"""Scale of DFlash's output norm: its first states point anywhere, and should not be certain of a token."""
NOISE_SCALE = 0.02
"""Standard deviation of randomly initialised weights."""


@torch.no_grad()
def init_from_target(network: EagleNetwork, decoder: Decoder | None, seed: int) -> None:
    """Initialise a network: small noise, the identity for the last hidden state, and the target's blocks where sizes
    agree.
    """
    generator = torch.Generator().manual_seed(seed)
    init_linears(network, generator)
    init_fc_identity(network)
    if decoder is not None and decoder.config.hidden == network.target_info.hidden:
        copy_last_blocks(network, decoder)
        if isinstance(network, Eagle3):
            init_output_norm(network, decoder)


@torch.no_grad()
def init_dflash_from_target(network: DFlash, decoder: Decoder | None, seed: int) -> None:
    """Initialise DFlash: small noise, the mean of the fused hidden states, no bias between tokens, no mixing of slots,
    and the target's blocks where sizes agree.
    """
    generator = torch.Generator().manual_seed(seed)
    init_linears(network, generator)
    d, count = network.target_info.hidden, len(network.hidden_layers)
    network.fc.weight += torch.eye(d).repeat(1, count) / count
    if network.mask is not None:
        network.mask.copy_(random_embedding(network, generator))
    for module in network.modules():
        if isinstance(module, TwoTapConvolution):
            module.dynamic.weight.zero_()
    if network.markov_in is not None and network.markov_out is not None:
        network.markov_in.weight.copy_(torch.randn(network.markov_in.weight.shape, generator=generator))
        network.markov_out.weight.zero_()
    if decoder is not None and decoder.config.hidden == d:
        copy_last_blocks(network, decoder)
        network.norm.weight.copy_(decoder.norm.weight * DRAFT_SCALE)


@torch.no_grad()
def init_masks(network: PEagle, seed: int) -> None:
    """Initialise what stands for tokens and hidden states that do not exist yet."""
    generator = torch.Generator().manual_seed(seed)
    network.mask.copy_(random_embedding(network, generator))
    network.mask_states.copy_(torch.randn(network.mask_states.shape, generator=generator))


def random_embedding(network: Speculator, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of the size of the target's embeddings."""
    scale = float(network.embed(torch.arange(network.target_info.vocab)).float().std())
    return torch.randn(network.target_info.hidden, generator=generator) * scale


def init_linears(network: CachedLayersNetwork, generator: torch.Generator) -> None:
    """Small noise in all linear layers, no bias."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * NOISE_SCALE)
            if module.bias is not None:
                module.bias.zero_()


def copy_last_blocks(network: CachedLayersNetwork, decoder: Decoder) -> None:
    """Copy the target's last blocks, as far as they are dense and sizes agree."""
    blocks = [b for b in decoder.blocks if isinstance(b, DecoderBlock)]
    for layer, block in zip(network.layers, blocks[-len(network.layers) :], strict=True):
        assert isinstance(layer, EagleLayer | Eagle3FirstLayer)
        copy_block(layer, block)


def init_fc_identity(network: EagleNetwork) -> None:
    """Add the identity for the last hidden state to the layer that fuses hidden states."""
    assert isinstance(network, Eagle1 | Eagle3)
    d = network.target_info.hidden
    network.fc.weight[:, -d:] += torch.eye(d)


def copy_block(layer: EagleLayer | Eagle3FirstLayer, block: DecoderBlock) -> None:
    """Copy a block of the target, as far as it is dense and sizes agree."""
    attention, d = layer.self_attn, layer.post_attention_layernorm.weight.shape[0]
    if isinstance(block.qkv, Linear) and block.qkv.weight.shape[0] == attention.qkv_proj.weight.shape[0]:
        # Columns for the token's embedding (first half of EAGLE-3's inputs) stay noise: the block reads states only.
        attention.qkv_proj.weight[:, -d:] = block.qkv.weight
        attention.o_proj.weight.copy_(block.output.weight * OUTPUT_SCALE)
        norm = layer.hidden_norm if isinstance(layer, Eagle3FirstLayer) else layer.input_layernorm
        if norm is not None:
            norm.weight.copy_(block.attention_norm.weight)
    if isinstance(block.mlp, FeedForward) and block.mlp.down.weight.shape == layer.mlp.down_proj.weight.shape:
        layer.mlp.gate_up_proj.weight.copy_(block.mlp.gate_up.weight)
        layer.mlp.down_proj.weight.copy_(block.mlp.down.weight * OUTPUT_SCALE)
        layer.post_attention_layernorm.weight.copy_(block.mlp_norm.weight)


def init_output_norm(network: Eagle3, decoder: Decoder) -> None:
    """Set the output norm to the target's final norm, or to its mean scale where the last state is normed."""
    weight = decoder.norm.weight
    normed = network.hidden_layers[-1] == network.target_info.layers + 1
    network.norm.weight.copy_(weight.square().mean().sqrt() if normed else weight)
