"""What a measurement was taken on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def describe() -> dict[str, str]:
    """What was measured on: processor, cores, memory, versions."""
    found = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }
    try:
        with open("/proc/cpuinfo") as file:
            found["processor"] = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        found["processor"] = platform.processor() or platform.machine()
    for package in ("foretell", "torch", "transformers", "llama-cpp-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
