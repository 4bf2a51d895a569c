"""Peak memory of one competitor (the GPU's on CUDA): a process of its own that loads nothing else and answers one
prompt.
"""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import torch

from foretell.bench.competitor import MethodSpec
from foretell.bench.peers import registry as choose
from foretell.bench.results import is_peer
from foretell.bench.schema import FrozenModel
from foretell.engine.engine import Request
from foretell.load import load, load_draft


class MemoryTask(FrozenModel):
    """What the process is told: the competitor, what it needs, and the prompt."""

    competitor: str
    model: str
    draft_model: str | None
    references: tuple[str, ...]
    threads: int
    device: str
    context: int
    folder: str
    prompt: tuple[int, ...]
    max_new_tokens: int


def measure_peak_memory(task: MemoryTask) -> int | None:
    """Most resident bytes while it answers; None where the system does not tell or the competitor fails."""
    done = subprocess.run(
        [sys.executable, "-m", "foretell.bench.memory"],
        input=task.model_dump_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
    return int(last[0]) if last and last[0].isdigit() else None


def _reset() -> None:
    """Give freed memory back and let the kernel's high-water mark start afresh."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _highest() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(text: str) -> None:
    """Answer the prompt of the task; print the peak in bytes."""
    task = MemoryTask.model_validate_json(text)
    torch.set_num_threads(task.threads)
    kind, precision = task.competitor.split("/")
    if is_peer(task.competitor):
        setting = choose.PeerSettings(
            task.model, task.draft_model, precision, task.context, task.threads, Path(task.folder)
        )
        peer = choose.load_peers([task.competitor], setting)[task.competitor]
        _reset()
        peer.generate(task.prompt, task.max_new_tokens)
    else:
        model, spec = load(task.model, precision, task.device), MethodSpec.parse(kind)
        drafts = [load_draft(r, precision, task.device) for r in (task.draft_model or "").split(",") if r]
        engine = model.engine(model.method(spec.method, spec.config, drafts=drafts, references=task.references), rows=1)
        _reset()
        engine.complete([Request(task.prompt, max_new_tokens=task.max_new_tokens)])
    print(torch.cuda.max_memory_allocated(task.device) if task.device.startswith("cuda") else _highest())


if __name__ == "__main__":
    main(sys.stdin.read())
