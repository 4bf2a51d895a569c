"""The machine that is measured: description, GPU synchronisation, memory bandwidth."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

import torch

from foretell.model.kernels import build

_STREAM_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Size of the block that is read to measure bandwidth: many times the caches."""
_STREAM_REPEATS = 8
"""Reads of the block; the fastest counts."""


def processor_name() -> str:
    """Name of the processor, and number of threads."""
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe_hardware() -> dict[str, str]:
    """System, number of cores, and name of the processor."""
    return {"system": platform.platform(), "cores": str(os.cpu_count()), "processor": _processor()}


def describe_machine(device: str = "cpu") -> dict[str, str]:
    """Processor, instructions of the kernels, cores, threads, GPU and versions."""
    facts = {"python": platform.python_version(), **describe_hardware(), "threads": str(torch.get_num_threads())}
    if (library := build.load()) is not None:
        facts["kernels"] = library.foretell_instructions().decode()
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
    for package in ("foretell", "torch", "transformers", "llama-cpp-python"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished; on a CPU nothing runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory: the fastest of several sums over one block."""
    block = torch.ones(_STREAM_BYTES[device.type] // 4, device=device)

    def seconds() -> float:
        synchronize(device)
        start = time.perf_counter()
        block.sum()
        synchronize(device)
        return time.perf_counter() - start

    return block.nbytes / min(seconds() for _ in range(_STREAM_REPEATS))
