"""Every precision has the same arithmetic on the kernels, in torch, and under a memory limit."""

import os
from dataclasses import replace

import pytest
import torch

from foretell.api import Model
from foretell.model import kernels as native
from foretell.model.block.decoder import SkipSet
from foretell.model.block.linear import Int8Linear, Linear, rotate_and_round
from foretell.model.kernels import NativeLinear, Precision
from foretell.model.load.network import build_network, build_streamed_network
from foretell.model.offload.block_store import OffloadedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.testing import TINY, RandomWeights, letter_codec, tiny_moe
from helpers import VOCAB, chain_tree, random_tokens

CPU = torch.device("cpu")
WIDE = replace(TINY, vocab=VOCAB, hidden=200, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=300)
TIED = replace(WIDE, tied=True, qkv_bias=True)
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
needs_kernels = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")
either_backend = pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False])


class WithHead(RandomWeights):
    """Random weights with a head that is not the embedding."""

    def get(self, name: str) -> torch.Tensor | None:
        return self.require(name, VOCAB, WIDE.hidden) if name == "lm_head.weight" else None


def network(precision: Precision, kernels: bool, limit: int | None = None, config=WIDE) -> Network:  # type: ignore[no-untyped-def]
    """The model as `load` makes it; `limit`: bytes for its weights."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            patch.setenv("FORETELL_NATIVE", "0")
        if limit is None:
            return build_network(config, WithHead(), precision, CPU)
        return build_streamed_network(config, WithHead(), precision, CPU, limit)


def scores(network: Network, hidden_layers: tuple[int, ...] = ()) -> list[torch.Tensor]:
    output = DecoderRunner(network).forward([0], chain_tree(random_tokens(40)), hidden_layers=hidden_layers)
    return [output.logits, *output.hidden_states]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@needs_kernels
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (50, 193), (95, 450), (64, 576)])
def test_an_int8_product_is_the_same_on_both_backends(outputs: int, inputs: int) -> None:
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, generator=random), torch.randn(outputs, generator=random)
    x = torch.randn(21, inputs, generator=random)
    x[:, 0] *= 50
    # A rotated number halfway between two levels may be rounded to either.
    assert distance(Int8Linear(Linear(weight, bias))(x), NativeLinear(weight, bias, "int8")(x)) < 1e-3


def test_rounded_rows_times_their_scales_are_the_rotated_rows() -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    levels, scale = rotate_and_round(x)
    assert levels.shape == (5, 2, 192) and levels.abs().max() == 127 and torch.equal(levels, levels.round())
    torch.testing.assert_close((levels * scale[..., None]).flatten(1).norm(dim=1), x.norm(dim=1), rtol=0.01, atol=0)
    assert torch.equal(rotate_and_round(torch.zeros(1, 7))[0], torch.zeros(1, 1, 192))


@needs_kernels
@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-5), ("bfloat16", 0.015), ("int8", 0.03)])
def test_both_backends_compute_the_same_up_to_rounding(precision: Precision, near: float) -> None:
    fast, plain = (scores(network(precision, kernels))[0] for kernels in (True, False))
    assert distance(plain, fast) < near


@pytest.mark.covering(1)
@either_backend
@every_precision
@pytest.mark.parametrize("config", [WIDE, TIED], ids=["own head", "tied head"])
def test_a_memory_limit_does_not_change_a_bit(config, precision: Precision, kernels: bool) -> None:  # type: ignore[no-untyped-def]
    whole, limited = network(precision, kernels, config=config), network(precision, kernels, 3_000_000, config)
    assert isinstance(limited, OffloadedDecoder) and limited.backend == whole.backend
    skip = SkipSet(frozenset({1}), frozenset({0, 2}))
    for mine, theirs in (
        (limited, whole),
        (limited.first_layers(2), whole.first_layers(2)),
        (limited.without_sublayers(skip), whole.without_sublayers(skip)),
    ):
        for a, b in zip(scores(mine, (0, 1, 2)), scores(theirs, (0, 1, 2)), strict=True):
            assert torch.equal(a, b)
    assert limited.store.peak_bytes <= 3_000_000


@needs_kernels
def test_under_a_limit_a_tied_embedding_is_stored_once() -> None:
    limit = {p: network(p, True, 10**9, TIED).store.resident_bytes for p in PRECISIONS}  # type: ignore[attr-defined]
    own = network("bfloat16", True, 10**9, replace(TIED, tied=False)).store.resident_bytes  # type: ignore[attr-defined]
    assert limit["int8"] < limit["bfloat16"] < limit["float32"]
    assert limit["bfloat16"] < own


def test_experts_are_quantised_and_routers_are_not() -> None:
    mixture = tiny_moe(WIDE)
    found, exact = (scores(network(p, False, config=mixture))[0] for p in ("int8", "float32"))
    assert 1e-4 < distance(found, exact) < 0.2
    kinds = {name.split(".")[-1]: type(m) for name, m in network("int8", False, config=mixture).named_modules()}  # type: ignore[attr-defined]
    assert kinds["router"] is Linear and kinds["qkv"] is kinds["head"] is Int8Linear


def test_the_kernels_are_available_where_there_is_a_compiler() -> None:
    """Other tests skip without them, so a broken build would go unnoticed."""
    if native.build.find_compiler() is None or os.environ.get("FORETELL_NATIVE") == "0":
        pytest.skip("no compiler, or disabled")
    assert native.available(), native.unavailable_reason()


@either_backend
@every_precision
def test_an_answer_reports_its_backend_and_guarantees(precision: Precision, kernels: bool) -> None:
    run = network(precision, kernels)
    answer = Model("tiny", WIDE, letter_codec(VOCAB), run, precision, ()).generate("abc", max_new_tokens=2, raw=True)[0]
    assert answer.backend.name == ("native" if kernels else "torch")
    assert (answer.backend.precision, answer.backend.device) == (precision, "cpu")
    assert answer.lossless and answer.exact == answer.backend.batch_invariant == kernels
    assert answer.backend.arithmetic.startswith(precision.replace("-", " "))
    assert bool(answer.backend.instructions) == kernels
