"""The kernels of aarch64 give the bits of this processor's: cross-compiled and run by qemu's user emulation.

`make aarch64` says how to install both.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_kernels import SHAPES, cache_of, chain, stack_of, tokens
from test_quantized_kernels import QUANTIZED, random_blocks
from torch import Tensor

from foretell.model.cache.layout import Layout
from foretell.model.kernels import NativeLinear, Precision, available, structures
from foretell.model.kernels.instruction_sets import InstructionSet, of_machine
from kernel_builds import compile_driver

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LAYER_ARRAYS = (
    "attention_norm",
    "mlp_norm",
    "q_norm",
    "k_norm",
    "post_attention_norm",
    "post_mlp_norm",
    "sinks",
    "cos",
    "sin",
)

pytestmark = [
    pytest.mark.skipif(not available(), reason="there are no kernels to compare with"),
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
    ),
]


def integers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


def array(data: bytes | Tensor | None) -> bytes:
    if isinstance(data, Tensor):
        data = data.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return integers(len(data or b"")) + (data or b"")


def read(address: int | None, memory: Sequence[Tensor]) -> bytes:
    """The tensor at an address, as an array."""
    return array(next(tensor for tensor in memory if tensor.data_ptr() == address) if address else None)


def weight_arguments(weight: structures.Weight, memory: Sequence[Tensor]) -> bytes:
    assert not weight.next and not weight.bias
    header = integers(weight.inputs, weight.outputs, weight.kind, weight.operand)
    return header + read(weight.words, memory)


def linear_case(layer: NativeLinear, x: Tensor) -> tuple[bytes, Tensor]:
    arguments = weight_arguments(layer.struct, layer._packed.tensors)
    return integers(0) + arguments + integers(len(x)) + array(x), layer(x)


def stack_case(shape: str, precision: Precision, where: Layout, count: int) -> tuple[bytes, Tensor]:
    config = SHAPES[shape]
    stack, x, cache = stack_of(config, precision), tokens(count, config), cache_of(config, precision)
    out = integers(1) + array(bytes(stack.model)) + integers(len(stack.layers))
    memory = [*stack._tensors, *(tensor for block in stack.blocks for tensor in block.tensors)]
    for layer in stack.layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            out += weight_arguments(weight, memory)
        for name in LAYER_ARRAYS:
            out += read(getattr(layer, name), memory)
        out += integers(layer.window, layer.store)
    out += array(x) + integers(count, where.extra_slots.shape[1])
    out += b"".join(map(array, (where.row, where.slot, where.position, where.visible_prefix, where.extra_slots)))
    out += b"".join(map(array, (cache.k, cache.v, cache.k_scale, cache.v_scale, cache.table)))
    out += integers(cache.k.shape[2], *cache.table.shape)
    return out, stack(x, where, cache, 0, len(stack.layers))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A file of calls, and their results on this processor."""
    x = torch.randn(7, 256)
    kinds: list[Precision] = ["bfloat16", "int8-activations"]
    weights = [(random_blocks(kind, 40, 256), precision) for kind in QUANTIZED for precision in kinds]
    dense: list[Precision] = ["float32", "bfloat16", "int8"]
    found = [linear_case(NativeLinear(weight, None, precision), x) for weight, precision in weights]
    found += [linear_case(NativeLinear(torch.randn(77, 450), None, p), torch.randn(9, 450)) for p in dense]
    found += [stack_case(shape, p, chain(17, 0), 17) for shape in ("small", "gemma", "int8 cache") for p in dense]
    path = tmp_path_factory.mktemp("aarch64") / "cases"
    path.write_bytes(integers(len(found)) + b"".join(arguments for arguments, _ in found))
    return path, [expected for _, expected in found]


@pytest.mark.parametrize("entry", of_machine("aarch64"), ids=lambda entry: entry.name)
def test_the_bits_are_those_of_this_processor(entry: InstructionSet, cases: tuple[Path, list[Tensor]]) -> None:
    emulated = [EMULATOR, "-cpu", "max", str(compile_driver(COMPILER, ["-O0", *entry.flags]))]
    instructions = subprocess.run(emulated, check=True, capture_output=True, text=True).stdout.strip()
    assert instructions == {"neon": "neon", "neon_dotprod": "neon+dotprod", "neon_bf16": "neon+bf16+i8mm"}[entry.name]
    path, expected = cases
    result = subprocess.run([*emulated, str(path)], check=True, capture_output=True).stdout
    found = torch.split(
        torch.frombuffer(bytearray(result), dtype=torch.float32), [tensor.numel() for tensor in expected]
    )
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b.flatten())]
    assert wrong == []
