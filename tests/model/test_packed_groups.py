"""KIVI: rounding in groups, which numbers a token reads whatever the passes, memory, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from command import expect_error, tiny_target
from foretell.catalogue import BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.load import check_cache_dtype
from foretell.model import kernels
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.packed_groups import (
    GROUP_SLOTS,
    KIVI_BITS,
    RESIDUAL,
    PackedGroups,
    packed_slots,
    round_groups,
)
from foretell.model.cache.policy import Retrieval, SnapKV
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.compact_runner import SparseCacheRunner
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.evicting_runner import EvictingRunner
from foretell.model.run.network import Network
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, chain_tree, random_tokens

native = pytest.param("native", marks=pytest.mark.skipif(not kernels.available(), reason="no compiler"))
networks = pytest.mark.parametrize("kind", ["torch", native])
formats = pytest.mark.parametrize("numbers", KIVI_BITS)
CONFIG = replace(TINY, vocab=VOCAB, heads=4, kv_heads=2, head_dim=32, context=1024)
TEXT = random_tokens(330, seed=2)


def network_of(kind: str, numbers: str = "int4-kivi", precision: str = "float32") -> Network:
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    decoder = tiny_decoder(replace(CONFIG, cache_dtype=numbers), dtype=dtype)  # type: ignore[arg-type]
    return NativeDecoder(decoder, precision) if kind == "native" else decoder  # type: ignore[arg-type]


def read(runner: DecoderRunner, sizes: list[int], row: int = 0) -> torch.Tensor:
    """Logits after all tokens, in chunks of these sizes and then one by one."""
    parts, at = [], 0
    for size in [*sizes, *[1] * (len(TEXT) - sum(sizes))]:
        parts.append(runner.forward([row], chain_tree(TEXT[at : at + size])).logits)
        runner.commit(row, range(size))
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize("bits", [4, 2])
def test_rounding_is_at_most_half_a_step_and_equal_numbers_stay(bits: int) -> None:
    x = torch.randn(40, GROUP_SLOTS, generator=torch.Generator().manual_seed(0)) * 3
    x[0], x[1] = 0, 1.5
    levels, least, step = round_groups(x, bits)
    found = levels * step[:, None] + least[:, None]
    assert levels.min() == 0 and levels.max() == 2**bits - 1
    # Least number and step are rounded to bfloat16: 2^-9 of them, and of the step at most as often as there are levels.
    slack = (x.abs().amax(1) + step * 2**bits) * 2**-8
    assert bool(((found - x).abs() <= (step / 2 + slack)[:, None]).all())
    assert torch.equal(found[:2], x[:2])


@formats
def test_groups_are_read_as_they_were_packed(numbers: str) -> None:
    generator, bits = torch.Generator().manual_seed(1), KIVI_BITS[numbers]
    packed = PackedGroups(2, 3, 64, bits, torch.device("cpu"))
    packed.reserve(4, RESIDUAL + 200)
    k, v = torch.randn(2, 3, 96, 64, generator=generator)
    for slot in (0, 32, 64):
        packed.pack(1, 4, slot, k[:, slot : slot + 32], v[:, slot : slot + 32])
    keys, values = packed.read(1, [4], 96, torch.float32)
    for slot in (0, 32, 64):
        by_dimension, least, step = round_groups(k[:, slot : slot + 32].transpose(1, 2), bits)
        expected = (by_dimension * step[..., None] + least[..., None]).transpose(1, 2)
        torch.testing.assert_close(keys[0, :, slot : slot + 32], expected, rtol=0, atol=1e-6)
    by_token, least, step = round_groups(v.unflatten(2, (2, 32)), bits)
    torch.testing.assert_close(values[0], (by_token * step[..., None] + least[..., None]).flatten(2), rtol=0, atol=1e-6)
    assert packed.block_bytes == 2 * 3 * 2 * (64 * 64 * bits // 8 + 64 * 64 // 32 * 4)


@networks
@formats
def test_what_a_token_reads_depends_on_its_position_alone(kind: str, numbers: str) -> None:
    whole = read(DecoderRunner(network_of(kind, numbers)), [len(TEXT)])
    for sizes in ([100, 130, 37], [7, 250]):
        found = read(DecoderRunner(network_of(kind, numbers)), sizes)
        torch.testing.assert_close(found[-60:], whole[-60:], rtol=0, atol=0 if kind == "native" else 1e-4)
    plain = read(DecoderRunner(network_of(kind, "auto")), [len(TEXT)])
    # The first tokens that read a group; up to these the texts are read alike.
    first = RESIDUAL + GROUP_SLOTS
    torch.testing.assert_close(whole[:first], plain[:first], rtol=0, atol=1e-5)
    assert float((whole[first] - plain[first]).abs().max()) > 1e-4


@pytest.mark.skipif(not kernels.available(), reason="no compiler")
@formats
def test_the_kernels_and_torch_compute_the_same(numbers: str) -> None:
    found, expected = (read(DecoderRunner(network_of(kind, numbers)), [300]) for kind in ("native", "torch"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@networks
def test_trees_across_the_border_of_a_group_leave_nothing_and_rows_are_apart(kind: str) -> None:
    network = network_of(kind)
    runner, expected = DecoderRunner(network), read(DecoderRunner(network), [200])
    runner.forward([2], chain_tree(TEXT[40:240]))  # another row, of another text
    runner.commit(2, range(200))
    runner.forward([0], chain_tree(TEXT[:200]))
    runner.commit(0, range(200))
    for at in range(200, 326, 2):
        tree = tree_from_lists([[TEXT[at], 3, 4, TEXT[at + 1], 5]], [[-1, 0, 1, 0, 3]])
        logits = runner.forward([0], tree).logits
        runner.commit(0, [0, 3])
        wanted = expected[at : at + 2]
        torch.testing.assert_close(logits[[0, 3]], wanted, rtol=0, atol=0 if kind == "native" else 1e-4)


@networks
def test_whole_numbers_of_packed_groups_are_freed(kind: str) -> None:
    runner = DecoderRunner(network_of(kind))
    read(runner, [300])
    cache = runner.cache
    assert isinstance(cache, KVCache) and cache.packed is not None
    assert packed_slots(len(TEXT) - 1) == 192 == cache.packed.done[0]
    assert cache.blocks.first_held(0) == 3 and cache.blocks.blocks_in_use == 3, "of 6 blocks of 64 tokens"
    assert cache.packed.blocks.blocks_in_use == 3
    runner.truncate(0, 0)
    assert cache.blocks.blocks_in_use == cache.packed.blocks.blocks_in_use == 0


@networks
def test_rows_go_back_as_far_as_their_whole_numbers_reach(kind: str) -> None:
    network = network_of(kind)
    runner, expected = DecoderRunner(network), read(DecoderRunner(network), [len(TEXT)])
    read(runner, [len(TEXT)])
    assert runner.restorable(0, 325) == 325 and runner.restorable(0, 300) == 0
    runner.truncate(0, 325)
    found = runner.forward([0], chain_tree(TEXT[325:])).logits
    torch.testing.assert_close(found[-1:], expected[-1:], rtol=0, atol=0 if kind == "native" else 1e-4)
    assert runner.copy_row(0, 1, 325) and runner.length(1) == 325
    found = runner.forward([1], chain_tree(TEXT[325:])).logits
    torch.testing.assert_close(found[-1:], expected[-1:], rtol=0, atol=0 if kind == "native" else 1e-4)
    runner.truncate(0, 200)
    assert runner.length(0) == 0


@pytest.mark.covering(1)
@networks
@pytest.mark.parametrize("method", ["ngram", "layer_skip", "recycling"])
def test_methods_give_the_text_of_plain_decoding(kind: str, method: str) -> None:
    network = network_of(kind)
    prompts = [random_tokens(n, seed=n) for n in (150, 9, 185)]
    found = []
    for name, rows, chunk in (("autoregressive", 1, 512), (method, 3, 50)):
        engine = Engine(DecoderRunner(network), build(name, BuildContext(VOCAB, network)), rows, chunk)
        # Sampled drafts of layer_skip are accepted by rejection, which keeps the distribution, not the seed's text.
        sampling = SamplingParams(temperature=0.0 if method == "layer_skip" else 0.7, seed=3)
        done = engine.complete([Request(p, sampling, max_new_tokens=40) for p in prompts])
        found.append([list(answer.tokens) for answer in done])
    assert found[0] == found[1]


def test_requests_wait_where_the_cache_is_limited_and_prefixes_are_not_shared() -> None:
    network = network_of("torch")
    runner = DecoderRunner(network)
    assert not runner.shares_prefixes
    prompts = [random_tokens(170, seed=n) for n in range(4)]
    texts = []
    for limit, prefixes in ((None, False), (11 * 64 * 2 * 2 * 2 * 32 * 4, True)):
        engine = Engine(
            DecoderRunner(network), build("autoregressive", BuildContext(VOCAB, network)), 4, 64, cache_bytes=limit,
            prefix_caching=prefixes,
        )  # fmt: skip
        done = engine.complete([Request(p, max_new_tokens=20) for p in [*prompts, prompts[0]]])
        texts.append([list(answer.tokens) for answer in done])
    assert texts[0] == texts[1]


def test_what_groups_do_not_fit_is_refused_with_a_sentence() -> None:
    for make in (
        lambda: SparseCacheRunner(network_of("torch"), Retrieval(16), 4),
        lambda: EvictingRunner(network_of("torch"), SnapKV(16)),
    ):
        with pytest.raises(ValueError, match="int4-kivi stores them in groups; use another --kv-cache-dtype"):
            make()
    with pytest.raises(ValueError, match=r"m: kv_cache_dtype int2-kivi needs heads of a multiple of 32 .* heads of 16"):
        check_cache_dtype("m", replace(TINY, head_dim=16, cache_dtype="int2-kivi"))
    error = expect_error("generate", "hello", "--model", tiny_target(), "--kv-cache-dtype", "int3-kivi")
    assert "int3-kivi" in error and "int2-kivi" in error
    assert np.array_equal([packed_slots(p) for p in (0, 159, 160, 191, 192)], [0, 0, 32, 32, 64])
