"""Which build of the kernels a processor gets, from a wheel and from the compiler."""

import ctypes
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretell.model.kernels import build, instruction_sets, packaged, structures

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
SAPPHIRE_RAPIDS = f"{V4} avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16 avx_vnni"


@pytest.mark.parametrize(
    ("machine", "features", "permitted", "best"),
    [
        ("x86_64", "avx f16c", False, None),
        ("x86_64", V3, False, "avx2"),
        ("x86_64", f"{V3} avx_vnni", False, "avx2_vnni"),
        ("x86_64", V4, False, "avx512"),
        ("x86_64", f"{V4} avx512_vnni", False, "avx512_vnni"),
        ("x86_64", SAPPHIRE_RAPIDS, False, "avx512_bf16"),
        ("x86_64", SAPPHIRE_RAPIDS, True, "amx"),
        ("aarch64", "fp asimd", False, "neon"),
        ("aarch64", "fp asimd asimddp", False, "neon_dotprod"),
        ("aarch64", "fp asimd asimddp sve i8mm bf16", False, "neon_bf16"),
        ("riscv64", "", False, None),
    ],
)
def test_the_best_instruction_set_of_a_processor(
    machine: str, features: str, permitted: bool, best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(instruction_sets, "processor_features", lambda: frozenset(features.split()))
    monkeypatch.setattr(instruction_sets, "amx_permitted", lambda: permitted)
    assert next((entry.name for entry in instruction_sets.usable()), None) == best


def test_an_instruction_set_can_be_forced_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(instruction_sets, "processor_features", lambda: frozenset(V3.split()))
    assert instruction_sets.forced() is None
    monkeypatch.setenv("FORETELL_ISA", "avx2")
    assert (found := instruction_sets.forced()) is not None and found.name == "avx2"
    for name, why in (
        ("avx512", "the processor has no avx512bw"),
        ("neon", "the instruction sets are amx, avx512_bf16"),
    ):
        monkeypatch.setenv("FORETELL_ISA", name)
        with pytest.raises(ValueError, match=why):
            instruction_sets.forced()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small library in place of the kernels, packaged as in a wheel for an instruction set of any processor; there is
    no compiler.
    """
    source = tmp_path / "csrc" / "kernels.cpp"
    source.parent.mkdir()
    source.write_text(f'extern "C" const char* foretell_abi() {{ return R"({structures.interface()})"; }}')
    monkeypatch.setattr(build, "SOURCES", source.parent)
    monkeypatch.setattr(structures, "declare_signatures", lambda library: library)
    monkeypatch.setattr(packaged, "DIRECTORY", tmp_path / "lib")
    monkeypatch.setattr(
        instruction_sets, "usable", lambda: [instruction_sets.InstructionSet("any", "", frozenset(), ())]
    )
    monkeypatch.delenv("FORETELL_ISA", raising=False)
    compiler = build.find_compiler()
    assert compiler is not None
    packaged.compile_packaged(compiler, [("any", ())], source.parent, tmp_path / "lib")
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    build._loaded.cache_clear()
    yield tmp_path
    build._loaded.cache_clear()


def test_the_kernels_of_a_wheel_need_no_compiler(wheel: Path) -> None:
    found = build.build_result()
    assert isinstance(found.library, ctypes.CDLL)
    assert found.origin == "packaged for any" and found.path == wheel / "lib" / "kernels-any.so"


def test_the_kernels_of_a_wheel_are_not_used_with_other_sources(wheel: Path) -> None:
    with (wheel / "csrc" / "kernels.cpp").open("a") as file:
        file.write("// changed")
    assert "need a C++ compiler" in build.build_result().reason


def test_a_damaged_library_of_a_wheel_is_not_used(wheel: Path) -> None:
    (wheel / "lib" / "kernels-any.so").write_bytes(b"no library")
    assert "need a C++ compiler" in build.build_result().reason


@pytest.mark.parametrize("entry", instruction_sets.of_machine(), ids=lambda entry: entry.name)
def test_the_compiler_knows_the_flags(entry: instruction_sets.InstructionSet) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, *entry.flags, "-x", "c++", "-fsyntax-only", "-"], input=b"", check=True)


def test_of_those_that_need_the_kernels_at_once_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of the file system keeps threads apart as it does processes."""
    source, compiler = tmp_path / "kernels.cpp", tmp_path / "compiler"
    source.write_text(f'extern "C" const char* foretell_abi() {{ return R"({structures.interface()})"; }}')
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.2\nexec {build.find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SOURCES", source.parent)
    monkeypatch.setattr(structures, "declare_signatures", lambda library: library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: build.build(), range(3)))
    assert all(isinstance(result.library, ctypes.CDLL) for result in results), results
    assert len((tmp_path / "calls").read_text().splitlines()) == 2, "one compiles, and links"
    assert [file.suffix for file in build.cache_directory().iterdir()] == [".so"]
