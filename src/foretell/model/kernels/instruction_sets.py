"""Instruction sets that the kernels are compiled for, and which of them this processor has.

Only the standard library is imported: the build of a wheel reads the table too.
"""

import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "FORETELL_ISA"
"""Environment variable that forces one instruction set."""

_X86_64_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_X86_64_V4 = f"{_X86_64_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_AMX = "amx_tile amx_int8 amx_bf16"

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that one build of the kernels uses: the compiler's flags for them, and what Linux calls them."""

    name: str
    machine: str
    features: frozenset[str]
    flags: tuple[str, ...]
    permitted: Callable[[], bool] = lambda: True
    """Whether the operating system lets this process use them."""

    def missing(self, features: Iterable[str]) -> list[str]:
        """Features that the instruction set needs and a processor with these features does not have."""
        return sorted(self.features - set(features))


def _entry(
    name: str, machine: str, features: str, flags: str, permitted: Callable[[], bool] = lambda: True
) -> InstructionSet:
    return InstructionSet(name, machine, frozenset(features.split()), tuple(flags.split()), permitted)


@functools.cache
def amx_permitted() -> bool:
    """Ask Linux for the permission to use AMX's tile registers in this process; whether it was granted."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or "amx_tile" not in processor_features():
        return False
    arguments = [ctypes.c_long(n) for n in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)]
    return bool(ctypes.CDLL(None).syscall(*arguments) == 0)


INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    _entry(
        "amx",
        "x86_64",
        f"{_X86_64_V4} avx512_vnni avx512_bf16 {_AMX}",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16",
        lambda: amx_permitted(),
    ),
    _entry(
        "avx512_bf16",
        "x86_64",
        f"{_X86_64_V4} avx512_vnni avx512_bf16",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16",
    ),
    _entry("avx512_vnni", "x86_64", f"{_X86_64_V4} avx512_vnni", "-march=x86-64-v4 -mavx512vnni"),
    _entry("avx512", "x86_64", _X86_64_V4, "-march=x86-64-v4"),
    _entry("avx2_vnni", "x86_64", f"{_X86_64_V3} avx_vnni", "-march=x86-64-v3 -mavxvnni"),
    _entry("avx2", "x86_64", _X86_64_V3, "-march=x86-64-v3"),
    _entry("neon_bf16", "aarch64", "asimd asimddp i8mm bf16", "-march=armv8.2-a+dotprod+i8mm+bf16"),
    _entry("neon_dotprod", "aarch64", "asimd asimddp", "-march=armv8.2-a+dotprod"),
    _entry("neon", "aarch64", "asimd", "-march=armv8-a"),
)
"""Best first."""


@functools.cache
def processor_features() -> frozenset[str]:
    """What Linux calls the features of the first processor; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((ln.split(":", 1)[1].split() for ln in lines if ln.startswith(("flags", "Features"))), []))


def has_bfloat16_units(device: str) -> bool:
    """Whether a type of device multiplies bfloat16: a GPU, and `cpu` where this processor does. Where it does not,
    PyTorch's products in bfloat16 take 6 to 130 times as long as those in float32 (AVX2 alone).
    """
    return device != "cpu" or not processor_features().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def of_machine(machine: str | None = None) -> list[InstructionSet]:
    """Instruction sets of a machine type as `platform.machine()` names it, this machine's by default; best first."""
    return [entry for entry in INSTRUCTION_SETS if entry.machine == (machine or platform.machine())]


def why_not(entry: InstructionSet) -> str:
    """A few words on why this processor cannot run an instruction set; empty if it can."""
    if missing := entry.missing(processor_features()):
        return f"the processor has no {', '.join(missing)}"
    return "" if entry.permitted() else "the operating system does not permit the tile registers"


def usable() -> list[InstructionSet]:
    """Instruction sets that this processor and operating system run, best first."""
    return [entry for entry in of_machine() if not why_not(entry)]


def forced() -> InstructionSet | None:
    """The instruction set that `FORETELL_ISA` names; None: it is not set.

    Raises:
        ValueError: there is none of that name for this machine, or it cannot run here.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    instruction_set = next((entry for entry in of_machine() if entry.name == name), None)
    if instruction_set is None:
        known = ", ".join(entry.name for entry in of_machine()) or "none"
        raise ValueError(f"{VARIABLE}={name}: on {platform.machine()} the instruction sets are {known}; unset it")
    if reason := why_not(instruction_set):
        raise ValueError(f"{VARIABLE}={name} cannot run here: {reason}; unset it")
    return instruction_set
