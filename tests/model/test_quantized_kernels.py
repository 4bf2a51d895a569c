"""Products with quantised weights: exact ones, and those with int8 activations."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch.nn.functional import linear

from foretell.model import kernels
from foretell.model.kernels import NativeLinear, Precision, build
from foretell.model.kernels.pack import plan_gate_up, plan_rows
from foretell.model.matrices.kinds import BLOCKS, KINDS, Kind
from foretell.model.matrices.stored import StoredMatrix
from kernel_builds import OTHER_BUILDS, other_build

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable_reason() or "no kernels")
QUANTIZED: list[Kind] = [kind for kind in KINDS if kind not in ("F32", "F16", "BF16")]
every_kind = pytest.mark.parametrize("kind", QUANTIZED)
SCALES: dict[Kind, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "MXFP4": (), "Q4_Z": (0, 2), "NVFP4": (), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has half-precision numbers."""


def random_blocks(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> StoredMatrix:
    """Random bytes with finite scales, some of them zero or denormal."""
    rng = np.random.default_rng(seed)
    per_block, size = BLOCKS[kind]
    blocks = rng.integers(0, 256, (outputs * inputs // per_block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        numbers = rng.normal(0, 1e-2, len(blocks)).astype(np.float16)
        numbers[:: 7 if at else 5] = rng.choice(
            np.array([0, 6e-8, -3e-6, 0.5], np.float16), len(numbers[:: 7 if at else 5])
        )
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(110, 131, len(blocks))
    if kind == "NVFP4":
        blocks[:, :4] = rng.normal(0, 1e-2, len(blocks)).astype(np.float32)[:, None].view(np.uint8)
        blocks[:, 4:8] = rng.integers(0, 0x7F, (len(blocks), 4))
        blocks[::9, 4:8] = rng.integers(0, 9, 4)
    if kind == "Q4_Z":
        blocks[:, 2:4] = rng.integers(0, 17, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    return StoredMatrix(kind, inputs, torch.from_numpy(blocks.reshape(outputs, -1)))


@every_kind
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_exact_products_have_the_bits_of_the_widened_weights(kind: Kind, precision: Precision) -> None:
    weight, bias = random_blocks(kind, 77, 512), torch.randn(77)
    packed, widened = NativeLinear(weight, bias, precision), NativeLinear(weight.widen(), bias, precision)
    assert packed.nbytes < widened.nbytes
    for tokens in (1, 2, 7, 13, 64, 71):
        x = torch.randn(tokens, 512)
        assert torch.equal(packed(x), widened(x)), tokens


def integer_reference(weight: StoredMatrix, x: torch.Tensor) -> torch.Tensor:
    """Rounded activations times widened weights, in float64."""
    groups = x.double().view(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = (groups / scale.clamp_min(1e-300)).round() * scale
    return linear(rounded.view(len(x), -1), weight.widen().double())


@every_kind
def test_products_with_int8_activations(kind: Kind) -> None:
    weight, x = random_blocks(kind, 77, 512), torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    layer = NativeLinear(weight, None, "int8-activations")
    found, expected = layer(x), integer_reference(weight, x)
    assert float((found - expected).norm() / expected.norm()) < 1e-4  # ties may be rounded otherwise
    assert torch.equal(found[3], torch.zeros(77))
    for first, last in [(0, 1), (1, 3), (3, 11), (11, 40)]:
        assert torch.equal(layer(x[first:last]), found[first:last])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(layer(x), found)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("instructions", ["", *OTHER_BUILDS])
def test_sums_of_extreme_levels_do_not_overflow(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if instructions:
        library = other_build(instructions)
        monkeypatch.setattr(build, "library", lambda: library)
    signs = torch.where(torch.arange(256) % 2 == 0, 1.0, -1.0)
    x = 127.0 * torch.stack([torch.ones(256), -torch.ones(256), signs, -signs])
    for kind in QUANTIZED:
        per_block, size = BLOCKS[kind]
        for byte in (0x00, 0x0F, 0x77, 0x7F, 0x80, 0xF0, 0xFF):
            blocks = np.full((32 * 256 // per_block, size), byte, np.uint8)
            for at in SCALES[kind]:
                blocks[:, at : at + 2] = np.array([1], np.float16).view(np.uint8)
            if kind == "MXFP4":
                blocks[:, 0] = 128
            if kind == "NVFP4":
                blocks[:, :4], blocks[:, 4:8] = np.array([1], np.float32).view(np.uint8), 0x40
            weight = StoredMatrix(kind, 256, torch.from_numpy(blocks.reshape(32, -1)))
            products = NativeLinear(weight, None, "int8-activations")(x)
            expected = x.double() @ weight.widen().double().T
            assert torch.allclose(products.double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())), (
                kind, byte,
            )  # fmt: skip


def test_parts_of_several_kinds_are_one_layer() -> None:
    shapes: tuple[tuple[Kind, int], ...] = (("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 45))
    parts = [random_blocks(kind, rows, 512, rows) for kind, rows in shapes]
    assert [(w.kind, w.outputs) for w in plan_rows(parts, "float32")] == [("Q4_K", 96), ("Q6_K", 45)]
    assert [w.kind for w in plan_rows(parts[::-1], "float32")] == ["F32"], "45 rows end within a panel"
    mixed = [parts[0], StoredMatrix.of(torch.randn(32, 512))]
    assert [(w.kind, w.operand) for w in plan_rows(mixed, "int8-activations")] == [("BF16", "bfloat16")]
    assert plan_gate_up(parts[0], random_blocks("Q5_K", 64, 512), "bfloat16").kind == "BF16"


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_the_price_of_int8_activations_is_small(kind: Kind) -> None:
    dense, x = torch.randn(96, 576), torch.randn(9, 576)
    stored = StoredMatrix(kind, 576, torch.from_numpy(quantize(dense.numpy(), GGMLQuantizationType[kind])))
    exact, rounded = (NativeLinear(stored, None, p)(x) for p in ("float32", "int8-activations"))
    assert float((exact - rounded).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("instructions", OTHER_BUILDS)
def test_every_instruction_set_gives_the_same_bits(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precisions: tuple[Precision, ...] = ("float32", "bfloat16", "int8-activations")
    cases = [(random_blocks(kind, 40, 256), precision) for kind in QUANTIZED for precision in precisions]
    x = torch.randn(7, 256)
    found = [NativeLinear(weight, None, precision)(x) for weight, precision in cases]
    other = other_build(instructions)
    monkeypatch.setattr(build, "library", lambda: other)
    for (weight, precision), expected in zip(cases, found, strict=True):
        assert torch.equal(NativeLinear(weight, None, precision)(x), expected), (weight.kind, precision)
