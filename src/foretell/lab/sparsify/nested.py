"""Nested feed-forward networks (MatFormer, arXiv 2310.07707) of an ordinary model: every prefix of the neurons is a
network of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from jaxtyping import Float, Int

from foretell.lab.quantize.directory import CheckpointDirectory
from foretell.lab.quantize.job import Source
from foretell.lab.quantize.layout import EMBEDDING, FINAL_NORM, HEAD, block_tensors
from foretell.lab.sparsify.activations import BlockActivations, block_activations
from foretell.model.block.activation import gated
from foretell.model.block.layer import FeedForward
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.structures import PREFIX_UNIT
from foretell.model.load.weights import Weights
from foretell.utils.options import Option
from foretell.utils.unfinished import whole

Tensor = torch.Tensor


@dataclass(frozen=True)
class NestedSettings:
    """How a model is nested. `shares`: sizes that are trained together, as shares of all neurons; `batch`: tokens of a
    step of AdamW.
    """

    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    steps: Annotated[
        int,
        Option("Gradient steps per layer; 0: neurons are ordered only, and no answer changes.", "N", least=0),
    ] = 0
    rate: Annotated[float, Option("Learning rate of these steps.", "X", "--lr", 0)] = 1e-4
    extract: Annotated[float, Option("Write this share of the neurons only, as a smaller model.", "SHARE")] = 1.0
    seed: Annotated[int, Option("Seed of text and batches.", "N", least=0)] = 0
    batch: int = 256

    def __post_init__(self) -> None:
        bad = [s for s in (*self.shares, self.extract) if not 0 < s <= 1]
        if bad or not self.shares:
            raise ValueError(f"shares of the neurons are above 0 and at most 1, found {bad[0] if bad else 'none'}")


def prefix_size(share: float, neurons: int) -> int:
    """The largest multiple of `PREFIX_UNIT` within a share of the neurons, but at least one unit; of 1 all of them."""
    return neurons if share == 1 else min(neurons, max(PREFIX_UNIT, int(share * neurons) // PREFIX_UNIT * PREFIX_UNIT))


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


def train_nested(block: BlockActivations, settings: NestedSettings, generator: torch.Generator) -> None:
    """Steps of AdamW on gate, up and down, each on one size drawn at random, towards the output of the whole network
    before; every second step takes the whole network, which protects it. In place.
    """
    mlp, x = block.block.mlp, block.inputs["gate_up"].clone()
    assert isinstance(mlp, FeedForward)
    neurons = mlp.down.weight.shape[1]
    wanted = block.inputs["down"] @ mlp.down.weight.data.T
    scale = wanted.square().mean().clamp_min(1e-12)
    gate, up = (part.clone().requires_grad_() for part in mlp.gate_up.weight.data.chunk(2))
    down = mlp.down.weight.data.clone().requires_grad_()
    optimizer = torch.optim.AdamW([gate, up, down], settings.rate, weight_decay=0.0)
    for step in range(settings.steps):
        rows = torch.randint(len(x), (min(settings.batch, len(x)),), generator=generator)
        drawn = int(torch.randint(len(settings.shares), (1,), generator=generator))
        size = neurons if step % 2 else prefix_size(settings.shares[drawn], neurons)
        inner = gated(x[rows] @ gate[:size].T, x[rows] @ up[:size].T, mlp.activation)
        loss = (inner @ down[:, :size].T - wanted[rows]).square().mean() / scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mlp.gate_up.weight.data = torch.cat([gate.detach(), up.detach()])
    mlp.down.weight.data = down.detach()


def write_nested(
    source: Source,
    tokens: Int[Tensor, "b s"],
    settings: NestedSettings,
    out: Path,
    progress: Callable[[int], None] = lambda block: None,
) -> int:
    """Write the nested model, or the part of it that is extracted, as a checkpoint; it appears whole or not at all.
    Returns the neurons of a layer. `progress` is called with the number of blocks done.
    """
    c, size = source.config, prefix_size(settings.extract, source.config.ffn)
    dtype = torch.float32 if source.weights.storage == "float32" else torch.bfloat16
    folder = source.path if source.path.is_dir() else None
    further = {"intermediate_size": size, "torch_dtype": str(dtype).removeprefix("torch.")}
    with whole(out) as part:
        directory = CheckpointDirectory(part, replace(c, ffn=size), dtype, folder, source.codec, further)
        directory.add(EMBEDDING, source.weights.require(EMBEDDING, c.vocab, c.hidden))
        for name, tensor in _blocks(source, tokens, settings, size, progress):
            directory.add(name, tensor)
        directory.add(FINAL_NORM, source.weights.require(FINAL_NORM, c.hidden).float() + c.norm_offset)
        head = None if c.tied else source.weights.head(c.vocab, c.hidden)
        if head is not None:
            directory.add(HEAD, head)
        directory.finish()
    return size


def _blocks(
    source: Source,
    tokens: Int[Tensor, "b s"],
    settings: NestedSettings,
    size: int,
    progress: Callable[[int], None],
) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(settings.seed)
    for block in block_activations(source.config, source.weights, tokens):
        order_neurons(block)
        if settings.steps:
            with torch.enable_grad():
                train_nested(block, settings, generator)
        mlp = block.block.mlp
        assert isinstance(mlp, FeedForward)
        gate, up = mlp.gate_up.weight.data.chunk(2)
        mlp.gate_up.weight.data = torch.cat([gate[:size], up[:size]])
        mlp.down.weight.data = mlp.down.weight.data[:, :size].contiguous()
        for name, tensor in block_tensors(replace(source.config, ffn=size), block.index, block.block, {}):
            assert isinstance(tensor, Tensor)
            yield name, tensor.float()
        progress(block.index + 1)


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
