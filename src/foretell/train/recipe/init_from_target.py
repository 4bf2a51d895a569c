"""Initial weights of EAGLE's and DFlash's layers, taken from the target's last blocks."""

import torch
from jaxtyping import Float
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock, FeedForward, RMSNorm
from foretell.model.block.linear import Linear
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.block_layer import TwoTapConvolution
from foretell.speculator.network.cached_layers import CachedLayersNetwork
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleNetwork
from foretell.speculator.network.lattice import Lattice
from foretell.speculator.network.layer import Eagle3FirstLayer, EagleLayer
from foretell.speculator.network.p_eagle import PEagle

OUTPUT_SCALE = 0.02
"""Scale of EAGLE's matrices that write to the residual stream: the stream that the target's blocks write to is an order
of magnitude larger than a feature, and the identity should dominate at first.
"""
DFLASH_OUTPUT_SCALE = 0.2
"""The same for DFlash, whose first stream, a mask's embedding, holds nothing that should dominate."""
EMBEDDING_SHARE = 0.5
"""Size of the token's part of EAGLE-1's first sum relative to the feature's."""
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
        normed = network.hidden_layers[-1] == network.target_info.layers + 1
        scales = at_least(decoder.norm.weight, 0.1) if normed else torch.ones(decoder.config.hidden)
        copy_last_blocks(network, decoder, scales, OUTPUT_SCALE)
        if isinstance(network, Eagle1):
            init_embedding_columns(network, scales, generator)
        if isinstance(network, Eagle3):
            # The norm reads normed states already, so their mean scale is enough.
            network.norm.weight.copy_(root_mean_square(scales) if normed else decoder.norm.weight)


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
    for name, parameter in () if network.correction is None else network.correction.named_parameters():
        if parameter.ndim > 1:  # the others are norms and biases
            of_inputs = name.startswith("prefix_gru") or (isinstance(network.correction, Lattice) and "weight" in name)
            scale = parameter.shape[-1] ** -0.5 if of_inputs else NOISE_SCALE
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    if decoder is not None and decoder.config.hidden == d:
        copy_last_blocks(network, decoder, torch.ones(d), DFLASH_OUTPUT_SCALE)
        network.norm.weight.copy_(decoder.norm.weight)


@torch.no_grad()
def init_masks(network: PEagle, seed: int) -> None:
    """Initialise what stands for tokens and hidden states that do not exist yet."""
    generator = torch.Generator().manual_seed(seed)
    network.mask.copy_(random_embedding(network, generator))
    network.mask_states.copy_(torch.randn(network.mask_states.shape, generator=generator))


def random_embedding(network: Speculator, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of the size of the target's embeddings."""
    scale = float(all_embeddings(network).std())
    return torch.randn(network.target_info.hidden, generator=generator) * scale


def all_embeddings(network: Speculator) -> Float[torch.Tensor, "v d"]:
    """The target's scaled embeddings, on the CPU."""
    device = network.get_buffer("_embedding").device
    return network.embed(torch.arange(network.target_info.vocab, device=device)).float().cpu()


def init_linears(network: CachedLayersNetwork, generator: torch.Generator) -> None:
    """Small noise in all linear layers, no bias."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * NOISE_SCALE)
            if module.bias is not None:
                module.bias.zero_()


def init_embedding_columns(network: Eagle1, scales: Float[torch.Tensor, " d"], generator: torch.Generator) -> None:
    """Noise in the columns for the token's embedding, so large that the first sum shows which token was decided:
    EAGLE-1 has no norm before it, and embeddings are an order of magnitude smaller than features of these scales.
    """
    d = network.target_info.hidden
    embedding = root_mean_square(all_embeddings(network))
    noise = torch.randn((d, d), generator=generator) / d**0.5
    network.fc.weight[:, :d] = noise * EMBEDDING_SHARE * root_mean_square(scales) / embedding


def init_fc_identity(network: EagleNetwork) -> None:
    """Add the identity for the last hidden state to the layer that fuses hidden states."""
    assert isinstance(network, Eagle1 | Eagle3)
    d = network.target_info.hidden
    network.fc.weight[:, -d:] += torch.eye(d)


def copy_last_blocks(
    network: CachedLayersNetwork, decoder: Decoder, scales: Float[torch.Tensor, " d"], output_scale: float
) -> None:
    """Copy the target's last blocks, as far as they are dense and sizes agree; see `copy_block`."""
    blocks = [b for b in decoder.blocks if isinstance(b, DecoderBlock)]
    for layer, block in zip(network.layers, blocks[-len(network.layers) :], strict=True):
        assert isinstance(layer, EagleLayer | Eagle3FirstLayer)
        copy_block(layer, block, scales, output_scale)


def copy_block(
    layer: EagleLayer | Eagle3FirstLayer, block: DecoderBlock, scales: Float[torch.Tensor, " d"], output_scale: float
) -> None:
    """Copy a block of the target, as far as it is dense and sizes agree. The block expects states of scale 1 and the
    layer reads features of these `scales` (those of the target's final norm), which are divided out.
    """
    if not isinstance(block.attention_norm, RMSNorm):
        return
    attention, d = layer.self_attn, layer.post_attention_layernorm.weight.shape[0]
    relative = scales / root_mean_square(scales)
    if isinstance(block.qkv, Linear) and block.qkv.weight.shape[0] == attention.qkv_proj.weight.shape[0]:
        # Columns for the token's embedding (first half of EAGLE-3's inputs) stay noise: the block reads states only.
        norm = layer.hidden_norm if isinstance(layer, Eagle3FirstLayer) else layer.input_layernorm
        attention.qkv_proj.weight[:, -d:] = block.qkv.weight
        if norm is None:
            attention.qkv_proj.weight[:, -d:] *= block.attention_norm.weight / scales
        else:
            norm.weight.copy_(block.attention_norm.weight / relative)
        attention.o_proj.weight.copy_(block.output.weight * output_scale)
    if isinstance(block.mlp, FeedForward) and block.mlp.down.weight.shape == layer.mlp.down_proj.weight.shape:
        layer.mlp.gate_up_proj.weight.copy_(block.mlp.gate_up.weight)
        layer.mlp.down_proj.weight.copy_(block.mlp.down.weight * output_scale)
        layer.post_attention_layernorm.weight.copy_(block.mlp_norm.weight / relative)


def at_least(weights: Float[torch.Tensor, " d"], share: float) -> Float[torch.Tensor, " d"]:
    """Weights moved away from 0, to this share of their root mean square or further, so that they can be divided by."""
    return weights.abs().clamp_min(share * root_mean_square(weights)).copysign(weights)


def root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """Over all elements."""
    return values.square().mean().sqrt()
