"""Which build of the kernels a processor gets, from a wheel and from the compiler."""

import ctypes
import os
import re
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


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small translation units in place of the kernels, the interface in one and its text in the other, and a
    compiler that lists its calls in `calls`.
    """
    sources, compiler = tmp_path / "csrc", tmp_path / "compiler"
    sources.mkdir()
    (sources / "kernels.cpp").write_text('const char* text(); extern "C" const char* foretell_abi() { return text(); }')
    (sources / "products.cpp").write_text(f'const char* text() {{ return R"({structures.interface()})"; }}')
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.2\nexec {build.find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(structures, "declare_signatures", lambda library: library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    return tmp_path


def test_of_those_that_need_the_kernels_at_once_one_compiles(units: Path) -> None:
    """A lock of the file system keeps threads apart as it does processes."""
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: build.build(), range(3)))
    assert all(isinstance(result.library, ctypes.CDLL) for result in results), results
    assert len((units / "calls").read_text().splitlines()) == 3, "one compiles both units, and links"
    assert [file.suffix for file in build.cache_directory().iterdir()] == [".so"]


def test_units_are_compiled_at_the_same_time(units: Path) -> None:
    """Every unit waits until the other one is being compiled."""
    (units / "compiler").write_text(
        f"""#!/bin/sh
case "$*" in *" -c "*)
  touch {units}/started-$$
  for i in $(seq 200); do [ $(ls {units}/started-* | wc -l) = 2 ] && break; sleep 0.05; done
  [ $(ls {units}/started-* | wc -l) = 2 ] || exit 1;;
esac
exec g++ "$@"
"""
    )
    assert build.build().library is not None


def test_the_terminal_shows_that_kernels_are_compiled(
    units: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert build.build(name="any").library is not None
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"Compiling kernels for any \(once\) \.\.\. 0:00:\d\d", shown)
    assert re.search(r"Compiled kernels for any in \d+ s\n$", shown)
    assert build.build(name="any").library is not None, "from the cache"
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with caplog.at_level("INFO"):
        build.build(["-DOTHER"], "any")
    assert capsys.readouterr() == ("", "")
    assert caplog.messages[0] == "Compiling kernels for any (once) ..."


def test_kernels_are_kept_among_temporary_files_where_the_cache_cannot_be_written(
    units: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (units / "cache").write_text("a file")
    (units / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(units / "temporary"))
    folder = units / "temporary" / f"foretell-{os.getuid()}"
    for _ in range(2):
        built = build.build()
        assert built.library is not None and built.path is not None and built.path.parent == folder
    assert len((units / "calls").read_text().splitlines()) == 3, "the second time it is there"
    assert caplog.messages == [
        f"{units}/cache/foretell cannot be written: kernels are kept in {folder}; set XDG_CACHE_HOME."
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert "can be written by other users" in build.build().reason


def test_why_there_are_no_kernels_is_said_once(
    units: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("foretell.model.kernels.packaged.packaged_kernels", lambda *_: None)
    (units / "csrc" / "products.cpp").write_text("#error no such processor")
    build._loaded.cache_clear()
    try:
        assert not build.available() and not build.available()
    finally:
        build._loaded.cache_clear()
    (message,) = caplog.messages
    assert "could not be built" in message and "no such processor" in message and "PyTorch" in message
