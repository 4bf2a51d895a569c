"""LLM-Pruner (Ma et al., arXiv 2305.11627): removes the coupled groups of weights that the loss needs least.

A group is what is of no use in part: a key-value head with its query heads and the columns of the output matrix that
read them, or a channel of the feed-forward network, its rows of gate and up and its column of down. The importance of
a group is the first-order change of the loss, summed over its weights: |w dL/dw|. All blocks lose equally many groups,
so the result is an ordinary, smaller model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.lab.quantize.base import Role, linears, set_matrix
from foretell.lab.quantize.job import Source
from foretell.lab.quantize.layout import shapes_of
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.linear import Linear
from foretell.model.config.model import ModelConfig
from foretell.model.load.build import build_decoder
from foretell.model.training.full_forward import full_forward

Tensor = torch.Tensor
_STEP = 32
"""Channels of a panel of the kernels; so many are removed together where they divide the width."""


class Groups(NamedTuple):
    """Of every block the importance of its key-value heads and channels, or the indices of those that are kept."""

    heads: Tensor
    channels: Tensor


def importance(source: Source, tokens: Int[Tensor, "b s"], progress: Callable[[int], None]) -> Groups:
    """The importance of all groups, [layers, heads] and [layers, channels], by the loss on a text.

    The model and the gradients of its blocks are in memory in float32. `progress` is called with the share of the text
    that is done, in blocks.

    Raises:
        ValueError: the loss on the text is not finite.
    """
    c, rows = source.config, len(tokens)
    decoder = build_decoder(c, source.weights, torch.float32, torch.device("cpu"))
    blocks = [block for block in decoder.blocks if isinstance(block, DecoderBlock)]
    for block in blocks:
        for linear in linears(block).values():
            linear.weight.requires_grad_(True)
    for row, sequence in enumerate(tokens, 1):
        x = full_forward(decoder, decoder.embed(sequence)[None])
        logits = decoder.logits(decoder.final_norm(x)[0, :-1])
        loss = F.cross_entropy(logits, sequence[1:]) / rows
        if not loss.isfinite():
            raise ValueError(f"the loss of {source.name} on the calibration text is not finite; give other --text")
        loss.backward()  # type: ignore[no-untyped-call]
        progress(row * c.layers // rows)
    by_block = [group_sums(c, {role: _scores(linear) for role, linear in linears(block).items()}) for block in blocks]
    return Groups(*map(torch.stack, zip(*by_block, strict=True)))


def _scores(linear: Linear) -> Float[Tensor, "o i"]:
    """|w dL/dw|."""
    assert linear.weight.grad is not None
    return (linear.weight.detach() * linear.weight.grad).abs()


def group_sums(config: ModelConfig, scores: Mapping[Role, Float[Tensor, "o i"]]) -> Groups:
    """Sums of a block's scores over its key-value heads [g] and its channels [f]."""
    groups, width = config.kv_heads, config.heads * config.head_dim
    parts = scores["qkv"].split((width, groups * config.head_dim, groups * config.head_dim))
    heads = sum(part.reshape(groups, -1).sum(1) for part in (*parts, scores["output"].T))
    channels = scores["gate_up"].reshape(-1, config.ffn, config.hidden).sum((0, 2)) + scores["down"].sum(0)
    assert isinstance(heads, Tensor)
    return Groups(heads, channels)


def removals(config: ModelConfig, share: float) -> list[tuple[int, int]]:
    """Numbers of key-value heads and of channels with about this share of the numbers of a block's matrices.

    Raises:
        ValueError: nothing is removed, or nothing would be left.
    """
    numbers = {role: outputs * inputs for role, (outputs, inputs) in shapes_of(config).items()}
    per_head = (numbers["qkv"] + numbers["output"]) / config.kv_heads
    per_channel = (numbers["gate_up"] + numbers["down"]) / config.ffn
    step, total = _STEP if config.ffn % _STEP == 0 else 1, share * sum(numbers.values())
    both = [(heads, round((total - heads * per_head) / per_channel / step) * step) for heads in range(config.kv_heads)]
    fitting = [(heads, channels) for heads, channels in both if 0 <= channels < config.ffn and heads + channels]
    if not fitting:
        one = [per_head] * (config.kv_heads > 1) + [step * per_channel] * (config.ffn > step)
        most = (config.kv_heads - 1) * per_head + (config.ffn - step) * per_channel
        least, most = min(one, default=0) / sum(numbers.values()), most / sum(numbers.values())
        raise ValueError(
            f"--sparsity {share:g}: llm_pruner removes heads and channels from every block, the latter in steps of "
            f"{step} of {config.ffn}, and keeps some of both; "
            + (f"name a share from {least:.2g} to {most:.2g}" if one else "this model has too few, use another method")
        )
    return fitting


def choose(groups: Groups, removable: Sequence[tuple[int, int]]) -> Groups:
    """The groups that every block keeps, [layers, g] and [layers, f], by their importance: of the numbers of groups
    that may be removed those whose groups are least important together.
    """
    least = [each.sort(-1).values.cumsum(-1) for each in groups]

    def lost(removed: tuple[int, int]) -> float:
        return sum(float(sums[:, count - 1].sum()) for sums, count in zip(least, removed, strict=True) if count)

    removed = min(removable, key=lost)
    orders = [each.argsort(stable=True)[:, count:] for each, count in zip(groups, removed, strict=True)]
    return Groups(*(order.sort(-1).values for order in orders))


def narrow_config(config: ModelConfig, kept: Groups) -> ModelConfig:
    """The configuration of the model that has these groups."""
    heads = kept.heads.shape[-1]
    return replace(config, heads=config.heads // config.kv_heads * heads, kv_heads=heads, ffn=kept.channels.shape[-1])


def narrow_block(config: ModelConfig, i: int, block: DecoderBlock, kept: Groups) -> None:
    """Cut the matrices of block `i` to its groups, in place."""
    groups, size = config.kv_heads, config.head_dim
    queries = torch.arange(config.heads * size).view(groups, -1)[kept.heads[i]].flatten()
    keys = torch.arange(groups * size).view(groups, size)[kept.heads[i]].flatten() + config.heads * size
    channels, by_role = kept.channels[i], linears(block)
    rows = torch.arange(by_role["gate_up"].weight.shape[0]).view(-1, config.ffn)[:, channels].flatten()
    for role, chosen in (("qkv", torch.cat((queries, keys, keys + groups * size))), ("gate_up", rows)):
        whole = by_role[role]  # type: ignore[index]
        bias = None if whole.bias is None else whole.bias.data[chosen]
        set_matrix(block, role, Linear(whole.weight.data[chosen], bias))  # type: ignore[arg-type]
    set_matrix(block, "output", Linear(by_role["output"].weight.data[:, queries], by_role["output"].bias))
    set_matrix(block, "down", Linear(by_role["down"].weight.data[:, channels], by_role["down"].bias))
