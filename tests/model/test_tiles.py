"""Whether the sums of a tile stay in registers, as far as GCC's output shows, for this machine or cross-compiled.

`make aarch64` says how to install the cross compiler.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from foretell.model.kernels import build, packaged
from foretell.model.kernels.instruction_sets import INSTRUCTION_SETS

_PRODUCTS = {
    "x86_64": re.compile(r"\tvpmaddubsw|\tvpmaddwd|\tvfmadd|\tvpdpbusd|\tvdpbf16ps"),
    "aarch64": re.compile(r"\tsmull|\tu?sdot|\tfmla|\tbfmlal"),
}
_MOVES = {
    "x86_64": re.compile(r"\tv\w+\t[^\n]*\(%r[sb]p\)"),
    "aarch64": re.compile(r"\t(?:ld|st)\w+\t\{?[bhsdqv]\d[^\n]*\[(?:sp|x29)"),
}
_TILE = """extern "C" __attribute__((flatten)) void hot_{symbol}(
    const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, void* out) {{
  using Product = {product};
  Product::tile<Product::kMaxTokens, Prefetch::kAhead>(panel, x, stride, in, next, (Float*)out);
}}
"""
_ATTENTION = """extern "C" __attribute__((flatten)) void hot_attention(
    const Columns& columns, int words, const uint32_t* const* rows, float* const* out) {
  multiply_columns<Bfloat16, kTileQueries, kTileVectors>(columns, words, rows, 0, out, nullptr);
}
"""
_FOUR_BITS = {"Q4_0": 16, "Q4_1": 16, "Q4_Z": 16, "Q4_K": 16}
_FLOATS = {"Bfloat16": 4, "Float32": 4, "attention": 12}
_TWO_SCALES = {"Q6_K": 160, "NVFP4": 160}
_CODEBOOKS = ("IQ4_NL", "IQ4_XS")
_UNPACKED = {"Unpacked<Q4_K>": 16, "Unpacked<Q5_K>": 48, "Unpacked<Q6_K>": 130, "Unpacked<NVFP4>": 88}
_MOST = {
    "avx2": _FOUR_BITS
    | _FLOATS
    | _TWO_SCALES
    | _UNPACKED
    | dict.fromkeys(_CODEBOOKS, 56)
    | {"MXFP4": 48, "Q5_0": 64, "Q5_1": 64, "Q5_K": 64, "Q8_0": 48},
    "avx2_vnni": _FOUR_BITS
    | _FLOATS
    | _TWO_SCALES
    | _UNPACKED
    | dict.fromkeys(_CODEBOOKS, 16)
    | {"MXFP4": 24, "Q5_0": 16, "Q5_1": 16, "Q5_K": 16, "Q8_0": 16},
}
_WHOLE_PANELS = dict.fromkeys((*_FOUR_BITS, *_CODEBOOKS), 32) | dict.fromkeys(_TWO_SCALES, 72) | _FLOATS
_MOST["avx512_vnni"] = _WHOLE_PANELS | {"MXFP4": 32, "Q5_0": 32, "Q5_1": 32, "Q5_K": 32, "Q8_0": 24}
_MOST["avx512_bf16"] = _MOST["avx512_vnni"]
_MOST["avx512"] = _WHOLE_PANELS | {"MXFP4": 56, "Q5_0": 56, "Q5_1": 56, "Q5_K": 64, "Q8_0": 32, "Q6_K": 112}
_MOST["neon"] = dict.fromkeys(_MOST["avx2"], 16) | _FLOATS | {"Q6_K": 48, "NVFP4": 24}
_MOST["neon_dotprod"] = _MOST["neon_bf16"] = _MOST["neon"] | dict.fromkeys(_CODEBOOKS, 24)
"""How many instructions of a tile's loops may move vectors to or from the stack, by instruction set and product. A tile
of Q4_1 has 128 products of bytes on AVX2, 96 on AVX-512 and 256 or, without dotprod, 512 on NEON. Where sums of 16 bits
take a part of a group's words (Q5, Q6_K, MXFP4) or one plane of the levels (Q8_0, IQ4), the sums before are kept
meanwhile."""


def _source(name: str) -> str:
    if name == "attention":
        return _ATTENTION
    product = f"FloatProduct<{name}>" if name in _FLOATS else f"QuantizedProduct<{name}>"
    return _TILE.format(symbol=_symbol(name), product=product)


def _symbol(name: str) -> str:
    return re.sub(r"\W", "_", name)


@pytest.mark.parametrize(
    "instructions",
    ["avx2", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in _MOST if each != "avx2")],
)
def test_hot_loops_hardly_touch_the_stack(instructions: str, tmp_path: Path) -> None:
    """No processor with these instructions is needed."""
    (entry,) = (entry for entry in INSTRUCTION_SETS if entry.name == instructions)
    compiler = "g++" if entry.machine == platform.machine() else f"{entry.machine}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    source, assembly = tmp_path / "tiles.cpp", tmp_path / "tiles.s"
    most_moves, product = _MOST[instructions], _PRODUCTS[entry.machine]
    source.write_text('#include "attention_products.h"\n' + "".join(map(_source, most_moves)))
    command = [compiler, *packaged.FLAGS, *entry.flags, f"-I{build.SOURCES}", "-S", str(source), "-o", str(assembly)]
    subprocess.run(command, check=True)
    text = assembly.read_text()
    for name, most in most_moves.items():
        hot = f"hot_{_symbol(name)}"
        body = re.search(rf"^{hot}:$(.*?)^\t\.size\t{hot}\b", text, re.DOTALL | re.MULTILINE)
        assert body is not None, name
        blocks = re.split(r"^\.L\d+:", body[1], flags=re.MULTILINE)
        loops = "".join(block for block in blocks if product.search(block))
        products, moves = len(product.findall(loops)), len(_MOVES[entry.machine].findall(loops))
        assert products >= 8 and moves <= most, f"{name}: {moves} moves beside {products} products"


def test_every_instruction_set_is_checked() -> None:
    """AMX's tiles are registers of their own; its other products are those of `avx512_bf16`."""
    assert {entry.name for entry in INSTRUCTION_SETS} == {*_MOST, "amx"}
