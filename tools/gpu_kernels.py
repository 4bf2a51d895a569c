"""Compile the GPU kernels without a GPU, and print what they use: registers, shared memory, spills, occupancy.

    python tools/gpu_kernels.py [--heads 64,128] [--numbers auto,int8] [--targets cuda:90,hip:gfx942] [--json]

Compiles the kernels of a layer as the model launches them, for every combination of head size, numbers of the cache and
variant. Needs the package triton only. Exits with 1 where a kernel spills registers or does not fit.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foretell.core.draft_tests import NodeDrafts
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.paged_layout import PagedLayout
from foretell.model.triton import acceptance, elementwise, launch, products, sampling
from foretell.model.triton.launch import AttentionCall, Launch

META = torch.device("meta")
TARGETS = {"cuda:80": "A100", "cuda:90": "H100", "cuda:100": "B200", "hip:gfx942": "MI300X"}
SHARED = {"cuda:80": 164 << 10, "cuda:90": 228 << 10, "cuda:100": 228 << 10, "hip:gfx942": 64 << 10}
"""Shared memory of a multiprocessor."""
RESERVED = 1 << 10
"""Shared memory that CUDA takes for every block."""
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8", torch.int32: "*i32",
    torch.float64: "*fp64", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
VARIANTS = {
    "full": AttentionCall(32, 0.1),
    "window": AttentionCall(32, 0.1, window=4096),
    "softcap": AttentionCall(32, 0.1, softcap=50.0),
    "sinks": AttentionCall(32, 0.1, window=128, extra=torch.empty(32, device=META)),
}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel uses: registers of a thread, bytes of shared memory of a block, bytes of a thread on the
    stack, where registers are spilled, and the warps of a multiprocessor as a share of the most.
    """

    kernel: str
    target: str
    registers: int
    shared: int
    stack: int
    occupancy: float


def compile_launch(entry: Launch, target: str) -> Usage:
    """Compile a launch for a target such as cuda:90."""
    signature, constants, attributes = dict[str, str](), dict[str, object](), dict[tuple[int, ...], object]()
    for i, name in enumerate(entry.kernel.arg_names):
        value, constexpr = entry.arguments[name], entry.kernel.params[i].is_constexpr
        if constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    backend, arch = target.split(":")
    chip = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    source = ASTSource(entry.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=chip, options=entry.options)
    shared = compiled.metadata.shared
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, stack = (_number(text, name) for name in ("vgpr_count", "private_segment_fixed_size"))
        stack += _number(text, "vgpr_spill_count")
        waves = min(8, 512 // max(8, -(-registers // 8) * 8)) * 4 // entry.warps * entry.warps
        fits = SHARED[target] // shared * entry.warps if shared else waves
        return Usage(entry.kernel.__name__, target, registers, shared, stack, min(waves, fits) / 32)
    registers, stack = _resources(compiled.asm["cubin"])
    blocks = min(65536 // (-(-registers // 8) * 8 * 32 * entry.warps), SHARED[target] // (shared + RESERVED), 32)
    return Usage(entry.kernel.__name__, target, registers, shared, stack, min(1.0, blocks * entry.warps / 64))


def _number(text: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", text)
    assert match is not None, f"the assembly does not state {name}"
    return int(match[1])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout))
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])


def launches(dim: int, numbers: str, variant: str, dtype: torch.dtype, group: int) -> Iterator[Launch]:
    """Every launch of a layer of 32 query heads, whose parts are joined by a kernel of their own and by `attend`."""
    call = VARIANTS[variant]
    store = KVCache(1, call.heads // group, dim, dtype, META, numbers)  # type: ignore[arg-type]
    tile = launch.tokens_of_tile(group)
    q, k = (torch.empty(64, heads, dim, dtype=dtype, device=META) for heads in (call.heads, call.heads // group))
    angles = torch.empty(64, 1, dim // 2, device=META), torch.empty(64, 1, dim // 2, device=META)
    for splits in (1, 8):
        tokens = 64 if splits == 1 else 8
        layout = PagedLayout(torch.empty(4096, dtype=torch.int32, device=META), tokens, 4, tokens // tile + 1, splits)
        if splits == 1:
            yield launch.write_pages(q, k, k, angles, None, store, 0, layout)[0]
        yield from launch.attend(q[:tokens], store, 0, layout, call)[0]


def sampling_launches() -> Iterator[Launch]:
    """The launches that sample at the nodes of a step, that test drafts, and between the products of a layer."""

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=META)

    logits = empty(64, 128256, dtype=torch.float32)
    draws, _, weights = sampling.draw(logits, empty(64, 6, dtype=torch.int64), 44, True)
    drafts = NodeDrafts(
        empty(16, 4), empty(16, 4), empty(16), empty(16, dtype=torch.bool), empty(16, 5, dtype=torch.float64)
    )
    yield from draws
    stream, weight = empty(8, 4096, dtype=torch.float32), empty(4096, dtype=torch.float32)
    yield elementwise.rms_norm(stream, weight, 1e-5, torch.bfloat16)[0]
    yield elementwise.gated_silu(empty(8, 28672, dtype=torch.bfloat16))[0]
    yield products.linear(stream.to(torch.bfloat16), empty(6144, 4096, dtype=torch.bfloat16), None)[0]
    yield acceptance.test_drafts(weights, empty(16), logits, drafts)[0]


def main() -> int:
    """Print the table; 1: a kernel spills or does not fit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--heads", default="64,80,96,128,192,256")
    parser.add_argument("--numbers", default="auto,int8,fp8")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--groups", default="4")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lists = (
        getattr(given, name).split(",") for name in ("heads", "numbers", "variants", "dtypes", "groups", "targets")
    )
    rows, wrong = list[dict[str, object]](), 0
    for entry, target in product(sampling_launches(), given.targets.split(",")):
        usage = compile_launch(entry, target)
        rows.append(asdict(usage))
        wrong += usage.stack > 0 or usage.occupancy == 0
        if not given.json:
            print(*rows[-1].values(), sep="\t", flush=True)
    for dim, numbers, variant, dtype, group, target in product(*lists) if given.heads else ():
        launch.WIDE_WARPS = 4 if target.startswith("hip") else 8
        for entry in launches(int(dim), numbers, variant, getattr(torch, dtype), int(group)):
            usage = compile_launch(entry, target)
            folds = " and joins" if entry.arguments.get("FOLD") else ""
            asked = {"head": int(dim), "numbers": numbers, "variant": variant, "dtype": dtype, "group": int(group)}
            rows.append({**asked, **asdict(usage), "kernel": usage.kernel + folds})
            wrong += usage.stack > 0 or usage.occupancy == 0
            if not given.json:
                print(*rows[-1].values(), sep="\t", flush=True)
    if given.json:
        print(json.dumps(rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
