"""The GPU kernels of attention, on a GPU or in Triton's interpreter: torch's attention over the same cache is the
oracle.
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch

from covering import covering_parameters
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.model.block.cached_attention import CachedAttention
from foretell.model.block.paged_attention import PagedAttention
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.cache.paged_layout import PagedLayout
from foretell.model.config.attention import QueryScaling
from foretell.model.config.model import CacheDtype, ModelConfig
from foretell.testing import TINY

pytest.importorskip("triton")

import triton
import triton.language as tl

from foretell.model.triton import launch, numbers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _numbers(x, written, codes, read):  # type: ignore[no-untyped-def]
    """The bytes of the rows of `x`, and the numbers of all bytes."""
    column = tl.arange(0, 256)
    for row in range(5):
        value = tl.load(x + row * 256 + column)
        tl.store(written + row * 256 + column, numbers._fp8_bits(value).to(tl.int8))
    tl.store(read + column, numbers.widened(tl.load(codes + column), tl.float32, numbers.FP8))


LAYER = 1
"""The layer that attends; there are two, so that a kernel that reads the other one fails."""
ROWS, LENGTHS = (2, 0, 1), (70, 5, 520)
"""Rows of the cache, and their tokens: less than a block, several blocks, and more than one part of the context."""


@dataclass(frozen=True)
class Case:
    """Settings of an attention layer and its cache."""

    dim: int = 64
    group: int = 2
    kv_heads: int = 2
    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    sinks: bool = False
    numbers: CacheDtype = "auto"
    nodes: int = 9
    folds: bool = True

    @property
    def config(self) -> ModelConfig:
        return replace(
            TINY, heads=self.group * self.kv_heads, kv_heads=self.kv_heads, head_dim=self.dim, window=self.window,
            window_layers=(LAYER,) if self.window else (), attention_softcap=self.softcap, chunked=self.chunked,
            cache_dtype=self.numbers,
        )  # fmt: skip


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def filled_cache(case: Case, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache of two layers that holds the tokens before the trees, in blocks that lie in no order."""
    cache = KVCache(2, case.kv_heads, case.dim, dtype, DEVICE, case.config.cache_dtype)
    for count in range(64, 700, 64):
        for row, length in zip(ROWS, LENGTHS, strict=True):
            cache.reserve([row], [min(count, length + case.nodes)])
    for i, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
        k, v = (random(length, case.kv_heads, case.dim, seed=2 * i + side).to(dtype) for side in (0, 1))
        cache.write(LAYER, torch.full((length,), row), torch.arange(length), k, v)
    return cache


def random_trees(nodes: int, count: int) -> TokenTree:
    generator = np.random.default_rng(nodes)
    parents = [[-1, *(int(generator.integers(max(0, i - 7), i)) for i in range(1, nodes))] for _ in range(count)]
    return tree_from_lists([[1] * nodes] * count, parents)


def layout_of_trees(case: Case) -> Layout:
    tree = random_trees(case.nodes, len(ROWS))
    return Layout.from_tree(tree, ROWS, np.array(LENGTHS), tree.active)[0]


def inputs(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = case.group * case.kv_heads
    q, k, v = (random(tokens, n, case.dim, seed=10 + n) for n in (heads, case.kv_heads, case.kv_heads))
    return q, k, v


def attended(
    kind: type[CachedAttention], case: Case, layout: Layout, cache: KVCache, rotated: int, shared: bool = False
) -> torch.Tensor:
    """The output of a layer; `rotated`: dimensions of a head that the attention is told to rotate; `shared`: it writes
    no keys and values.
    """
    q, *written = (part.to(cache.dtype) for part in inputs(case, layout.token_count))
    k, v = (None, None) if shared else written
    attention = kind(cache, kind.place(layout, DEVICE, case.config, cache), case.config, layout)
    angle = random(layout.token_count, 1, rotated // 2, seed=5)
    sinks = random(case.group * case.kv_heads, seed=6) if case.sinks else None
    angles = (angle.cos(), angle.sin()) if rotated else None
    out: torch.Tensor = attention.rotate_and_attend(LAYER, q, k, v, angles, sinks)
    return out


SETTINGS = {
    "dim": (4, 64, 80, 128, 192, 256), "group": (1, 2, 5), "kv_heads": (1, 2), "window": (0, 7, 100),
    "softcap": (0.0, 4.0), "sinks": (False, True), "numbers": ("auto", "int8", "fp8"), "nodes": (1, 5, 17),
    "folds": (True, False),
}  # fmt: skip


def covering_array() -> list[object]:
    """Cases that hold all settings, and those with all triples, which are exhaustive."""
    generator = np.random.default_rng(0)
    everything = list(product(*SETTINGS.values()))
    sample = [everything[i] for i in generator.permutation(len(everything))[:600]]
    names = [[str(value) for value in case] for case in sample]
    return [
        pytest.param(Case(**dict(zip(SETTINGS, sample[i], strict=True))), marks=marks, id="-".join(names[i]))
        for i, marks in covering_parameters(names, 3).items()
    ]


@pytest.mark.parametrize("case", covering_array())
def test_the_kernels_attend_as_torch_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROGRAMS", 0 if case.folds else 1 << 30)
    layout = layout_of_trees(case)
    rotated = case.dim if case.dim < 100 else case.dim // 2
    cache, expected, exact = filled_cache(case), filled_cache(case), filled_cache(case, torch.float64)
    attended(CachedAttention, case, layout, expected, rotated)
    for part, other in zip(exact._parts(), expected._parts(), strict=True):
        part.copy_(other)
    result = attended(PagedAttention, case, layout, cache, rotated)
    check_same_numbers(cache, expected)
    if case.numbers != "auto":  # then over the same numbers
        result = attended(PagedAttention, case, layout, expected, rotated, shared=True)
    wanted = attended(CachedAttention, case, layout, exact, rotated, shared=True)
    torch.testing.assert_close(result, wanted.float(), rtol=0, atol=2e-6 if DEVICE.type == "cpu" else 3e-6)


def check_same_numbers(cache: KVCache, expected: KVCache) -> None:
    """A rotation sums in another order, so a number between two levels may be rounded to the other one."""
    if cache.k_scale is None:
        for part, other in ((cache.k, expected.k), (cache.v, expected.v)):
            torch.testing.assert_close(part, other, rtol=0, atol=5e-7)
        return
    assert cache.v_scale is not None and expected.k_scale is not None and expected.v_scale is not None
    for part, other, scale, wanted in (
        (cache.k, expected.k, cache.k_scale, expected.k_scale), (cache.v, expected.v, cache.v_scale, expected.v_scale),
    ):  # fmt: skip
        torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=0)
        changed = (part.int() - other.int()).abs()
        assert changed.max() <= 1 and changed.float().mean() < 1e-3


@pytest.mark.parametrize("case", [Case(window=16, chunked=True), Case(group=3, kv_heads=1, nodes=2)])
def test_chunked_windows_and_queries_scaled_by_position(case: Case) -> None:
    config = replace(case.config, query_scaling=QueryScaling(0.1, 64))
    layout, outputs = layout_of_trees(case), list[torch.Tensor]()
    q, k, v = inputs(case, layout.token_count)
    for kind in (CachedAttention, PagedAttention):
        cache = filled_cache(case)
        attention = kind(cache, kind.place(layout, DEVICE, config, cache), config, layout)
        outputs.append(attention.attend(LAYER, q, k, v))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-6)


def test_windows_that_end_before_a_token() -> None:
    """As DFlash's layers have them: the window ends at another position than the token's, and later slots are seen."""
    case = Case(window=20)
    layout = layout_of_trees(replace(case, nodes=4))
    layout = replace(
        layout, visible_prefix=layout.slot + 1, extra_slots=layout.extra_slots[:, :0], window_end=layout.position - 3
    )
    outputs = [attended(kind, case, layout, filled_cache(case), 8) for kind in (CachedAttention, PagedAttention)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_narrow_numbers_are_as_exact_as_torch(stored: CacheDtype, dtype: torch.dtype) -> None:
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    case = Case(numbers=stored, kv_heads=1, nodes=3)
    layout, config = layout_of_trees(case), case.config
    exact = attended(CachedAttention, case, layout, filled_cache(case), 0)
    errors = list[float]()
    for kind in (CachedAttention, PagedAttention):
        cache = filled_cache(case, dtype)
        q, k, v = (part.to(dtype) for part in inputs(case, layout.token_count))
        attention = kind(cache, kind.place(layout, DEVICE, config, cache), config, layout)
        errors.append(float((attention.attend(LAYER, q, k, v).float() - exact).abs().max()))
    assert 0 < errors[1] <= 1.5 * errors[0]


def results_by_place(case: Case, rows: tuple[int, ...], order: slice) -> dict[tuple[int, int], torch.Tensor]:
    """The output of every token of some rows, by row and slot, in a pass over these rows alone."""
    whole = layout_of_trees(case)
    chosen = torch.cat([torch.nonzero(whole.row == row)[order, 0] for row in rows])
    q, k, v = (part[chosen] for part in inputs(case, whole.token_count))
    layout, cache = whole.select(chosen), filled_cache(case)
    everything = inputs(case, whole.token_count)
    kind = PagedAttention
    kind(cache, kind.place(whole, DEVICE, case.config, cache), case.config).write(LAYER, *everything[1:])
    attention = PagedAttention(cache, PagedAttention.place(layout, DEVICE, case.config, cache), case.config, layout)
    out = attention.attend(LAYER, q, k, v)
    places = zip(layout.row.tolist(), layout.slot.tolist(), strict=True)
    return dict(zip(places, out, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case(nodes=6, kv_heads=1),
        pytest.param(
            Case(dim=16, group=8, kv_heads=1, nodes=6, numbers="int8", window=100), marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_in_every_pass(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, with other rows, with other tokens of its row, and with its context in one program or in several."""
    monkeypatch.setattr(launch, "PROGRAMS", 0)
    together = results_by_place(case, ROWS, slice(None))
    for rows, order, programs in (((1,), slice(3, None), 0), ((1, 2), slice(None), 1 << 30)):
        monkeypatch.setattr(launch, "PROGRAMS", programs)
        apart = results_by_place(case, rows, order)
        assert apart and all(torch.equal(out, together[place]) for place, out in apart.items())


def test_padding_changes_no_bit_and_writes_nothing() -> None:
    case = Case(nodes=9)
    layout, (first, second) = layout_of_trees(case), (filled_cache(case), filled_cache(case))
    static = PagedAttention.place_static(layout, DEVICE, case.config, second)
    assert static.shape == (32, 1, 4, 2) and len(static.tokens) == 32, "27 tokens, 3 tiles"
    plain = attended(PagedAttention, case, layout, first, 0)
    q, k, v = (part[static.tokens] for part in inputs(case, layout.token_count))
    padded = PagedAttention(second, static.placed, case.config, layout).attend(LAYER, q, k, v)
    assert torch.equal(padded[static.padded], plain) and torch.equal(first.k, second.k)


def test_a_layout_on_the_device_says_what_each_token_sees() -> None:
    """Its words are read back here as the kernels read them."""
    tree = random_trees(40, 2)
    layout = Layout.from_tree(tree, (0, 1), np.array([3, 61]), tree.active)[0]
    placed = PagedLayout.from_layout(layout, torch.device("cpu"), 4)
    for t in range(layout.token_count):
        prefix, seen = int(placed.fields[3, t]), list[int]()
        for number, word in enumerate(placed.words[t].tolist()):
            assert word >> 16 == len(seen), "ancestors in the words before"
            seen += [prefix + 16 * number + bit for bit in range(16) if word >> bit & 1]
        assert seen == [slot for slot in layout.extra_slots[t].tolist() if slot >= 0]
        assert int(placed.fields[5, t]) == max([prefix, *(slot + 1 for slot in seen)])
    assert placed.words.shape[1] == 3 and placed.splits == 1
    assert [n for first, n in placed.tiles.tolist() for n in range(first, first + n)] == list(range(80))
    assert all(n <= 4 for _, n in placed.tiles.tolist())


def test_bytes_of_eight_bit_floats_are_those_of_torch() -> None:
    """All numbers, the middles between neighbours (ties to even), and random ones."""
    codes = torch.arange(256, device=DEVICE).to(torch.int8)
    known = codes.view(torch.float8_e4m3fn).float()
    known = known[known.isfinite()].sort().values
    x = torch.cat((known, (known[1:] + known[:-1]) / 2, random(773, seed=0) * 0.05))[:1280]
    x = torch.nn.functional.pad(x, (0, 1280 - len(x)))
    written, read = torch.empty(1280, dtype=torch.int8, device=DEVICE), torch.empty(256, device=DEVICE)
    _numbers[(1,)](x.view(5, 256), written, codes, read)
    assert torch.equal(written.view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())
    finite = codes.view(torch.float8_e4m3fn).float().isfinite()
    assert torch.equal(read[finite], codes.view(torch.float8_e4m3fn).float()[finite]) and finite.sum() == 254
