"""The file that `foretell calibrate exits` writes: thresholds of exits, and what was shown about them."""

import hashlib
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from foretell.speculator.network.exits import Exits
from foretell.utils.validation import read_json, validate


class ExitCalibration(BaseModel):
    """Thresholds of exits with a bound on what they change (CALM, arXiv 2207.07061)."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    kind: Literal["foretell exit calibration"] = "foretell exit calibration"
    model: str
    """Fingerprint of the target."""
    exits: str
    """Digest of the exits; see `exits_digest`."""
    measure: Literal["softmax", "probability", "state", "classifier"]
    layers: tuple[int, ...] = Field(min_length=1)
    thresholds: tuple[float, ...]
    decay: float = Field(0.0, ge=0)
    horizon: int = Field(256, ge=1)
    loss: Literal["tokens", "answers"]
    disagreement: float
    """Bound on the expected loss of an answer."""
    confidence: float
    """Probability, over the answers that were used, that the bound holds."""
    answers: int
    """Answers that the thresholds were tested on."""
    mean_loss: float = Field(alias="found")
    """Of these answers; the file names it `found`."""
    depth: float
    """Mean share of the layers that a token of these answers runs before it leaves."""

    def save(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1, by_alias=True) + "\n", "utf-8")


def exits_digest(exits: Exits) -> str:
    """A digest of the weights of exits, as they are stored."""
    digest = hashlib.sha256()
    for name, tensor in sorted(exits.state_dict().items()):
        if name != "agreement":
            stored = tensor.detach().cpu()
            stored = stored.to(torch.bfloat16).view(torch.int16) if stored.is_floating_point() else stored
            digest.update(name.encode() + stored.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def read_calibration(path: Path, model: str, exits: Exits) -> ExitCalibration:
    """Read a calibration of these exits (`model`: the target's fingerprint, empty: unknown).

    Raises:
        ValueError: there is no such file, it is damaged, or it belongs to other exits or another model.
    """
    hint = "make one with `foretell calibrate exits`"
    raw = read_json(path, hint)
    if raw.get("kind") != ExitCalibration.model_fields["kind"].default:
        raise ValueError(f"{path}: not a calibration of exits; {hint}")
    calibration = validate(ExitCalibration, raw, str(path))
    if len(calibration.thresholds) != len(calibration.layers):
        raise ValueError(
            f"{path}: damaged: {len(calibration.layers)} exits and {len(calibration.thresholds)} thresholds; {hint}"
        )
    if calibration.exits != exits_digest(exits) or (model and calibration.model and calibration.model != model):
        raise ValueError(f"{path}: these thresholds were calibrated for other exits or another model; {hint}")
    return calibration
