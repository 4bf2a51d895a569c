"""Blocks with factors of low rank and with shortcuts of the residual stream: kernels against torch, and all spans."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.core.tree import tree_from_lists
from foretell.lab.quantize.base import Role, linears, set_matrix
from foretell.model import kernels as native
from foretell.model.block.decoder import BlockRange, Decoder, SkipSet
from foretell.model.block.linear import FactoredLinear, Linear, quantize_int8
from foretell.model.block.sparsity import GateThreshold, check_sparse
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.config.compressed import LowRank
from foretell.model.kernels.block_weights import PackedBlock
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.packed_file import PackedReader, PackedWriter
from foretell.model.kernels.structures import PRECISIONS, Precision
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import supports_spans
from foretell.testing import TINY, tiny_decoder
from helpers import all_logits, chain_tree, random_tokens

pytestmark = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason())
CONFIG = replace(TINY, vocab=50, hidden=64, head_dim=16, ffn=96, qkv_bias=True, mlp_bias=True)
RANKS: dict[Role, int] = {"qkv": 40, "output": 17, "gate_up": 33, "down": 32}
TOLERANCE: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 6e-2, "int8-activations": 3e-2}


def low_rank(product: bool = False) -> Decoder:
    """A decoder whose matrices are random factors, or the products of these."""
    decoder, random = tiny_decoder(CONFIG, dtype=torch.float32), torch.Generator().manual_seed(3)
    for block in decoder.blocks:
        for role, linear in linears(block).items():  # type: ignore[arg-type]
            outputs, inputs = linear.weight.shape
            outer = torch.randn(outputs, RANKS[role], generator=random) * RANKS[role] ** -0.5
            inner = torch.randn(RANKS[role], inputs, generator=random) * inputs**-0.5
            made = FactoredLinear(Linear(inner), Linear(outer, linear.bias))
            set_matrix(block, role, Linear(made.weight, linear.bias) if product else made)  # type: ignore[arg-type]
    decoder.config = replace(CONFIG, low_rank=LowRank(**RANKS))
    return decoder


def sliced() -> Decoder:
    """A decoder with random shortcuts."""
    decoder, random = tiny_decoder(CONFIG, dtype=torch.float32), torch.Generator().manual_seed(4)
    for block in decoder.blocks:
        block.attention_shortcut, block.mlp_shortcut = (
            Linear(torch.linalg.qr(torch.randn(64, 64, generator=random)).Q.contiguous()) for _ in range(2)
        )
    decoder.config = replace(CONFIG, shortcuts=True)
    return decoder


MAKERS = {"low rank": low_rank, "sliced": sliced}


def in_torch(decoder: Decoder, precision: Precision) -> Decoder:
    if precision in ("bfloat16", "int8-activations"):
        return copy.deepcopy(decoder).bfloat16()
    if precision == "int8":
        decoder = copy.deepcopy(decoder)
        quantize_int8(decoder)
    return decoder


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernels_compute_what_torch_computes(kind: str, precision: Precision) -> None:
    decoder = MAKERS[kind]()
    found, wanted = (
        torch.from_numpy(all_logits(network, random_tokens(30, 50)))
        for network in (NativeDecoder(decoder, precision), in_torch(decoder, precision))
    )
    assert (found - wanted).norm() < TOLERANCE[precision] * wanted.norm()


def test_factors_compute_their_product() -> None:
    factors, product = (torch.from_numpy(all_logits(low_rank(dense), random_tokens(30, 50))) for dense in (False, True))
    torch.testing.assert_close(factors, product, rtol=1e-4, atol=1e-4)
    dense, thin = NativeDecoder(low_rank(True), "float32"), NativeDecoder(low_rank(), "float32")
    assert thin.packed_bytes < dense.packed_bytes


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_tree_gets_the_bits_of_its_paths(kind: str, precision: Precision) -> None:
    network = NativeDecoder(MAKERS[kind](), precision)
    prompt, path = random_tokens(12, 50), [3, 4, 5]
    tree = tree_from_lists([[3, 4, 9, 8, 5, 7]], [[-1, 0, 0, 1, 1, 2]])
    runner = DecoderRunner(network)
    runner.forward([0], chain_tree(prompt))
    runner.commit(0, range(len(prompt)))
    found = runner.forward([0], tree).logits[[0, 1, 4]]
    alone = DecoderRunner(network)
    alone.forward([0], chain_tree(prompt))
    alone.commit(0, range(len(prompt)))
    for i, token in enumerate(path):
        assert torch.equal(alone.forward([0], chain_tree([token])).logits[0], found[i]), i
        alone.commit(0, [0])


@pytest.mark.parametrize("kind", MAKERS)
def test_sublayers_that_are_skipped_leave_the_shortcuts(kind: str) -> None:
    skip, tokens = SkipSet(frozenset({0}), frozenset({1})), random_tokens(9, 50)
    decoder = MAKERS[kind]()
    found, wanted = (
        all_logits(n.without_sublayers(skip), tokens) for n in (NativeDecoder(decoder, "float32"), decoder)
    )
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_keys_are_written_alone(kind: str, backend: str) -> None:
    decoder = MAKERS[kind]()
    network: Network = NativeDecoder(decoder, "float32") if backend == "native" else decoder
    tree, x = chain_tree([1, 2, 3]), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    layout, _ = Layout.from_tree(tree, [0], np.zeros(1, np.int64), tree.active)
    given, caches = x.clone(), []
    for write in (network.write_keys, network.run):
        cache = network.new_cache()
        assert isinstance(cache, KVCache)
        cache.reserve([0], [8])
        write(x, layout, cache, BlockRange(0, 1))
        caches.append(cache)
    assert torch.equal(x, given)
    for side in ("k", "v"):
        alone, whole = (getattr(cache, side)[:1] for cache in caches)
        assert alone.any() and torch.equal(alone, whole), side


@pytest.mark.parametrize("kind", MAKERS)
def test_packed_blocks_are_restored_from_a_file(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    network, file = NativeDecoder(MAKERS[kind](), "bfloat16"), tmp_path_factory.mktemp("packed") / "file"
    file.touch()
    writer = PackedWriter(file)
    for block in network.stack.blocks:
        writer.add(block)
    writer.finish({})
    with PackedReader(file) as reader:
        parts = reader.read_all()
    blocks = [network.stack.attach(i, PackedBlock(p.structs, p.tensors)) for i, p in enumerate(parts)]
    tokens = random_tokens(9, 50)
    assert (all_logits(network, tokens) == all_logits(network.with_blocks(blocks), tokens)).all()


def test_what_needs_one_basis_or_dense_matrices_is_refused() -> None:
    assert supports_spans(low_rank().config) and not supports_spans(sliced().config)
    for decoder, said in ((low_rank(), "has matrices of low rank"), (sliced(), "has a sliced residual stream")):
        with pytest.raises(ValueError, match=said):
            check_sparse(replace(decoder.config, mlp_bias=False), [GateThreshold(0.1)] * 2)
