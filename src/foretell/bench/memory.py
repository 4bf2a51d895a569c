"""Peak memory of one competitor (the GPU's on CUDA), measured in a process that loads nothing else."""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import torch

from foretell.bench.competitor import MethodSpec, load_drafts
from foretell.bench.peers import registry
from foretell.bench.schema import BenchSettings
from foretell.engine.request import Request
from foretell.load import load_target
from foretell.utils.validation import FrozenModel


class MemoryTask(FrozenModel):
    """Input of the process: the competitor and the prompt that it answers."""

    competitor: str
    method: str | None = None
    """What a method was parsed from; None: a peer."""
    settings: BenchSettings
    context: int
    """Longest sequence of a peer, in tokens."""
    folder: str
    """Where GGUF files for llama.cpp go."""
    prompt: tuple[int, ...]


def measure_peak_memory(task: MemoryTask) -> int | None:
    """Most resident bytes while it answers; None where the system does not report them or the competitor fails."""
    done = subprocess.run(
        [sys.executable, "-m", "foretell.bench.memory"],
        input=task.model_dump_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
    return int(last[0]) if last and last[0].isdigit() else None


def _reset_peak(pid: int | None = None) -> None:
    """Return freed memory to the system and reset the kernel's high-water mark, of this process or another."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5")


def _read_peak(pid: int | None = None) -> int:
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    line = next(x for x in lines if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(text: str) -> None:
    """Answer the prompt of the task; print the peak in bytes."""
    task = MemoryTask.model_validate_json(text)
    s = task.settings
    torch.set_num_threads(s.threads)
    pid, (_, precision) = None, task.competitor.split("/")
    if task.method is None:
        settings = registry.PeerSettings(s.model, s.draft_model, precision, task.context, s.threads, Path(task.folder))
        peer = registry.load_peers([task.competitor], settings)[task.competitor]
        pid = peer.pid
        _reset_peak(pid)
        peer.generate(task.prompt, s.max_new_tokens)
    else:
        model, spec = load_target(s.target, s.model, precision, s.device, s.memory_limit), MethodSpec.parse(task.method)
        drafts = load_drafts(spec.config.model or s.draft_model, precision, s.device)
        references = [Path(r).read_text("utf-8") for r in s.references]
        method = model.method(spec.method, spec.config, drafts=drafts, references=references, shared=True)
        engine = model.engine(method, rows=1)
        _reset_peak()
        engine.complete([Request(task.prompt, max_new_tokens=s.max_new_tokens)])
    print(torch.cuda.max_memory_allocated(s.device) if s.device.startswith("cuda") else _read_peak(pid))


if __name__ == "__main__":
    main(sys.stdin.read())
