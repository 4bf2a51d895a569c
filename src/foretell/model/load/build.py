"""Builds a decoder from the tensors of a checkpoint."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from foretell.model.block.decoder import Decoder, DecoderBlock, FeedForward, RMSNorm
from foretell.model.block.expert_matrices import GatedMatrices
from foretell.model.block.latent import LatentBlock
from foretell.model.block.linear import AnyLinear, Linear
from foretell.model.block.moe import DenseAndExperts, ExpertFeedForward
from foretell.model.config.model import ModelConfig
from foretell.model.load.block_names import block_names
from foretell.model.load.experts import read_expert_layer
from foretell.model.load.latent import read_latent_projection
from foretell.model.load.layer_parts import (
    INTERLEAVED,
    attention_inputs,
    build_beside_dense,
    build_layer_input,
    build_layer_inputs,
    half_split_order,
    layer_scale,
    unit_norm,
)
from foretell.model.load.low_rank import SHORTCUTS, read_linear
from foretell.model.load.state_blocks import build_state_parts
from foretell.model.load.weights import Weights
from foretell.model.matrices.stored import Matrix, StoredMatrix

Tensor = torch.Tensor


def build_decoder(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the decoder of a configuration from a checkpoint, in `dtype` on `device`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    # Fails early on a configuration with too many layers.
    last = f"model.layers.{config.layers - 1}.{block_names(config).attention_norm}.weight"
    weights.require(last, config.hidden)
    with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
        outer = pool.submit(lambda: build_without_blocks(config, weights, dtype, device))
        blocks = list(pool.map(lambda i: build_block(config, i, weights, dtype, device), range(config.layers)))
    shell = outer.result()
    return Decoder(config, shell.embedding.data, blocks, shell.norm, shell.head, layer_inputs=shell.layer_inputs)


def build_without_blocks(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a decoder with embedding, final norm and head, and no blocks."""
    embedding = weights.require("model.embed_tokens.weight", config.vocab, config.hidden).to(device, dtype)
    inputs = None if config.layer_inputs is None else build_layer_inputs(config, weights, dtype, device)
    norm = _norm(config, weights, block_names(config).final_norm, config.hidden, device)
    head = None if config.tied else weights.head(config.vocab, config.hidden)
    own = None if head is None else Linear(head.to(device, dtype))
    return Decoder(config, embedding, [], norm, own, layer_inputs=inputs)


def build_block(
    config: ModelConfig, i: int, weights: Weights, dtype: torch.dtype, device: torch.device
) -> DecoderBlock:
    """Build block `i`."""
    c, prefix = config, f"model.layers.{i}."
    sizes, ffn = c.sizes_of(i), c.ffn_of(i)
    q = c.heads * sizes.head_dim

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    def matrix(name: str, outputs: int, inputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = weights.require(f"{prefix}{name}.weight", outputs, inputs)
        return weight, weights.require(f"{prefix}{name}.bias", outputs) if bias else None

    def stack(*parts: tuple[Tensor, Tensor | None]) -> Linear:
        biases = [b for _, b in parts if b is not None]
        return Linear(place(torch.cat([w for w, _ in parts])), place(torch.cat(biases)) if biases else None)

    def linear(role: str, rows: Sequence[tuple[str, int]], inputs: int, bias: bool) -> AnyLinear:
        return read_linear(c, role, rows, inputs, matrix, bias, stack)

    def norm(name: str, width: int) -> RMSNorm:
        return _norm(c, weights, prefix + name, width, device)

    names = block_names(c)
    experts = _experts(c, prefix, weights, place) if c.experts is not None and i in c.experts.layers else None
    mlp: FeedForward | ExpertFeedForward | DenseAndExperts
    if i in c.mlp_free_layers:
        mlp = FeedForward(_nothing(c.hidden), _nothing(0), c.activation)
    elif experts is not None and c.experts is not None and not c.experts.beside_dense:
        mlp = experts
    else:
        rows = dict.fromkeys((names.gate, names.up), 2 * ffn if names.gate == names.up and c.gated else ffn)
        dense = FeedForward(
            linear("gate_up", list(rows.items()), c.hidden, c.mlp_bias),
            linear("down", [(names.down, c.hidden)], ffn, c.mlp_bias),
            c.activation,
        )
        mlp = dense if experts is None else build_beside_dense(c, prefix, weights, dense, experts, norm)
    if i in c.attention_free_layers:
        return DecoderBlock(
            attention_norm=RMSNorm(torch.empty(0), c.norm_eps),
            qkv=_nothing(c.hidden),
            output=_nothing(0),
            mlp_norm=norm(names.mlp_norm, c.hidden),
            mlp=mlp,
            residual_scale=c.residual_scale,
        )
    mlp_norm = "pre_feedforward_layernorm" if c.post_norms else names.mlp_norm
    if i in c.state_layers:
        parts = build_state_parts(c, lambda name, *shape: weights.require(prefix + name, *shape), place, names.state)
        return DecoderBlock(
            attention_norm=norm(names.attention_norm, c.hidden),
            qkv=parts.input,
            output=parts.output,
            mlp_norm=norm(mlp_norm, c.hidden),
            mlp=mlp,
            mixer=parts.mixer,
            residual_scale=c.residual_scale,
        )
    if c.latent is not None:
        return LatentBlock(
            attention_norm=norm(names.attention_norm, c.hidden),
            qkv=read_latent_projection(c, prefix, weights, place),
            output=stack(matrix(names.output, c.hidden, c.heads * c.latent.value_dim, False)),
            mlp_norm=norm(names.mlp_norm, c.hidden),
            mlp=mlp,
        )
    inputs = attention_inputs(c, i, names.attention)

    def qkv() -> AnyLinear:
        if c.low_rank.qkv:
            return linear("qkv", inputs, c.hidden, c.qkv_bias)
        queries, *attention = (matrix(name, rows, c.hidden, c.qkv_bias) for name, rows in inputs)
        if c.attention_gate:
            queries, gate = _split_gate(queries, c.head_dim)
            attention.append(gate)
        if c.architecture in INTERLEAVED:
            queries, attention[0] = (half_split_order(part, c.head_dim) for part in (queries, attention[0]))
        return stack(queries, *attention)

    def shortcut(name: str) -> Linear:
        return stack(matrix(name, c.hidden, c.hidden, False))

    reads_keys, unit = c.kv_layer_of(i) != i, c.unit_qk_norm and i not in c.unrotated_layers

    def head_norm(name: str) -> RMSNorm | None:
        if c.qk_norm:
            return norm(name, sizes.head_dim)
        return unit_norm(c, i, device) if unit else None

    return DecoderBlock(
        attention_norm=norm(names.attention_norm, c.hidden),
        qkv=qkv(),
        output=linear("output", [(names.output, c.hidden)], q, c.output_bias),
        mlp_norm=norm(mlp_norm, c.hidden),
        mlp=mlp,
        q_norm=head_norm(names.q_norm),
        k_norm=None if reads_keys else head_norm(names.k_norm),
        v_norm=unit_norm(c, i, device) if c.value_norm and not reads_keys else None,
        reads_keys=reads_keys,
        layer_input=build_layer_input(c, lambda *of: stack(matrix(of[0], of[1], of[2], False)), norm)
        if c.layer_inputs
        else None,
        scale=layer_scale(c, prefix, weights),
        post_attention_norm=norm("post_attention_layernorm", c.hidden) if c.post_norms else None,
        post_mlp_norm=norm("post_feedforward_layernorm", c.hidden) if c.post_norms else None,
        attention_gate=c.attention_gate,
        residual_scale=c.residual_scale,
        sinks=weights.require(f"{prefix}self_attn.sinks", c.heads).float().to(device) if c.sinks else None,
        shortcuts=(shortcut(SHORTCUTS[0]), shortcut(SHORTCUTS[1])) if c.shortcuts else None,
    )


def _nothing(inputs: int) -> Linear:
    """A matrix without outputs: of a sub-layer that a block does not have."""
    return Linear(torch.empty(0, inputs))


def _split_gate(
    queries: tuple[Tensor, Tensor | None], head_dim: int
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """A query projection whose heads are [query; gate] as two projections."""

    def half(part: Tensor, which: int) -> Tensor:
        return part.view(-1, 2, head_dim, *part.shape[1:])[:, which].flatten(0, 1)

    weight, bias = queries
    first, second = ((half(weight, i), None if bias is None else half(bias, i)) for i in range(2))
    return first, second


def _norm(config: ModelConfig, weights: Weights, name: str, width: int, device: torch.device) -> RMSNorm:
    return RMSNorm(weights.require(name + ".weight", width).to(device), config.norm_eps, config.norm_offset)


def _experts(
    config: ModelConfig, prefix: str, weights: Weights, place: Callable[[Tensor], Tensor]
) -> ExpertFeedForward:
    c, experts = config, config.experts
    assert experts is not None

    def linear(matrices: Sequence[Matrix | None], *biases: Tensor | None) -> Linear:
        bias = [b for b in biases if b is not None]
        wide = [m.widen() if isinstance(m, StoredMatrix) else m for m in matrices if m is not None]
        return Linear(place(torch.cat(wide)), place(torch.cat(bias)) if bias else None)

    def gate_up(m: GatedMatrices) -> Linear:
        return linear((m.gate, m.up), m.gate_bias, m.up_bias)

    def unrounded(tensor: Tensor) -> Tensor:
        """A tensor of the router or of a gate, which stay in float32."""
        placed = place(tensor)
        return placed if placed.dtype == torch.float64 else tensor.to(placed.device, torch.float32)

    read = read_expert_layer(c, prefix, weights)
    each = [(gate_up(m), linear((m.down,), m.down_bias)) for m in read.experts]
    gate = None if read.shared_gate is None else Linear(unrounded(read.shared_gate))
    return ExpertFeedForward(
        experts,
        Linear(unrounded(read.router), None if read.router_bias is None else unrounded(read.router_bias)),
        [pair[0] for pair in each],
        [pair[1] for pair in each],
        None if read.shared is None else (gate_up(read.shared), linear((read.shared.down,)), gate),
        None if read.selection_bias is None else unrounded(read.selection_bias),
        c.activation,
        None if read.expert_scale is None else unrounded(read.expert_scale),
    )
