"""Whether the sums of a tile stay in the registers of AVX2, as far as GCC's output shows."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from foretell.model.kernels import build, packaged

_GCC = shutil.which("g++")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64" or _GCC is None, reason="needs g++ on x86-64")

_PRODUCT = re.compile(r"\tvpmaddubsw|\tvfmadd")
_TILE = "{product}::tile<{tokens}, Prefetch::kAhead>(panel, x, stride, in, next, (Float*)out)"
_ARGUMENTS = "const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, void* out"
_COLUMNS = "const Columns& columns, int words, const uint32_t* const* rows, float* const* out"
_HOT = {
    "q4_0": (_ARGUMENTS, _TILE.format(product="QuantizedProduct<Q4_0>", tokens=4), 16),
    "q4_1": (_ARGUMENTS, _TILE.format(product="QuantizedProduct<Q4_1>", tokens=4), 16),
    "q4_k": (_ARGUMENTS, _TILE.format(product="QuantizedProduct<Q4_K>", tokens=4), 16),
    "q8_0": (_ARGUMENTS, _TILE.format(product="QuantizedProduct<Q8_0>", tokens=4), 48),
    "bfloat16": (_ARGUMENTS, _TILE.format(product="FloatProduct<Bfloat16>", tokens=4), 4),
    "float32": (_ARGUMENTS, _TILE.format(product="FloatProduct<Float32>", tokens=4), 4),
    "attention": (_COLUMNS, "multiply_columns<Bfloat16, kTileQueries, 1>(columns, words, rows, 0, out, nullptr)", 12),
}  # fmt: skip
"""Parameters, a call, and how many instructions may move vectors to or from the stack: a tile of Q4_1 has 128 products
of bytes, and one of Q8_0 keeps the sums of its lower halves meanwhile."""


def test_hot_loops_hardly_touch_the_stack(tmp_path: Path) -> None:
    calls = [
        f'extern "C" __attribute__((flatten)) void hot_{name}({parameters}) {{ {call}; }}'
        for name, (parameters, call, _) in _HOT.items()
    ]
    source, assembly = tmp_path / "tiles.cpp", tmp_path / "tiles.s"
    source.write_text('#include "attention_products.h"\n' + "\n".join(calls))
    flags = [*packaged.FLAGS, "-march=x86-64-v3", f"-I{build.SOURCES}"]
    subprocess.run([str(_GCC), *flags, "-S", str(source), "-o", str(assembly)], check=True)
    text = assembly.read_text()
    for name, (_, _, most) in _HOT.items():
        body = re.search(rf"^hot_{name}:$(.*?)^\t\.size\thot_{name}\b", text, re.DOTALL | re.MULTILINE)
        assert body is not None, name
        blocks = re.split(r"^\.L\d+:", body[1], flags=re.MULTILINE)
        loops = "".join(block for block in blocks if _PRODUCT.search(block))
        products = len(_PRODUCT.findall(loops))
        moves = len(re.findall(r"\tv\w+\t[^\n]*\(%r[sb]p\)", loops))
        assert products >= 8 and moves <= most, f"{name}: {moves} moves beside {products} products"
