"""Where programs keep models on this machine: the hub's cache, Ollama's blobs, the folders of LM Studio and llama.cpp.

Layouts: https://huggingface.co/docs/huggingface_hub/guides/manage-cache (hub), `server/modelpath.go` and `manifest` of
https://github.com/ollama/ollama (Ollama), https://lmstudio.ai/docs/app/basics/import-model (LM Studio).
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from foretell.utils.names import unknown
from foretell.utils.validation import read_json

UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".downloadInProgress", ".aria2")
"""Ends of the names of files that are being downloaded: by the hub, browsers and others."""
OLLAMA = "ollama:"
_LIBRARY = ("registry.ollama.ai", "library")
_WEIGHTS, _ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_NO_MODEL = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of the names of GGUF files that are no language models."""
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_TAG = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine."""

    reference: str
    """What names it on a command line."""
    store: str
    path: Path
    """Its GGUF file or its directory; of a download that is not finished, what there is of it."""

    @property
    def unfinished(self) -> bool:
        """Whether its download is not finished."""
        return is_unfinished(self.path)


def is_unfinished(path: Path) -> bool:
    """Whether the name of a file says that it is being downloaded."""
    return path.name.endswith(UNFINISHED) or "-partial" in path.name


def hub_cache() -> Path:
    """The folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def hub_folder(repository: str) -> Path:
    """The folder of a repository in the hub's cache."""
    return hub_cache() / f"models--{repository.replace('/', '--')}"


def hub_snapshot(folder: Path) -> Path | None:
    """The newest snapshot of a repository in the hub's cache: that of its main branch; None: there is none."""
    main = folder / "refs" / "main"
    named = folder / "snapshots" / main.read_text().strip() if main.is_file() else None
    if named is not None and named.is_dir():
        return named
    return max((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, default=None)


def lm_studio_folders() -> list[Path]:
    """The folders of LM Studio, those that there are."""
    return _folders("~/.lmstudio/models", "~/.cache/lm-studio/models")


def ollama_folders() -> list[Path]:
    """The folders of Ollama, those that there are: $OLLAMA_MODELS, or the user's and the service's."""
    own = os.environ.get("OLLAMA_MODELS")
    return _folders(own) if own else _folders("~/.ollama/models", "/usr/share/ollama/.ollama/models")


def _llama_cpp_folders() -> list[Path]:
    return _folders(os.environ.get("LLAMA_CACHE") or "~/.cache/llama.cpp")


def _folders(*names: str) -> list[Path]:
    return [path for path in map(Path.expanduser, map(Path, names)) if path.is_dir()]


def gguf_names(folder: Path) -> list[str]:
    """The GGUF files in a folder and those below it, by their paths from it, in order."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.is_file())


def choose_gguf(names: Iterable[str], tag: str | None) -> str | None:
    """The file that llama.cpp's `-hf` takes of a repository: the first with the tag in its name before a dot or a
    hyphen; without a tag the one of Q4_K_M, of Q8_0, or the first. Of a split file its first part.
    """
    models = [name for name in names if is_model(name)]
    for each in _DEFAULT_TAGS if tag is None else (tag,):
        pattern = re.compile(re.escape(each) + "[.-]", re.IGNORECASE)
        if named := [name for name in models if pattern.search(name)]:
            return named[0]
    return models[0] if models and tag is None else None


def is_model(name: str) -> bool:
    """Whether a file of a repository is the GGUF file of a language model, or the first part of one."""
    part, last = _SPLIT.search(name), name.rpartition("/")[2]
    whole = name.endswith(".gguf") and not any(mark in last for mark in _NO_MODEL)
    return whole and (part is None or int(part[1]) == 1)


def parts_of(name: str) -> list[str]:
    """The parts of a GGUF file, by the name of its first."""
    part = _SPLIT.search(name)
    if part is None:
        return [name]
    return [f"{name[: part.start()]}-{i:05}-of-{part[2]}.gguf" for i in range(1, int(part[2]) + 1)]


def tag_of(name: str) -> str:
    """The quantisation that the name of a GGUF file ends with, as llama.cpp reads it; empty: it has none."""
    tag = _TAG.search(_SPLIT.sub("", name).removesuffix(".gguf"))
    return "" if tag is None else tag[1].upper()


def in_lm_studio(repository: str, tag: str | None) -> Path | None:
    """The model of a repository in LM Studio's folders; None: it is not there."""
    for folder in (root / repository for root in lm_studio_folders()):
        if tag is None and is_directory_of_model(folder):
            return folder
        name = choose_gguf(gguf_names(folder), tag) if folder.is_dir() else None
        if name is not None:
            return folder / name
    return None


def is_directory_of_model(folder: Path) -> bool:
    """Whether a folder holds a configuration and weights in safetensors."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def ollama_blob(reference: str) -> Path:
    """The GGUF file of `ollama:NAME[:TAG]`, by its manifest.

    Raises:
        ValueError: there is no such model, its download is not finished, or it is more than a GGUF file.
    """
    manifests = {f"{OLLAMA}{name}": (root, file) for root, name, file in _manifests()}
    wanted = reference if ":" in reference.removeprefix(OLLAMA).rpartition("/")[2] else f"{reference}:latest"
    if wanted not in manifests:
        if not manifests:
            raise ValueError(
                f"{reference}: Ollama has no models here; they would be in $OLLAMA_MODELS, or else ~/.ollama/models"
            )
        raise unknown("model of Ollama", wanted, manifests)
    root, manifest = manifests[wanted]
    layers = [layer for layer in _layers(manifest) if layer.get("mediaType") in (_WEIGHTS, _ADAPTER)]
    if [layer["mediaType"] for layer in layers] != [_WEIGHTS]:
        kinds = "an adapter beside its weights" if layers else "no GGUF file"
        raise ValueError(f"{reference}: by its manifest {manifest} this model is {kinds}, which is not read")
    digest, size = str(layers[0].get("digest")), layers[0].get("size")
    if not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"{manifest}: a damaged manifest of Ollama; pull the model again")
    blob = root / "blobs" / digest.replace(":", "-")
    here = blob.stat().st_size if blob.is_file() else sum(f.stat().st_size for f in blob.parent.glob(f"{blob.name}-*"))
    if here != size:
        raise ValueError(
            f"{reference}: its download is not complete: {here:,} of {size:,} bytes are in {blob}; let `ollama pull` "
            "finish"
        )
    return blob


def _manifests() -> Iterator[tuple[Path, str, Path]]:
    """Folder, name with tag, and manifest of every model of Ollama."""
    for root in ollama_folders():
        for file in sorted((root / "manifests").glob("*/*/*/*")):
            host, user, name, tag = file.relative_to(root / "manifests").parts
            long = (host, user, name) if host != _LIBRARY[0] else (user, name) if user != _LIBRARY[1] else (name,)
            if file.is_file() and not file.name.startswith("."):
                yield root, f"{'/'.join(long)}:{tag}", file


def _layers(manifest: Path) -> Sequence[dict[str, Any]]:
    layers = read_json(manifest, "pull the model again").get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError(f"{manifest}: a damaged manifest of Ollama; pull the model again")
    return layers


def find_file(name: str) -> Path | None:
    """The file of this name in one of the stores, a GGUF file or a blob of Ollama; None: there is none.

    Raises:
        ValueError: there are several.
    """
    name = escape(name)
    places = [
        *hub_cache().glob(f"models--*/snapshots/*/**/{name}"),
        *(path for folder in (*lm_studio_folders(), *_llama_cpp_folders()) for path in folder.rglob(name)),
        *(path for folder in ollama_folders() for path in (folder / "blobs").glob(name)),
    ]
    files = {path.resolve(): path for path in sorted(places) if path.is_file()}
    if len(files) > 1:
        raise ValueError(
            f"{name}: several files have this name; give the path of one: {', '.join(map(str, files.values()))}"
        )
    return next(iter(files.values()), None)


def stored_models() -> Iterator[StoredModel]:
    """The models in all stores: GGUF files, directories, and downloads that are not finished."""
    for folder in sorted(hub_cache().glob("models--*--*")):
        name, snapshot = folder.name.removeprefix("models--").replace("--", "/", 1), hub_snapshot(folder)
        yield from _in_folder(name, "hub", snapshot) if snapshot is not None else ()
        yield from (StoredModel(name, "hub", path) for path in sorted(folder.glob("blobs/*.incomplete")))
    for folder in (each for root in lm_studio_folders() for each in sorted(root.glob("*/*")) if each.is_dir()):
        yield from _in_folder("/".join(folder.parts[-2:]), "LM Studio", folder)
    for _, name, file in _manifests():
        yield StoredModel(f"{OLLAMA}{name}", "Ollama", file)
    for path in (path for root in _llama_cpp_folders() for path in sorted(root.iterdir())):
        if is_model(path.name) or is_unfinished(path):
            yield StoredModel(str(path), "llama.cpp", path)


def _in_folder(name: str, store: str, folder: Path) -> Iterator[StoredModel]:
    """The models of a repository, by references that find them again."""
    if is_directory_of_model(folder):
        yield StoredModel(name, store, folder)
    names = gguf_names(folder)
    for file in filter(is_model, names):
        tag = tag_of(file)
        short = f"{name}:{tag}" if tag and choose_gguf(names, tag) == file else str(folder / file)
        yield StoredModel(short, store, folder / file)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and is_unfinished(path):
            yield StoredModel(str(path), store, path)
