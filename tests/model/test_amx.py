"""Products in AMX's tiles, by a model of the tile registers in plain C++; no processor with AMX is needed."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_kernels import (
    LONG,
    NINE,
    SMALL,
    TOLERANCE,
    blocks_of,
    cache_of,
    chain,
    error,
    layout,
    reference,
    stack_of,
    tokens,
)
from test_quantized_kernels import random_blocks

from foretell.model.block.spec import LinearWeights
from foretell.model.config.model import ModelConfig
from foretell.model.kernels import (
    NativeLinear,
    NativeStack,
    Precision,
    available,
    build,
    rms_norm,
    unavailable_reason,
)
from foretell.model.kernels.instruction_sets import processor_features
from foretell.model.matrices.kinds import Kind
from kernel_builds import compile_kernels

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason() or "available")
COUNTS = (1, 11, 12, 16, 17, 33)
"""Tokens: one A tile and several, whole and partial."""
MANY = 260
"""More tokens than have their sums kept at once."""


@pytest.fixture(scope="module")
def model() -> ctypes.CDLL:
    """The kernels with tiles, which are modelled in C++."""
    library = compile_kernels(["-O0", "-DFORETELL_AMX_MODEL"])
    assert library.foretell_instructions().decode().endswith("+amx-model")
    return library


def use(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: library)


def tile_products(x: torch.Tensor, weight: torch.Tensor, step: int = 32) -> torch.Tensor:
    """The sums of TDPBF16PS: for `step` inputs at a time the even and the odd ones apart, then both, then the total.

    Products of bfloat16 numbers are exact in float32.
    """
    x, weight = x.bfloat16().float(), weight.bfloat16().float()
    total = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], step):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(first, min(first + step, x.shape[1])):
            sums[k % 2] += x[:, k, None] * weight[None, :, k]
        total += sums[0] + sums[1]
    return total


@pytest.mark.parametrize(
    ("outputs", "inputs", "counts"),
    [(33, 64, (*COUNTS, MANY)), (70, 450, COUNTS), (33, 1056, (1, 33)), (1, 7, COUNTS)],
)
def test_bfloat16_sums_have_the_order_of_the_instruction(
    outputs: int, inputs: int, counts: tuple[int, ...], model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, monkeypatch)
    weight, x = torch.randn(outputs, inputs), torch.randn(max(counts), inputs)
    layer, expected = NativeLinear(weight, None, "bfloat16"), tile_products(x, weight)
    for count in counts:
        assert torch.equal(layer(x[:count]), expected[:count]), count


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "MXFP4"])
def test_widened_blocks_have_the_bits_of_widened_weights(
    kind: Kind, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, monkeypatch)
    weight, bias, x = random_blocks(kind, 40, 512), torch.randn(40), torch.randn(33, 512)
    packed, widened = NativeLinear(weight, bias, "bfloat16"), NativeLinear(weight.widen(), bias, "bfloat16")
    for count in (1, 17, 33):
        assert torch.equal(packed(x[:count]), widened(x[:count])), count


def integer_layer(kind: Kind | None) -> NativeLinear:
    """A layer with int8 activations: of a kind of blocks, or with int8 weights."""
    if kind is None:
        return NativeLinear(torch.linspace(-1, 1, 40 * 512).sin().view(40, 512), None, "int8")
    return NativeLinear(random_blocks(kind, 40, 512), None, "int8-activations")


@pytest.mark.parametrize("kind", [None, "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0"])
def test_integer_products_are_those_without_tiles(
    kind: Kind | None, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = (*COUNTS, MANY) if kind in (None, "Q4_0") else (12, 33)
    x = torch.randn(max(counts), 512)
    expected = integer_layer(kind)(x)
    use(model, monkeypatch)
    layer = integer_layer(kind)
    for count in counts:
        assert torch.equal(layer(x[:count]), expected[:count]), count


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_tree_paths_chunks_and_threads_agree_bit_for_bit(
    precision: Precision, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, monkeypatch)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        stack, x = stack_of(NINE, precision), tokens(34, NINE)
        whole = stack(x, chain(34, 0), cache_of(NINE, precision), 0, 2)
        torch.set_num_threads(1)
        cache = cache_of(NINE, precision)
        parts = [stack(x[a:b], chain(b - a, a), cache, 0, 2) for a, b in [(0, 1), (1, 2), (2, 20), (20, 34)]]
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


def tile_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, step: int) -> torch.Tensor:
    """Causal attention of one head over a text of one chunk; `step`: dimensions, and keys, that an instruction sums."""
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    scores = tile_products(q, k, step).double().masked_fill(later, -torch.inf)
    weights = ((scores - scores.amax(1, keepdim=True)) * scale).exp()
    return tile_products(weights.float(), v.T, step) / weights.sum(1, keepdim=True)


def cancelling_heads(count: int, dim: int, cancels: str) -> torch.Tensor:
    """Queries, keys and values [count, 5, dim] of three heads, with sums whose large terms cancel."""
    heads = torch.randn(count, 5, dim, generator=torch.Generator().manual_seed(0))
    if cancels == "scores":
        heads[:, :4] *= 3e-3
        heads[:, :4, 0] = heads[:, :4, 1] = 6
        heads[:, 3, 1] *= -1
    else:
        heads[:, :3], heads[:, 3] = 0, 1
        heads[:, 4] *= 1e-6
        heads[0::4, 4], heads[1::4, 4] = 4, -4
    return heads


@pytest.mark.parametrize(("dim", "step"), [(32, 32), (48, 16)])
@pytest.mark.parametrize("cancels", ["scores", "values"])
def test_attention_sums_in_the_order_of_the_instruction(
    dim: int, step: int, cancels: str, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer without rotation whose projections are identities. In another order the sums are other numbers."""
    use(model, monkeypatch)
    count, width, scale = 44, 5 * dim, 8e4
    config = replace(
        SMALL, hidden=width, layers=1, heads=3, kv_heads=1, head_dim=dim, norm_eps=1e-30, attention_scale=scale
    )
    unit = torch.eye(width)
    qkv, output = LinearWeights((unit,)), LinearWeights((unit[:, : 3 * dim].contiguous(),))
    block = replace(blocks_of(config)[0], attention_norm=torch.ones(width), qkv=qkv, output=output)
    angles = torch.zeros(count, dim // 2)
    stack = NativeStack(config, [block], "bfloat16", (angles.cos(), angles.sin())).without_sublayers([], [0])
    x = 1e-14 * cancelling_heads(count, dim, cancels).view(count, width)  # small beside what is added to it
    found = (stack(x, chain(count, 0), cache_of(config, "bfloat16"), 0, 1) - x)[:, : 3 * dim].view(count, 3, dim)
    heads = rms_norm(x, torch.ones(width), config.norm_eps).bfloat16().float().view(count, 5, dim)
    expected = torch.stack([tile_attention(heads[:, h], heads[:, 3], heads[:, 4], scale, step) for h in range(3)], 1)
    pairs = slice(3, None, 4)  # texts that end after numbers have cancelled
    assert error(found[pairs], expected[pairs]) < 1e-2
    other = torch.stack([tile_attention(heads[:, h], heads[:, 3], heads[:, 4], scale, 48 - step) for h in range(3)], 1)
    assert error(other[pairs], expected[pairs]) > 0.03


@pytest.mark.parametrize("config", [LONG, replace(LONG, cache_dtype="int8")], ids=["bfloat16", "int8 cache"])
def test_attention_over_several_chunks_does_not_depend_on_company(
    config: ModelConfig, model: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, monkeypatch)
    config = replace(config, heads=3, kv_heads=1)
    stack, x, threads = stack_of(config, "bfloat16"), tokens(264, config), torch.get_num_threads()
    expected = stack(x, chain(264, 0), cache_of(config, "bfloat16", slots=320), 0, 1)
    exact = replace(config, cache_dtype="auto")
    assert error(expected, reference(exact, blocks_of(exact), x)) < TOLERANCE["bfloat16"]
    try:
        torch.set_num_threads(2)
        cache = cache_of(config, "bfloat16", slots=320)
        assert torch.equal(stack(x[:250], chain(250, 0), cache, 0, 1), expected[:250])
        # The path 250 .. 258 is not contiguous, crosses the border of two chunks and has other nodes between.
        parents, order = [-1, -1, 0, 2, 3, 1, 4, 6, 7, 8], [250, 9, 251, 252, 253, 10, 254, 255, 256, 257]
        path = [0, 2, 3, 4, 6, 7, 8, 9]
        assert torch.equal(stack(x[order], layout(parents, 250), cache, 0, 1)[path], expected[250:258])
        cache.move(0, [250 + node for node in path], 250)
        for i in (258, 259):
            assert torch.equal(stack(x[i : i + 1], chain(1, i), cache, 0, 1), expected[i : i + 1])
    finally:
        torch.set_num_threads(threads)


EMULATED = """
import ctypes, pathlib, sys, torch
from kernel_builds import compile_kernels
from foretell.model.kernels import NativeLinear, build
from foretell.model.kernels.instruction_sets import INSTRUCTION_SETS
from test_kernels import NINE, cache_of, chain, stack_of, tokens
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
found = []
for library in libraries:
    build.library = lambda: library
    found.append(stack_of(NINE, "bfloat16")(tokens(18, NINE), chain(18, 0), cache_of(NINE, "bfloat16"), 0, 2))
assert torch.equal(*found)
print("executed", emulator.amx_emulator_executed())
"""


@pytest.mark.exhaustive
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
