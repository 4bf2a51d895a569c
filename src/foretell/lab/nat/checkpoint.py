"""Folders of models: `config.json`, `model.safetensors` and a card."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from foretell.lab.nat.marian import MarianModel
from foretell.lab.nat.network import NatConfig, NatModel
from foretell.lab.nat.objective import KINDS
from foretell.speculator.checkpoint import WEIGHTS, write_weights
from foretell.speculator.config_file import CONFIG
from foretell.utils.validation import read_json, validate


def save_model(folder: Path, model: NatModel) -> None:
    """Write configuration and weights (float32)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, {name: t.detach().contiguous().clone() for name, t in model.state_dict().items()})
    (folder / CONFIG).write_text(model.config.model_dump_json(indent=1) + "\n", "utf-8")


def load_model(folder: Path) -> NatModel:
    """The model of a folder, for decoding.

    Raises:
        ValueError: the folder holds no such model, or a damaged one.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: no {CONFIG} here; foretell nat train writes such a folder")
    raw = read_json(path, "train the model again")
    if raw.get("model_type") == "marian":
        return MarianModel(folder).requires_grad_(False)
    if raw.get("kind") not in KINDS:
        raise ValueError(
            f"{folder}: a sequence-to-sequence model was asked for (kind {', '.join(KINDS)}), and this folder holds a "
            f"{raw.get('kind') or raw.get('model_type') or 'model of another kind'}; foretell nat train makes one"
        )
    model = NatModel(validate(NatConfig, raw, str(path)))
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"{folder / WEIGHTS}: missing or damaged ({reason}); train the model again") from error
    return model.eval().requires_grad_(False)


def require_autoregressive(model: NatModel, folder: Path, role: str) -> NatModel:
    """The model, if it decodes from left to right.

    Raises:
        ValueError: it is of another kind.
    """
    if model.config.kind != "autoregressive":
        raise ValueError(
            f"{folder}: the {role} must be an autoregressive model, and this one is of the kind {model.config.kind}"
        )
    return model


def require_same_words(one: NatModel, other: NatModel, folder: Path) -> None:
    """Check that two models read and write the same words.

    Raises:
        ValueError: they do not.
    """
    ours, theirs = ((m.config.source.words, m.config.target.words) for m in (one, other))
    if ours != theirs:
        raise ValueError(
            f"{folder}: this model has other words; train both on pairs of the same words, "
            "or one with --words-of the other"
        )
