"""The CPU kernels against plain torch, and their batch invariance."""

import ctypes
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.model.block.spec import BlockWeights, GatedWeights, LinearWeights
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.config.model import ModelConfig, MoEConfig, RopeConfig
from foretell.model.kernels import (
    NativeLinear,
    NativeStack,
    Precision,
    argmax,
    available,
    build,
    rms_norm,
    structures,
    topk,
    topk_softmax,
    unavailable_reason,
)
from foretell.model.kernels.kv_cache import NativeKVCache
from foretell.model.kernels.structures import PRECISIONS
from kernel_builds import OTHER_BUILDS, other_build

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason() or "available")
TOLERANCE: dict[Precision, float] = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 4e-2, "int8-activations": 3e-2}
CACHE_TOLERANCE = {"auto": 0, "int8": 1e-2, "int8-halves": 1e-2, "int4": 0.25, "int4-kivi": 0, "int2-kivi": 0}
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


SMALL = ModelConfig("llama", vocab=50, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, context=256)
NINE = replace(SMALL, hidden=72, heads=9, kv_heads=3, head_dim=32, ffn=100)
SHAPES = {
    "small": SMALL,
    "9 heads on 3, odd widths": NINE,
    "head_dim 80, bias": replace(SMALL, hidden=45, head_dim=80, qkv_bias=True, output_bias=True),
    "head_dim 128, one head per key": replace(SMALL, heads=2, head_dim=128, ffn=33),
    "query and key norms, window": replace(SMALL, qk_norm=True, window=5, window_layers=(1,)),
    "half of a head is rotated": replace(SMALL, head_dim=32, rope=RopeConfig(fraction=0.5)),
    "gates of ReLU": replace(SMALL, activation="relu"),
    "int8 cache": replace(NINE, cache_dtype="int8"),
    "int8 cache in halves": replace(NINE, cache_dtype="int8-halves"),
    "int4 cache": replace(NINE, cache_dtype="int4"),
    "gemma": replace(
        SMALL,
        post_norms=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        attention_softcap=5.0,
        attention_scale=0.2,
        qk_norm=True,
    ),
}
ACTIVATE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
every_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)


def blocks_of(config: ModelConfig) -> list[BlockWeights]:
    random = torch.Generator().manual_seed(0)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=random) / math.sqrt(inputs)

    def vector(size: int, wanted: bool = True, around: float = 1.0) -> Tensor | None:
        return around + 0.1 * torch.randn(size, generator=random) if wanted else None

    def norm(size: int) -> Tensor:
        weight = vector(size)
        assert weight is not None
        return weight

    heads, width = config.heads + 2 * config.kv_heads, config.heads * config.head_dim
    return [
        BlockWeights(
            attention_norm=norm(config.hidden),
            qkv=LinearWeights(
                (matrix(heads * config.head_dim, config.hidden),),
                vector(heads * config.head_dim, config.qkv_bias, around=0),
            ),
            q_norm=vector(config.head_dim, config.qk_norm),
            k_norm=vector(config.head_dim, config.qk_norm),
            output=LinearWeights((matrix(config.hidden, width),), vector(config.hidden, config.output_bias, around=0)),
            mlp_norm=norm(config.hidden),
            mlp=GatedWeights(
                LinearWeights((matrix(config.ffn, config.hidden), matrix(config.ffn, config.hidden))),
                LinearWeights((matrix(config.hidden, config.ffn),)),
            ),
            post_attention_norm=vector(config.hidden, config.post_norms),
            post_mlp_norm=vector(config.hidden, config.post_norms),
        )
        for _ in range(config.layers)
    ]


def tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    assert config.rope is not None
    dim = config.rope.rotary_dim(config.head_dim)
    frequency = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    angle = torch.outer(torch.arange(config.context).float(), frequency)
    return angle.cos(), angle.sin()


def stack_of(config: ModelConfig, precision: Precision) -> NativeStack:
    return NativeStack(config, blocks_of(config), precision, tables(config))


def cache_of(config: ModelConfig, precision: Precision, rows: int = 1, slots: int = 64) -> NativeKVCache:
    scaled = config.cache_dtype != "auto"
    cache = NativeKVCache(config.layers, config.kv_heads, config.head_dim, precision, config.cache_dtype)
    cache.reserve(range(rows), [slots] * rows)
    # NaN in slots that were not written: a kernel that reads them returns NaN.
    for part in (cache.k_scale, cache.v_scale) if scaled else (cache.k, cache.v):
        assert part is not None
        part.fill_(torch.nan)
    return cache


def layout(parents: Sequence[int], length: int, row: int = 0, slots: Sequence[int] | None = None) -> Layout:
    """A tree whose roots follow `length` committed tokens; slots that continue the sequence extend the prefix."""
    slot = list(range(length, length + len(parents)) if slots is None else slots)
    depth: list[int] = []
    prefix: list[int] = []
    extra: list[list[int]] = []
    for node, parent in enumerate(parents):
        parent_prefix, parent_extra = (prefix[parent], extra[parent]) if parent >= 0 else (length, [])
        contiguous = not parent_extra and slot[node] == parent_prefix
        depth.append(0 if parent < 0 else depth[parent] + 1)
        prefix.append(parent_prefix + contiguous)
        extra.append(parent_extra if contiguous else [*parent_extra, slot[node]])
    width = max(map(len, extra))
    columns = (
        [row] * len(parents),
        slot,
        [length + d for d in depth],
        prefix,
        [e + [-1] * (width - len(e)) for e in extra],
    )
    return Layout(*(torch.tensor(column, dtype=torch.int32) for column in columns))


def chain(count: int, length: int, row: int = 0) -> Layout:
    return layout(range(-1, count - 1), length, row)


def concatenate(parts: Sequence[Layout]) -> Layout:
    names = [field.name for field in fields(Layout) if getattr(parts[0], field.name) is not None]
    return Layout(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def tokens(count: int, config: ModelConfig, seed: int = 1) -> Tensor:
    return torch.randn(count, config.hidden, generator=torch.Generator().manual_seed(seed))


def linear(x: Tensor, layer: LinearWeights | None) -> Tensor:
    assert layer is not None
    return F.linear(x, torch.cat([part for part in layer.parts if isinstance(part, Tensor)]), layer.bias)


def reference(config: ModelConfig, blocks: Sequence[BlockWeights], x: Tensor, skip: Sequence[str] = ()) -> Tensor:
    """A causal forward pass over a whole sequence in float32, as in the papers."""
    count = len(x)
    cos, sin = (table[:count, None] for table in tables(config))
    half = cos.shape[-1]

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return F.rms_norm(x, x.shape[-1:], weight, config.norm_eps)

    def rotate(x: Tensor) -> Tensor:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(x: Tensor, block: BlockWeights, window: int) -> Tensor:
        heads = linear(x, block.qkv).view(count, -1, config.head_dim)
        q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], 1)
        q, k = rotate(norm(q, block.q_norm)), rotate(norm(k, block.k_norm))
        group = config.heads // config.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("ihd,jhd->hij", q, k) * config.scale
        if config.attention_softcap:
            score = config.attention_softcap * torch.tanh(score / config.attention_softcap)
        distance = torch.arange(count)[:, None] - torch.arange(count)
        hidden = (distance < 0) | (distance >= (window or count))
        mixed = torch.einsum("hij,jhd->ihd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return norm(linear(mixed.reshape(count, -1), block.output), block.post_attention_norm)

    def feed_forward(x: Tensor, block: BlockWeights) -> Tensor:
        assert block.mlp is not None
        gate, up = linear(x, block.mlp.gate_up).chunk(2, -1)
        gate = ACTIVATE[config.activation](gate)
        return norm(linear(gate * up, block.mlp.down), block.post_mlp_norm)

    for i, block in enumerate(blocks):
        if f"attention {i}" not in skip:
            x = x + attention(norm(x, block.attention_norm), block, config.window_of(i))
        if f"mlp {i}" not in skip:
            x = x + feed_forward(norm(x, block.mlp_norm), block)
    return x


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@every_precision
@every_shape
def test_a_pass_agrees_with_plain_torch(config: ModelConfig, precision: Precision) -> None:
    x = tokens(37, config)
    found = stack_of(config, precision)(x, chain(37, 0), cache_of(config, precision), 0, config.layers)
    allowed = max(TOLERANCE[precision], CACHE_TOLERANCE[config.cache_dtype])
    assert error(found, reference(config, blocks_of(config), x)) < allowed


@every_precision
@every_shape
def test_chunks_and_single_tokens_agree_bit_for_bit(config: ModelConfig, precision: Precision) -> None:
    stack, x = stack_of(config, precision), tokens(50, config)
    whole = stack(x, chain(50, 0), cache_of(config, precision), 0, 2)
    for sizes in ([1] * 50, [3, 20, 1, 26], [13, 37]):
        cache, parts, at = cache_of(config, precision), [], 0
        for size in sizes:
            parts.append(stack(x[at : at + size], chain(size, at), cache, 0, 2))
            at += size
        assert torch.equal(torch.cat(parts), whole)


@every_precision
@every_shape
def test_tree_paths_agree_with_chains_bit_for_bit(config: ModelConfig, precision: Precision) -> None:
    stack, prefix = stack_of(config, precision), 21
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 5, 7, 8, 10]
    prompt, x = tokens(prefix, config), tokens(len(parents), config, seed=2)
    for slots in (None, [40, 21, 33, 50, 22, 23, 60, 61, 24, 25, 63, 26]):
        cache = cache_of(config, precision)
        stack(prompt, chain(prefix, 0), cache, 0, 2)
        found = stack(x, layout(parents, prefix, slots=slots), cache, 0, 2)
        for leaf in (4, 9, 11):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            alone = cache_of(config, precision)
            stack(prompt, chain(prefix, 0), alone, 0, 2)
            assert torch.equal(stack(x[path], chain(len(path), prefix), alone, 0, 2), found[path])


@every_precision
def test_rows_of_a_batch_agree_with_rows_alone_bit_for_bit(precision: Precision) -> None:
    stack, lengths = stack_of(NINE, precision), [3, 30, 17, 1, 48]
    sequences = [tokens(n, NINE, seed=n) for n in lengths]
    batch = concatenate([chain(n, 0, row) for row, n in enumerate(lengths)])
    found = stack(torch.cat(sequences), batch, cache_of(NINE, precision, rows=5), 0, 2)
    for sequence, part in zip(sequences, torch.split(found, lengths), strict=True):
        assert torch.equal(stack(sequence, chain(len(sequence), 0), cache_of(NINE, precision, slots=50), 0, 2), part)


@every_precision
def test_threads_do_not_matter(precision: Precision) -> None:
    stack, x, threads = stack_of(NINE, precision), tokens(40, NINE), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(stack(x, chain(40, 0), cache_of(NINE, precision), 0, 2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


LONG = replace(SMALL, layers=1, heads=6, context=640)
"""Its texts have several chunks of keys."""


@pytest.mark.parametrize(
    "config",
    [LONG, replace(LONG, cache_dtype="int8"), replace(LONG, window=300, window_layers=(0,)), replace(LONG, heads=14)],
    ids=["plain", "int8 cache", "window", "groups of 7"],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_long_texts_agree_bit_for_bit_however_they_are_cut(config: ModelConfig, threads: int) -> None:
    stack, x, before = stack_of(config, "bfloat16"), tokens(560, config), torch.get_num_threads()
    expected = stack(x, chain(560, 0), cache_of(config, "bfloat16", slots=640), 0, 1)
    exact = replace(config, cache_dtype="auto")
    assert error(expected, reference(exact, blocks_of(exact), x)) < TOLERANCE["bfloat16"]
    try:
        torch.set_num_threads(threads)
        cache = cache_of(config, "bfloat16", slots=640)
        assert torch.equal(stack(x[:509], chain(509, 0), cache, 0, 1), expected[:509])
        # Node 6 is beyond the border of two chunks; its ancestors' slots are not in order.
        parents, order = [-1, -1, 0, 2, 3, 1, 4, 6], [509, 100, 510, 511, 512, 101, 513, 514]
        found = stack(x[order], layout(parents, 509), cache, 0, 1)
        path = [0, 2, 3, 4, 6, 7]
        assert torch.equal(found[path], expected[509:515])
        cache.move(0, [509 + node for node in path], 509)
        for i in (515, 516):
            assert torch.equal(stack(x[i : i + 1], chain(1, i), cache, 0, 1), expected[i : i + 1])
        assert torch.equal(stack(x[517:], chain(43, 517), cache, 0, 1), expected[517:])
    finally:
        torch.set_num_threads(before)


@every_precision
def test_a_range_of_blocks_is_a_part_of_the_pass(precision: Precision) -> None:
    stack, x = stack_of(SMALL, precision), tokens(9, SMALL)
    whole, parts = cache_of(SMALL, precision), cache_of(SMALL, precision)
    middle = stack(x, chain(9, 0), parts, 0, 1)
    assert torch.equal(stack(middle, chain(9, 0), parts, 1, 2), stack(x, chain(9, 0), whole, 0, 2))
    assert torch.equal(stack(x, chain(9, 0), parts, 1, 1), x)
    assert torch.equal(stack.first_layers(1)(x, chain(9, 0), parts, 0, 1), middle)


@every_precision
@pytest.mark.parametrize("count", [1, 9, 40])
def test_hidden_layers_are_the_streams_between_blocks(count: int, precision: Precision) -> None:
    stack, x, where = stack_of(SMALL, precision), tokens(count, SMALL), chain(count, 0)
    first, second, last = stack.run(x, where, cache_of(SMALL, precision), 0, 2, (0, 1))
    middle, end = stack.run(x, where, cache_of(SMALL, precision), 0, 2, (1,))
    cache = cache_of(SMALL, precision)
    assert torch.equal(first, x)
    assert torch.equal(second, stack(x, where, cache, 0, 1)) and torch.equal(middle, second)
    assert torch.equal(last, stack(second, where, cache, 1, 2)) and torch.equal(end, last)
    for wrong in ((1, 0), (0, 0), (2,), (-1,)):
        with pytest.raises(ValueError, match="hidden_layers must ascend"):
            stack.run(x, where, cache, 0, 2, wrong)


def test_skipped_sublayers_leave_the_residual_unchanged() -> None:
    stack, x = stack_of(SMALL, "float32"), tokens(9, SMALL)
    found = stack.without_sublayers([0], [1])(x, chain(9, 0), cache_of(SMALL, "float32"), 0, 2)
    assert error(found, reference(SMALL, blocks_of(SMALL), x, ["attention 0", "mlp 1"])) < TOLERANCE["float32"]
    whole = stack(x, chain(9, 0), cache_of(SMALL, "float32"), 0, 2)
    assert error(whole, reference(SMALL, blocks_of(SMALL), x)) < TOLERANCE["float32"]


@every_precision
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 7), (33, 64), (50, 193), (95, 450)])
def test_linear_of_any_shape(outputs: int, inputs: int, precision: Precision) -> None:
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, generator=random), torch.randn(outputs, generator=random)
    x = torch.randn(40, inputs, generator=random)
    linear = NativeLinear(weight.double(), bias, precision)
    found = linear(x)
    assert error(found, F.linear(x, weight, bias)) < TOLERANCE[precision]
    for count in range(1, 30):
        assert torch.equal(linear(x[:count]), found[:count])


def test_int8_survives_an_outlier() -> None:
    x, weight = torch.randn(8, 576), torch.randn(64, 576)
    x[:, 100] *= 100
    assert error(NativeLinear(weight, None, "int8")(x), x @ weight.T) < 2e-2


def test_rms_norm() -> None:
    for width in (1, 16, 45, 576):
        x, weight = torch.randn(20, width), torch.randn(width)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5))


def test_argmax_takes_the_first_of_equals() -> None:
    for width in (1, 15, 16, 1000, 1001):
        x = torch.randint(-5, 5, (7, width)).float()
        assert torch.equal(argmax(x), (x == x.amax(1, keepdim=True)).int().argmax(1))
    assert argmax(torch.full((1, 20), -torch.inf)).item() == 0


def test_invalid_arguments_are_refused() -> None:
    stack, x, cache = stack_of(SMALL, "float32"), tokens(3, SMALL), cache_of(SMALL, "float32")
    good = chain(3, 0)
    for bad in (
        chain(3, 254),
        chain(3, 0, row=1),
        replace(good, position=good.position + 255),
        replace(good, visible_prefix=good.visible_prefix - 1),
    ):
        with pytest.raises(ValueError, match=r"token \d of the layout"):
            stack(x, bad, cache, 0, 2)
    with pytest.raises(ValueError, match="contiguous"):
        stack(x.double(), good, cache, 0, 2)
    with pytest.raises(ValueError, match="cache"):
        stack(x, good, cache_of(SMALL, "bfloat16"), 0, 2)
    with pytest.raises(ValueError, match=r"slots \[5, 4\] cannot be moved to 3"):
        cache.move(0, [5, 4], 3)
    with pytest.raises(ValueError, match="a NativeKVCache"):
        stack(x, good, KVCache(2, 2, 16, torch.float32, torch.device("cpu")), 0, 2)
    with pytest.raises(ValueError, match="blocks 0 to 3"):
        stack(x, good, cache, 0, 3)


def test_supported_architectures() -> None:
    assert all(NativeStack.supports(config) for config in SHAPES.values())
    refused = (
        replace(SMALL, experts=MoEConfig(4, 2, 8, selection_bias=True)),
        replace(SMALL, activation="gelu"),
        replace(SMALL, head_dim=20),
    )
    assert not any(NativeStack.supports(config) for config in refused)


@pytest.mark.parametrize("instructions", OTHER_BUILDS)
def test_every_instruction_set_gives_the_same_bits(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, where = tokens(37, NINE), chain(37, 0)
    expected = {p: stack_of(NINE, p)(x, where, cache_of(NINE, p), 0, 2) for p in PRECISIONS}
    other = other_build(instructions)
    monkeypatch.setattr(build, "library", lambda: other)
    for precision in PRECISIONS:
        found = stack_of(NINE, precision)(x, where, cache_of(NINE, precision), 0, 2)
        assert torch.equal(found, expected[precision]), precision
        again = cache_of(NINE, precision)
        parts = [stack_of(NINE, precision)(x[i : i + 1], chain(1, i), again, 0, 2) for i in range(5)]
        assert torch.equal(torch.cat(parts), found[:5])


def test_without_a_compiler_the_reason_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    result = build.build()
    assert result.library is None
    assert "C++ compiler" in result.reason


def test_a_failing_compiler_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    result = build.build(["-DBROKEN", "-include", "no/such/header.h"])
    assert result.library is None
    assert "no/such/header.h" in result.reason


def test_the_library_has_the_interface_that_python_declares() -> None:
    lines = structures.library_interface(build.library()).splitlines()
    assert lines == structures.interface().splitlines()
    assert {"panel 32", "Cache 184"} <= set(lines)


def test_structures_lie_in_memory_as_the_compiler_lays_them_out(tmp_path: Path) -> None:
    fields = [(kind, name) for kind in structures.STRUCTURES for name, *_ in kind._fields_]
    prints = [
        f'  std::printf("%zu %zu\\n", offsetof({kind.__name__}, {name}), sizeof({kind.__name__}::{name}));'
        for kind, name in fields
    ]
    header = structures.SOURCES / "interface.h"
    lines = ["#include <cstddef>", "#include <cstdio>", f'#include "{header}"', "int main() {", *prints, "}"]
    (tmp_path / "offsets.cpp").write_text("\n".join(lines))
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-std=c++17", "offsets.cpp", "-o", "offsets"], check=True, cwd=tmp_path)
    found = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.split()
    wanted = [(getattr(kind, name).offset, getattr(kind, name).size) for kind, name in fields]
    assert list(map(int, found)) == [number for pair in wanted for number in pair] and len(fields) > 200


def test_arguments_of_kernels_have_the_types_of_their_declarations() -> None:
    declared, address = structures.signatures(), ctypes.c_void_p
    integer, model, layer = ctypes.c_int32, ctypes.POINTER(structures.Model), ctypes.POINTER(structures.Layer)
    caches = ctypes.POINTER(structures.Layout), ctypes.POINTER(structures.Cache)
    wanted = (model, layer, integer, integer, address, address, *caches, address, integer, address, address, integer)
    assert declared["foretell_stack"] == (integer, wanted)
    assert declared["foretell_panel_words"] == (ctypes.c_int64, (integer, integer))
    assert declared["foretell_instructions"] == (ctypes.c_char_p, ())


def test_a_field_that_a_structure_has_not_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"Weight of csrc/interface.h has no field word$"):
        structures.make(structures.Weight, word=1)


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library whose interface text is given by a source file, in place of the kernels, with its own cache."""
    source = tmp_path / "small.cpp"
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(structures, "declare_signatures", lambda library: library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source.write_text(f'extern "C" const char* foretell_abi() {{ return R"({structures.interface()})"; }}')
    return source


def test_a_library_with_another_interface_is_refused(small_library: Path) -> None:
    assert build.build().library is not None
    size = ctypes.sizeof(structures.Weight)
    small_library.write_text(small_library.read_text().replace(f"Weight {size}", f"Weight {size - 8}"))
    assert "does not have the interface" in build.build().reason
    small_library.write_text('extern "C" int something_else() { return 0; }')
    assert "does not have the interface" in build.build().reason


def test_a_stale_or_damaged_library_in_the_cache_is_built_again(small_library: Path) -> None:
    assert build.build().library is not None
    (cached,) = small_library.parent.glob("foretell/*.so")
    good = cached.read_bytes()
    for bad in (b"", b"no library at all", good.replace(b"Weight 72", b"Weight 80")):
        cached.unlink()
        cached.write_bytes(bad)
        assert build.build().library is not None
        assert structures.interface().encode() in cached.read_bytes()


def test_the_environment_variable_disables_the_kernels_while_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_NATIVE", "0")
    assert not build.available() and "FORETELL_NATIVE=0" in build.unavailable_reason()
    monkeypatch.delenv("FORETELL_NATIVE")
    assert build.available(), "tests of the command line switch them off, and other tests in their process need them"


@pytest.mark.parametrize(("width", "k"), [(5, 3), (16, 16), (1000, 8), (49153, 8)])
def test_topk_is_sorted_and_prefers_low_indices(width: int, k: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    values, indices = topk(x, k)
    order = torch.argsort(x, dim=-1, descending=True, stable=True)[:, :k]
    assert torch.equal(indices, order)
    assert torch.equal(values, x.gather(1, order))


@pytest.mark.parametrize(("width", "k"), [(5, 3), (16, 16), (1000, 8), (49153, 8)])
def test_topk_softmax_is_the_topk_of_the_softmax(width: int, k: int) -> None:
    x = 3 * torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    x[1, 2] = -torch.inf
    probabilities, indices = topk_softmax(x, k)
    expected = torch.softmax(x.double(), -1).topk(k)
    assert torch.equal(indices, expected.indices)
    torch.testing.assert_close(probabilities.double(), expected.values, rtol=1e-5, atol=1e-9)


@every_precision
@pytest.mark.parametrize("tokens", [0, 1, 5, 20])
def test_topk_softmax_of_a_linear_layer(precision: Precision, tokens: int) -> None:
    torch.manual_seed(2)
    layer, x = NativeLinear(torch.randn(77, 64), torch.randn(77), precision), torch.randn(tokens, 64)
    probabilities, indices = layer.topk_softmax(x, 6)
    expected = topk_softmax(layer(x), 6)
    assert torch.equal(indices, expected[1])
    assert torch.equal(probabilities, expected[0])
    with pytest.raises(ValueError, match="best 78 of 77"):
        layer.topk_softmax(x, 78)
