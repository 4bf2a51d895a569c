"""Nested feed-forward networks (MatFormer, arXiv 2310.07707) of an ordinary model: every prefix of the neurons is a
network of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float, Int

from foretell.lab.compress.checkpoint import tensors_of
from foretell.lab.quantize.directory import CheckpointDirectory
from foretell.lab.quantize.job import Source
from foretell.lab.sparsify.activations import BlockActivations, block_activations
from foretell.model.block.layer import DecoderBlock, FeedForward
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.structures import PREFIX_UNIT, prefix_size
from foretell.model.load.build import build_block
from foretell.model.load.weights import EMBEDDING, FINAL_NORM, HEAD, Weights
from foretell.utils.unfinished import whole

Tensor = torch.Tensor


def contributions(block: BlockActivations) -> Float[Tensor, " f"]:
    """Mean squared contribution of every neuron to the output of its network."""
    mlp = block.block.mlp
    assert isinstance(mlp, FeedForward)
    return block.inputs["down"].square().mean(0) * mlp.down.weight.float().square().sum(0)


def order_neurons(block: BlockActivations) -> None:
    """Sort the neurons of a block by their contribution, largest first, in place."""
    mlp = block.block.mlp
    assert isinstance(mlp, FeedForward)
    order = contributions(block).argsort(descending=True)
    both = torch.cat([order, order + len(order)])
    mlp.gate_up.weight.data = mlp.gate_up.weight.data[both].contiguous()
    mlp.down.weight.data = mlp.down.weight.data[:, order].contiguous()
    block.inputs["down"] = block.inputs["down"][:, order]


def write_nested(
    source: Source,
    tokens: Int[Tensor, "b s"] | None,
    extract: float,
    out: Path,
    progress: Callable[[int], None] = lambda block: None,
) -> int:
    """Write the nested model, or this share of its neurons, as a checkpoint; it appears whole or not at all. Without
    `tokens` the neurons stay in their order. Returns the neurons of a layer. `progress` is called with the number of
    blocks done.
    """
    c, size = source.config, prefix_size(extract, source.config.ffn)
    dtype = torch.float32 if source.weights.storage == "float32" else torch.bfloat16
    further = {"intermediate_size": size, "torch_dtype": str(dtype).removeprefix("torch.")}
    with whole(out) as part:
        directory = CheckpointDirectory(part, replace(c, ffn=size), dtype, source.folder, source.codec, further)
        directory.add(EMBEDDING, source.weights.require(EMBEDDING, c.vocab, c.hidden))
        for name, tensor in _blocks(source, tokens, size, progress):
            directory.add(name, tensor)
        directory.add(FINAL_NORM, source.weights.require(FINAL_NORM, c.hidden).float() + c.norm_offset)
        head = None if c.tied else source.weights.head(c.vocab, c.hidden)
        if head is not None:
            directory.add(HEAD, head)
        directory.finish()
    return size


def _blocks(
    source: Source, tokens: Int[Tensor, "b s"] | None, size: int, progress: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    for i, block in enumerate(_ordered_blocks(source, tokens)):
        mlp = block.mlp
        assert isinstance(mlp, FeedForward)
        gate, up = mlp.gate_up.weight.data.chunk(2)
        mlp.gate_up.weight.data = torch.cat([gate[:size], up[:size]])
        mlp.down.weight.data = mlp.down.weight.data[:, :size].contiguous()
        yield from tensors_of(replace(source.config, ffn=size), i, block).items()
        progress(i + 1)


def _ordered_blocks(source: Source, tokens: Int[Tensor, "b s"] | None) -> Iterator[DecoderBlock]:
    c, weights = source.config, source.weights
    if tokens is None:
        yield from (build_block(c, i, weights, torch.float32, torch.device("cpu")) for i in range(c.layers))
        return
    for activations in block_activations(c, weights, tokens):
        order_neurons(activations)
        yield activations.block


def mix_sizes(
    config: ModelConfig,
    weights: Weights,
    tokens: Int[Tensor, "b s"],
    sparsity: float,
    progress: Callable[[int], None] = lambda block: None,
) -> tuple[int, ...]:
    """Sizes per layer (Mix'n'Match) that together leave out a share of the neurons: units of neurons, in their order,
    go to the layers where they contribute the largest part of the output.
    """
    shares = list[Tensor]()
    for block in block_activations(config, weights, tokens):
        contribution = contributions(block)
        whole = len(contribution) // PREFIX_UNIT * PREFIX_UNIT
        shares.append(contribution[:whole].view(-1, PREFIX_UNIT).sum(1) / contribution.sum())
        progress(block.index + 1)
    return spread_units(shares, sparsity)


def spread_units(shares: Sequence[Float[Tensor, " u"]], sparsity: float) -> tuple[int, ...]:
    """Neurons per layer, from the contribution of every unit of a layer: the next unit goes to the layer where it
    contributes most; every layer has one at least.
    """
    units = [1] * len(shares)
    for _ in range(round((1 - sparsity) * sum(map(len, shares))) - len(shares)):
        gain = [float(s[n]) if n < len(s) else -1.0 for s, n in zip(shares, units, strict=True)]
        units[max(range(len(gain)), key=gain.__getitem__)] += 1
    return tuple(PREFIX_UNIT * n for n in units)
