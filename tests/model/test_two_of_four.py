"""Kernels of the pattern 2:4: the bits of dense products, from fewer bytes."""

from itertools import combinations

import pytest
import torch

from foretell.lab.compress.sparsity import Pattern, Sparsity
from foretell.model import kernels
from foretell.model.kernels import NativeLinear, Precision, build
from foretell.model.kernels.pack import TWO_OF_FOUR, plan_gate_up, plan_rows
from foretell.model.matrices.stored import StoredMatrix
from kernel_builds import OTHER_BUILDS, other_build

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable_reason() or "no kernels")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8-activations")


def pruned(outputs: int = 77, inputs: int = 512, seed: int = 0) -> torch.Tensor:
    """Bfloat16 weights of the pattern, some groups with fewer numbers, some with negative zeros."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()
    weight = weight.masked_fill(Sparsity.of(Pattern(2, 4)).pruned(weight.float().abs()), 0)
    weight[5, :64] = 0
    for i in range(4):
        weight[8 + i, 4:8] = -0.0
        weight[8 + i, 4 + i] = 1.5
    return weight


@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_have_the_bits_of_the_dense_product(precision: Precision) -> None:
    weight, bias = pruned(), torch.randn(77)
    packed = NativeLinear(StoredMatrix.of(weight), bias, precision)
    dense = NativeLinear(weight.float(), bias, precision)
    assert packed.nbytes < (0.3 if precision == "float32" else 0.57) * dense.nbytes
    for tokens in (1, 2, 3, 6, 7, 12, 13, 60, 71):
        x = torch.randn(tokens, 512)
        assert torch.equal(packed(x), dense(x)), tokens


def test_every_place_of_two_numbers_is_found_again() -> None:
    weight = torch.zeros(32, 32).bfloat16()
    for row, (i, j) in enumerate(combinations(range(4), 2)):
        for group in range(0, 32, 4):
            weight[row, group + i], weight[row, group + j] = 1 + group, -(2 + group)
    found = NativeLinear(StoredMatrix.of(weight), None, "bfloat16")(torch.eye(32))
    assert torch.equal(found.T, weight.float())


def test_only_bfloat16_rows_of_the_pattern_are_packed_by_it() -> None:
    def kind(*parts: torch.Tensor, precision: Precision = "bfloat16") -> str:
        (found,) = plan_rows([StoredMatrix.of(part) for part in parts], precision)
        return found.kind

    weight, dense = pruned(), torch.randn(77, 512).bfloat16()
    assert kind(weight) == kind(weight, pruned(seed=1)) == TWO_OF_FOUR
    assert kind(weight, dense) == kind(weight.half()) == kind(weight.float()) == "BF16"
    assert kind(weight, precision="int8") == "int8" and kind(weight[:, :500]) == "BF16"
    assert kind(torch.zeros(77, 512).bfloat16()) == "BF16"
    assert plan_gate_up(StoredMatrix.of(weight), StoredMatrix.of(weight), "bfloat16").kind == TWO_OF_FOUR
    for row in (3, 40, 76):
        third = weight.clone()
        third[row, 508:511] = 1
        assert kind(third) == "BF16", row


@pytest.mark.parametrize("instructions", OTHER_BUILDS)
def test_every_instruction_set_gives_the_same_bits(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = StoredMatrix.of(pruned(inputs=96)), torch.randn(14, 96)
    found = [NativeLinear(weight, None, p)(x[:tokens]) for p in PRECISIONS[:2] for tokens in (5, 14)]
    other = other_build(instructions)
    monkeypatch.setattr(build, "library", lambda: other)
    again = [NativeLinear(weight, None, p)(x[:tokens]) for p in PRECISIONS[:2] for tokens in (5, 14)]
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
