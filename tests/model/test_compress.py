"""Quantised and pruned copies of a target: shared and changed weights, and acceptance that falls with precision."""

from dataclasses import replace

import pytest
import torch

from foretell.catalogue import BuildContext, find
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.moe import ExpertFeedForward
from foretell.model.load.transforms import fake_quantize, fake_quantize_weight
from foretell.model.offload.influence import measure_influence
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder, tiny_moe
from helpers import VOCAB, all_logits, random_tokens, run, statistics_of

DEEP = replace(TINY, vocab=VOCAB, layers=4)


def blocks(decoder: Decoder) -> list[DecoderBlock]:
    return [b for b in decoder.blocks if isinstance(b, DecoderBlock)]


def acceptance(method: str, values: dict[str, object]) -> float:
    """Share of drafted tokens that are accepted, over greedy answers to five prompts."""
    target = tiny_decoder(DEEP)
    chain = {"num_speculative_tokens": 1, "confidence_threshold": 0.0}
    engine = Engine(
        DecoderRunner(target),
        find(method).build(BuildContext(VOCAB, target), {**values, **chain}),
    )
    updates = run(engine, [Request(random_tokens(9, seed=i), max_new_tokens=40) for i in range(5)])
    counts = [statistics_of(u) for u in updates]
    return sum(sum(s.accepted_per_position) for s in counts) / sum(s.drafted for s in counts)


def test_rounding_is_symmetric_per_output_and_within_half_a_step() -> None:
    weight = torch.randn(5, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bits, group in ((8, 0), (4, 0), (4, 32), (3, 7)):
        out = fake_quantize_weight(weight, bits, group)
        step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert (out - weight).abs().max() <= step.max() / 2 + 1e-12
        assert torch.allclose(fake_quantize_weight(-weight, bits, group), -out)
        assert len(out[0, : group or 70].unique()) <= 2**bits - 1
    assert torch.equal(fake_quantize_weight(torch.zeros(2, 4), 4), torch.zeros(2, 4))


def test_groups_lose_less_than_whole_rows() -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    lost = [float((fake_quantize_weight(weight, 4, g) - weight).square().sum()) for g in (16, 64, 0)]
    assert lost == sorted(lost)


def test_copies_leave_the_target_alone_and_share_what_they_do_not_change() -> None:
    target = tiny_decoder(DEEP)
    before = all_logits(target, [1, 2, 3])
    copy = fake_quantize(target, 4, 8)
    assert (all_logits(target, [1, 2, 3]) == before).all()
    assert (all_logits(copy, [1, 2, 3]) != before).any()
    assert copy.embedding.data_ptr() == target.embedding.data_ptr()


def test_sixteen_bits_change_next_to_nothing() -> None:
    target, text = tiny_decoder(DEEP), random_tokens(12)
    exact = all_logits(target, text)
    assert abs(all_logits(fake_quantize(target, 16), text) - exact).max() < 1e-2


def test_experts_are_quantised_and_the_router_is_not() -> None:
    target = tiny_decoder(tiny_moe(DEEP))
    copy = fake_quantize(target, 3)
    for old, new in zip(blocks(target), blocks(copy), strict=True):
        assert isinstance(old.mlp, ExpertFeedForward) and isinstance(new.mlp, ExpertFeedForward)
        assert torch.equal(old.mlp.router.weight, new.mlp.router.weight)
        assert not torch.equal(old.mlp.gate_up[0].get_parameter("weight"), new.mlp.gate_up[0].get_parameter("weight"))


def test_acceptance_falls_with_fewer_bits_and_blocks() -> None:
    bits = [acceptance("quantised_draft", {"quantization_bits": b}) for b in (8, 4, 2)]
    assert bits == sorted(bits, reverse=True) and bits[0] > 0.95 > bits[-1]
    layers = [acceptance("pruned_draft", {"pruned_layers": n}) for n in (0, 1, 4)]
    assert layers == sorted(layers, reverse=True) and layers[0] == 1


@pytest.mark.parametrize("bits", [1, 17])
def test_impossible_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"2 to 16 bits.*found {bits}"):
        fake_quantize(tiny_decoder(DEEP), bits)


def test_more_blocks_than_there_are_cannot_be_dropped() -> None:
    with pytest.raises(ValueError, match="cannot lack 5 blocks: the model has 4"):
        acceptance("pruned_draft", {"pruned_layers": 5})


def test_influence_finds_the_block_that_does_nothing() -> None:
    target = tiny_decoder(DEEP)
    idle = blocks(target)[2]
    for linear in (idle.output, idle.mlp.down):
        assert not isinstance(linear, torch.Tensor)
        linear.get_parameter("weight").data.zero_()
    found = measure_influence(target, random_tokens(12))
    assert found.block[2] < 1e-12 and min(found.block[i] for i in (0, 1, 3)) > 1e-3
    assert found.least_influential_blocks(1).attention == found.least_influential_blocks(1).mlp == {2}
    assert found.least_influential_sublayers(2).attention == found.least_influential_sublayers(2).mlp == {2}
    assert not found.least_influential_blocks(0).attention


def test_influence_needs_two_tokens() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, found 1"):
        measure_influence(tiny_decoder(DEEP), [3])
