"""Products in AMX's tiles, by a model of the tile registers in plain C++; no processor with AMX is needed."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_kernels import NINE, SMALL, cache_of, chain, layout, stack_of, tokens
from test_quantized_kernels import random_blocks

from foretell.model.kernels import NativeLinear, Precision, available, build, unavailable_reason
from foretell.model.kernels.instruction_sets import processor_features
from foretell.model.stored_matrix import Kind
from kernel_builds import compile_kernels

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason() or "available")
COUNTS = (1, 2, 11, 12, 16, 17, 31, 33, 70, 300)
"""Tokens: one A tile and several, whole and partial, and more than have their sums kept at once."""


@pytest.fixture(scope="module")
def model() -> ctypes.CDLL:
    """The kernels with tiles, which are modelled in C++."""
    library = compile_kernels(["-O0", "-DFORETELL_AMX_MODEL"])
    assert library.foretell_instructions().decode().endswith("+amx-model")
    return library


def use(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: library)


def tile_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sums of TDPBF16PS: for 32 inputs at a time the even and the odd ones apart, then both, then the total.

    Products of bfloat16 numbers are exact in float32.
    """
    x, weight = x.bfloat16().float(), weight.bfloat16().float()
    total = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], 32):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(first, min(first + 32, x.shape[1])):
            sums[k % 2] += x[:, k, None] * weight[None, :, k]
        total += sums[0] + sums[1]
    return total


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (95, 450), (64, 1056), (1, 7)])
def test_bfloat16_sums_have_the_order_of_the_instruction(
    outputs: int, inputs: int, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, monkeypatch)
    weight, x = torch.randn(outputs, inputs), torch.randn(300, inputs)
    layer, expected = NativeLinear(weight, None, "bfloat16"), tile_products(x, weight)
    for count in COUNTS:
        assert torch.equal(layer(x[:count]), expected[:count]), count


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "MXFP4"])
def test_widened_blocks_have_the_bits_of_widened_weights(
    kind: Kind, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, monkeypatch)
    weight, bias, x = random_blocks(kind, 40, 768), torch.randn(40), torch.randn(33, 768)
    packed, widened = NativeLinear(weight, bias, "bfloat16"), NativeLinear(weight.widen(), bias, "bfloat16")
    for count in (1, 17, 33):
        assert torch.equal(packed(x[:count]), widened(x[:count])), count


def integer_layer(kind: Kind | None) -> NativeLinear:
    """A layer with int8 activations: of a kind of blocks, or with int8 weights."""
    if kind is None:
        return NativeLinear(torch.linspace(-1, 1, 77 * 768).sin().view(77, 768), None, "int8")
    return NativeLinear(random_blocks(kind, 77, 768), None, "int8-activations")


@pytest.mark.parametrize("kind", [None, "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0"])
def test_integer_products_are_those_without_tiles(
    kind: Kind | None, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(300, 768)
    expected = integer_layer(kind)(x)
    use(model, monkeypatch)
    layer = integer_layer(kind)
    for count in COUNTS:
        assert torch.equal(layer(x[:count]), expected[:count]), count


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_tree_paths_chunks_and_threads_agree_bit_for_bit(
    precision: Precision, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, monkeypatch)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        stack, x = stack_of(NINE, precision), tokens(50, NINE)
        whole = stack(x, chain(50, 0), cache_of(NINE, precision), 0, 2)
        torch.set_num_threads(1)
        cache = cache_of(NINE, precision)
        parts = [stack(x[a:b], chain(b - a, a), cache, 0, 2) for a, b in [(0, 1), (1, 2), (2, 20), (20, 50)]]
        assert torch.equal(torch.cat(parts), whole)
    finally:
        torch.set_num_threads(threads)
    stack, prompt, x = stack_of(SMALL, precision), tokens(21, SMALL), tokens(12, SMALL, seed=2)
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 5, 7, 8, 10]
    cache, alone = cache_of(SMALL, precision), cache_of(SMALL, precision)
    stack(prompt, chain(21, 0), cache, 0, 2), stack(prompt, chain(21, 0), alone, 0, 2)
    path = [0, 1, 3, 6, 7, 9]
    found = stack(x, layout(parents, 21), cache, 0, 2)
    assert torch.equal(stack(x[path], chain(len(path), 21), alone, 0, 2), found[path])


EMULATED = """
import ctypes, pathlib, sys, torch
from kernel_builds import compile_kernels
from foretell.model.kernels import NativeLinear, build
from foretell.model.kernels.instruction_sets import INSTRUCTION_SETS
from test_quantized_kernels import random_blocks

emulator = ctypes.CDLL(sys.argv[1])
amx = next(entry for entry in INSTRUCTION_SETS if entry.name == "amx")
libraries = [compile_kernels(flags) for flags in (["-O0", "-DFORETELL_AMX_MODEL"], ["-O1", *amx.flags])]
names = [library.foretell_instructions().decode() for library in libraries]
assert names[1].endswith("+amx"), names
emulator.amx_emulator_install()
torch.set_num_threads(2)
cases = [(torch.randn(77, inputs), precision) for inputs in (192, 450) for precision in ("bfloat16", "int8")]
cases += [(random_blocks(kind, 40, 256), precision)
          for kind in ("Q4_0", "Q6_K") for precision in ("bfloat16", "int8-activations")]
for weight, precision in cases:
    x, found = torch.randn(49, weight.shape[1]), []
    for library in libraries:
        build.library = lambda: library
        layer = NativeLinear(weight, torch.ones(len(weight) if isinstance(weight, torch.Tensor) else 40), precision)
        found.append([layer(x[:count]) for count in (1, 13, 49)])
    assert all(map(torch.equal, *found)), (weight, precision)
print("executed", emulator.amx_emulator_executed())
"""


@pytest.mark.skipif(
    not {"avx512_bf16", "avx512_vnni"} <= processor_features() or "amx_tile" in processor_features(),
    reason="needs a processor with AVX-512 BF16 and VNNI and without AMX",
)
def test_the_compiled_tile_instructions_do_what_the_model_does(tmp_path: Path) -> None:
    """The kernels compiled for AMX, with their tile instructions emulated in a handler of SIGILL."""
    compiler, folder = build.find_compiler(), Path(__file__).parent
    assert compiler is not None
    emulator = tmp_path / "emulator.so"
    source = str(folder / "amx_emulator.cpp")
    subprocess.run([compiler, "-O2", "-mfma", "-shared", "-fPIC", source, "-o", str(emulator)], check=True)
    path = os.pathsep.join([str(folder), str(folder.parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", EMULATED, str(emulator)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 1000
