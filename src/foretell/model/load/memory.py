"""Whether a model fits into the memory of this machine."""

import contextlib
from pathlib import Path

_OTHER_BYTES = 512 << 20
"""What a process needs beside the weights: libraries, cache of keys and values, tokenizer."""


def available_memory() -> int | None:
    """Bytes that this process may still allocate, by the system and its control group; None: unknown."""
    available = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        available.append(limit - used)
    return min(available, default=None)


def check_memory(reference: str, dtype: str, needed: int) -> None:
    """Check that weights of `needed` bytes fit into memory, before any of it is allocated.

    Raises:
        ValueError: they do not.
    """
    there = available_memory()
    if there is None or needed + _OTHER_BYTES <= there:
        return
    limit = max((there - _OTHER_BYTES) >> 20, 1)
    raise ValueError(
        f"{reference}: its weights take {needed / 1e9:.1f} GB in {dtype}, and {there / 1e9:.1f} GB of memory are "
        f"available; keep part of them in the file with --target-memory-limit {limit}, or use a smaller dtype (int8, "
        "int4) or a file with fewer bits"
    )
