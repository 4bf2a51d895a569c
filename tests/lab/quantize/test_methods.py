"""Quantisation methods: what their papers promise, on random matrices and blocks."""

from dataclasses import replace

import pytest
import torch

from foretell.lab.quantize.awq import AWQ
from foretell.lab.quantize.base import InputStatistics, linears, output_error
from foretell.lab.quantize.calibration import collect, run_block
from foretell.lab.quantize.gguf_grids import GGUF_GRIDS
from foretell.lab.quantize.gptq import GPTQ
from foretell.lab.quantize.grid import Grid
from foretell.lab.quantize.hqq import HQQ
from foretell.lab.quantize.integer_grid import IntegerGrid
from foretell.lab.quantize.job import quantize_block
from foretell.lab.quantize.rtn import RTN, round_to_nearest
from foretell.model.block.decoder import decoder_rope_tables
from foretell.model.block.layer import DecoderBlock
from foretell.model.config.model import ModelConfig
from foretell.testing import TINY, tiny_decoder

GRIDS: list[Grid] = [*GGUF_GRIDS.values(), IntegerGrid(4, 64, symmetric=False), IntegerGrid(4, 64, symmetric=True)]


def weights(inputs: int = 256) -> torch.Tensor:
    return torch.randn(48, inputs, generator=torch.Generator().manual_seed(0)) * 0.1


def statistics(inputs: int = 256, tokens: int = 600) -> InputStatistics:
    """Of correlated inputs whose sizes differ."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(inputs, inputs, generator=generator) * 0.1 + torch.eye(inputs)
    x = (
        torch.randn(tokens, inputs, generator=generator)
        @ mixed
        * (0.1 + 3 * torch.rand(inputs, generator=generator) ** 4)
    )
    return InputStatistics(x.T @ x / tokens, x.abs().mean(0))


def unrelated(inputs: int = 256) -> InputStatistics:
    return InputStatistics(torch.eye(inputs), torch.ones(inputs))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.name)
def test_gptq_with_unrelated_inputs_is_rounding(grid: Grid, act_order: bool) -> None:
    found, wanted = (
        GPTQ(act_order=act_order).quantize("down", weights(), grid, unrelated()),
        round_to_nearest(weights(), grid),
    )
    # A weight in the middle of two levels may go either way.
    assert float((found.level != wanted.level).float().mean()) < 1e-3
    torch.testing.assert_close(found.parameters.scale, wanted.parameters.scale)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.name)
def test_gptq_loses_less_than_rounding(grid: Grid, act_order: bool) -> None:
    weight, inputs = weights(), statistics()
    found = GPTQ(act_order=act_order).quantize("down", weight, grid, inputs)
    loss, rounding = (output_error(q.values() - weight, inputs) for q in (found, round_to_nearest(weight, grid)))
    assert loss < 0.8 * rounding


def test_gptq_ignores_inputs_that_are_never_used_and_refuses_infinite_ones() -> None:
    inputs = statistics()
    moment = inputs.second_moment.clone()
    moment[5], moment[:, 5] = 0, 0
    found = GPTQ().quantize("down", weights(), GGUF_GRIDS["Q4_0"], InputStatistics(moment, inputs.mean_magnitude))
    assert not found.values()[:, 5].any()
    with pytest.raises(ValueError, match="calibration inputs of a matrix are not finite"):
        GPTQ().quantize("down", weights(), GGUF_GRIDS["Q4_0"], InputStatistics(moment * torch.inf, moment[0]))


def test_gptq_takes_fewer_tokens_than_inputs() -> None:
    inputs, weight = statistics(tokens=40), weights()
    found = GPTQ().quantize("down", weight, GGUF_GRIDS["Q4_0"], inputs)
    assert output_error(found.values() - weight, inputs) < output_error(
        round_to_nearest(weight, GGUF_GRIDS["Q4_0"]).values() - weight, inputs
    )


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.name)
def test_hqq_loses_no_more_than_rounding(grid: Grid) -> None:
    weight = weights()
    weight[::4, ::50] *= 10
    loss, rounding = (
        (q.values() - weight).abs().mean()
        for q in (HQQ().quantize("down", weight, grid, None), round_to_nearest(weight, grid))
    )
    assert loss <= rounding


CONFIG = replace(TINY, hidden=64, head_dim=16, ffn=96, vocab=11)


def block_of(config: ModelConfig) -> tuple[DecoderBlock, torch.Tensor]:
    decoder = tiny_decoder(config, dtype=torch.float32)
    x = torch.randn(4, 32, config.hidden, generator=torch.Generator().manual_seed(2))
    x[..., ::9] *= 20  # Some channels are much larger than the others.
    return decoder.block(0), x


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, kv_heads=4),
        replace(CONFIG, kv_heads=4, qkv_bias=True, mlp_bias=True, architecture="qwen2"),
        replace(CONFIG, post_norms=True, norm_offset=1.0, activation="gelu_tanh"),
    ],
    ids=["grouped heads", "all heads", "biases", "gemma"],
)
def test_folded_scales_leave_the_block_as_it_is(config: ModelConfig) -> None:
    block, x = block_of(config)
    ropes = decoder_rope_tables(config)
    before, inputs = run_block(config, ropes, 0, block, x), collect(config, ropes, 0, block, x)
    grids = dict.fromkeys(linears(block), GGUF_GRIDS["Q4_0"])
    old = {role: linear.weight.clone() for role, linear in linears(block).items()}
    folded = AWQ().fold(block, config, grids, inputs)
    assert any(not torch.equal(linear.weight, old[role]) for role, linear in linears(block).items())
    torch.testing.assert_close(run_block(config, ropes, 0, block, x), before, rtol=1e-4, atol=1e-4)
    again = collect(config, ropes, 0, block, x)
    for role, found in again.items():
        torch.testing.assert_close(found.second_moment, folded[role].second_moment, rtol=1e-3, atol=1e-4)


def test_calibrated_methods_lose_less_than_rounding_in_a_block() -> None:
    losses = {}
    for quantizer in (RTN(), GPTQ(), AWQ()):
        block, x = block_of(CONFIG)
        ropes = decoder_rope_tables(CONFIG)
        before, inputs = run_block(CONFIG, ropes, 0, block, x), collect(CONFIG, ropes, 0, block, x)
        quantize_block(CONFIG, block, quantizer, dict.fromkeys(linears(block), GGUF_GRIDS["Q4_0"]), inputs)
        losses[type(quantizer)] = float((run_block(CONFIG, ropes, 0, block, x) - before).square().mean())
    assert losses[GPTQ] < losses[RTN] and losses[AWQ] < losses[RTN]


@pytest.mark.parametrize("grid", GRIDS[-2:], ids=lambda g: g.name)
def test_awq_of_equal_inputs_is_rounding(grid: Grid) -> None:
    config = replace(TINY, hidden=256, ffn=256)
    block = tiny_decoder(config, dtype=torch.float32).block(0)
    before = {role: linear.weight.data.clone() for role, linear in linears(block).items()}
    AWQ().fold(block, config, dict.fromkeys(before, grid), dict.fromkeys(("qkv", "gate_up"), unrelated()))
    assert all(torch.equal(linear.weight.data, before[role]) for role, linear in linears(block).items())
    found = AWQ().quantize("qkv", before["qkv"], grid, unrelated())
    assert torch.equal(found.values(), round_to_nearest(before["qkv"], grid).values())
