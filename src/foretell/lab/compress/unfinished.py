"""What is done of a compression so far: a folder beside the output, which the next run of the same job continues."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file

from foretell.lab.quantize.calibration import CalibrationText

Tensor = torch.Tensor
T = TypeVar("T")


class UnfinishedResult:
    """The text and the blocks of an interrupted compression to `out`; those of another `job` are removed.

    `job`: everything that decides the result, for comparison.
    """

    def __init__(self, out: Path, job: Mapping[str, object]) -> None:
        self.path = out.with_name(f".{out.name}.compress")
        self._text, self._job = self.path / "text.safetensors", self.path / "job.json"
        wanted = json.dumps(job, sort_keys=True)
        kept = self._job.is_file() and self._job.read_text("utf-8") == wanted
        if not kept:
            self.remove()
            self.path.mkdir()
            self._job.write_text(wanted, "utf-8")

    def text(self, read: Callable[[], CalibrationText]) -> CalibrationText:
        """The text of the job; `read` gives it the first time."""
        origin = self.path / "origin.txt"
        if not self._text.is_file():
            calibration_text = read()
            origin.write_text(calibration_text.origin, "utf-8")
            self._save(
                self._text, {"calibration": calibration_text.calibration, "held_back": calibration_text.held_back}
            )
            return calibration_text
        kept = load_file(self._text)
        return CalibrationText(kept["calibration"], kept["held_back"], origin.read_text("utf-8"))

    def kept(self, name: str, measure: Callable[[], T]) -> T:
        """What `measure` gives the first time: numbers, or lists of them."""
        file = self.path / f"{name}.json"
        if not file.is_file():
            part = file.with_suffix(".part")
            part.write_text(json.dumps(measure()), "utf-8")
            part.rename(file)
        measured: T = json.loads(file.read_text("utf-8"))
        return measured

    def resume(self) -> tuple[int, Float[Tensor, "b s d"] | None]:
        """Number of blocks done, and the input of the next block; it is None before the first block."""
        states = sorted(self.path.glob("state-*.safetensors"))
        return (0, None) if not states else (int(states[-1].stem.split("-")[1]), load_file(states[-1])["state"])

    def add(self, i: int, tensors: Mapping[str, Tensor], state: Float[Tensor, "b s d"]) -> None:
        """Keep what block `i` became, and the input of the block after it."""
        self._save(self._block(i), tensors)
        self._save(self.path / f"state-{i + 1:05d}.safetensors", {"state": state})
        (self.path / f"state-{i:05d}.safetensors").unlink(missing_ok=True)

    def block(self, i: int) -> dict[str, Tensor]:
        """What block `i` became."""
        return load_file(self._block(i))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _block(self, i: int) -> Path:
        return self.path / f"block-{i:05d}.safetensors"

    @staticmethod
    def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
        part = path.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        part.rename(path)


def text_digest(text: CalibrationText) -> str:
    """SHA-256 of the tokens of calibration, as 64-bit integers."""
    return hashlib.sha256(text.calibration.contiguous().numpy().tobytes()).hexdigest()
