"""Models where other programs keep them: the hub's cache, Ollama, LM Studio; downloads that are not finished."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from foretell.model.load.reference import resolve_reference
from foretell.model.load.stores import choose_gguf, parts_of, stored_models

REPOSITORY, COMMIT = "org/model-GGUF", "0" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without models, and no network."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.delenv("LLAMA_CACHE", raising=False)
    for name, value in {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": True}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path  # type: ignore[return-value]


def hub_files(home: Path, *names: str, repository: str = REPOSITORY, blobs: str = "") -> Path:
    """Put files in the hub's cache, as links to blobs."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    for part in ("refs", "blobs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name in names:
        blob, file = (
            folder / "blobs" / hashlib.sha256((blobs + name).encode()).hexdigest(),
            folder / "snapshots" / COMMIT / name,
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"GGUF" + bytes(60))
        file.symlink_to(blob)
    return folder / "snapshots" / COMMIT


def refused(reference: str, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_reference(reference)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in (reference.partition(":")[0], *words)), message


FILES = ("README.md", "m-BF16.gguf", "m-IQ4_XS.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf")
SPLIT = ("Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf", "m-F16.gguf", "mtp-m-Q4_K_M.gguf")


@pytest.mark.parametrize(
    ("names", "tag", "chosen"),
    [
        (FILES, None, "m-Q4_K_M.gguf"),
        (FILES, "q4_0", "m-Q4_0.gguf"),
        (FILES, "BF16", "m-BF16.gguf"),
        (FILES, "Q2_K", None),
        (FILES, "F16", "m-BF16.gguf"),  # as llama.cpp: the tag may be the end of another
        (SPLIT, None, SPLIT[0]),
        (SPLIT, "Q4_K_M", None),
        (("b-Q5_K.gguf", "c-F16.gguf"), None, "b-Q5_K.gguf"),
        (("model.safetensors",), None, None),
    ],
)
def test_the_file_of_a_repository_is_the_one_that_llama_cpp_takes(
    names: tuple[str, ...], tag: str | None, chosen: str | None
) -> None:
    assert choose_gguf(names, tag) == chosen


def test_a_repository_of_the_hub_is_found_without_a_network(home: Path) -> None:
    folder = hub_files(home, *FILES)
    assert resolve_reference(REPOSITORY) == folder / "m-Q4_K_M.gguf"
    assert resolve_reference(f"{REPOSITORY}:Q8_0") == folder / "m-Q8_0.gguf"
    assert resolve_reference(f"hf.co/{REPOSITORY}:q4_0") == folder / "m-Q4_0.gguf"
    assert resolve_reference(f"https://huggingface.co/{REPOSITORY}/resolve/main/m-Q8_0.gguf?download=true") == (
        folder / "m-Q8_0.gguf"
    )
    assert resolve_reference("https://mirror.example/files/m-Q8_0.gguf") == folder / "m-Q8_0.gguf"
    assert resolve_reference("m-IQ4_XS.gguf") == folder / "m-IQ4_XS.gguf"
    refused(f"{REPOSITORY}:Q2_K", "BF16, IQ4_XS, Q4_0, Q4_K_M, Q8_0")
    refused("other/model:Q8_0", "the hub does not give such a model")
    refused("https://mirror.example/files/none.gguf", "no such file")


def test_all_parts_of_a_split_file_are_there_or_it_is_refused(home: Path) -> None:
    folder = hub_files(home, *SPLIT)
    assert resolve_reference(REPOSITORY) == folder / SPLIT[0]
    assert parts_of(SPLIT[0]) == list(SPLIT[:2])
    (folder / SPLIT[1]).unlink()
    refused(f"{REPOSITORY}:Q8_0", "the hub does not give such a model")


def test_a_download_of_the_hub_that_stopped_is_told(home: Path) -> None:
    folder = hub_files(home, "config.json")
    (folder.parents[1] / "blobs" / "abc.incomplete").write_bytes(bytes(1234))
    refused(f"{REPOSITORY}:Q4_K_M", "its download is not finished, 1,234 bytes are here")
    assert [model.unfinished for model in stored_models()] == [True]


def test_a_name_that_several_files_have_is_refused(home: Path) -> None:
    hub_files(home, "m.gguf")
    hub_files(home, "m.gguf", repository="other/model", blobs="other")
    refused("m.gguf", "several files", "models--org--model-GGUF", "models--other--model")


@pytest.mark.parametrize("end", [".incomplete", ".part", ".crdownload"])
def test_the_beginning_of_a_file_is_no_model(end: str, home: Path) -> None:
    begun = home / f"m.gguf{end}"
    begun.write_bytes(b"GGUF" + bytes(60))
    refused(str(begun), "not finished", "64 bytes so far")
    refused(str(home / "m.gguf"), "not finished", "64 bytes so far")


def ollama(root: Path, name: str, content: bytes, kind: str = "model", tag: str = "latest", **layer: Any) -> str:
    """Put a model in a folder of Ollama; returns the name of its blob."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    layers: list[Mapping[str, Any]] = [{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"}]
    media = f"application/vnd.ollama.image.{kind}"
    layers.append({"mediaType": media, "digest": digest, "size": len(content)} | layer)
    manifest = root / "manifests" / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = root / "blobs" / digest.replace(":", "-")
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    return blob.name


@pytest.mark.parametrize("variable", [False, True])
def test_models_of_ollama_are_found_by_their_manifests(
    variable: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = home / ("own" if variable else ".ollama/models")
    if variable:
        monkeypatch.setenv("OLLAMA_MODELS", str(root))
    names = {
        "registry.ollama.ai/library/qwen3": ("qwen3", "latest"),
        "registry.ollama.ai/library/qwen3/": ("qwen3:0.6b", "0.6b"),
        "registry.ollama.ai/someone/tuned": ("someone/tuned:q4", "q4"),
        "hf.co/org/model": ("hf.co/org/model:Q4_K_M", "Q4_K_M"),
    }
    for path, (name, tag) in names.items():
        blob = ollama(root, path, b"GGUF" + name.encode() + bytes(60), tag=tag)
        assert resolve_reference(f"ollama:{name}") == root / "blobs" / blob
        assert resolve_reference(blob) == resolve_reference(str(root / "blobs" / blob)) == root / "blobs" / blob
    assert {model.reference for model in stored_models()} == {
        "ollama:qwen3:latest", "ollama:qwen3:0.6b", "ollama:someone/tuned:q4", "ollama:hf.co/org/model:Q4_K_M",
    }  # fmt: skip
    refused("ollama:qwen3:0.6c", "did you mean 'ollama:qwen3:0.6b'")


def test_models_of_ollama_that_cannot_be_read_are_refused(home: Path) -> None:
    refused("ollama:none", "Ollama has no models here")
    root, library = home / ".ollama/models", "registry.ollama.ai/library"
    blob = root / "blobs" / ollama(root, f"{library}/cut", b"GGUF" + bytes(60), size=99)
    refused("ollama:cut", "64 of 99 bytes")
    blob.rename(blob.with_name(f"{blob.name}-partial"))
    refused("ollama:cut", "64 of 99 bytes", "let `ollama pull` finish")
    ollama(root, f"{library}/tensors", b"x", kind="tensor")
    refused("ollama:tensors", "no GGUF file")
    ollama(root, f"{library}/escape", b"x", digest="sha256:../../secret")
    with pytest.raises(ValueError, match="damaged manifest"):
        resolve_reference("ollama:escape")
    (root / "manifests" / library / "cut" / "latest").write_text("{")
    with pytest.raises(ValueError, match="pull the model again"):
        resolve_reference("ollama:cut")


@pytest.mark.parametrize("folder", [".lmstudio/models", ".cache/lm-studio/models"])
def test_models_of_lm_studio_are_found(folder: str, home: Path) -> None:
    repository = home / folder / "org" / "model"
    repository.mkdir(parents=True)
    (repository / "m-Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(60))
    (repository / "m-Q8_0.gguf.part").write_bytes(b"GGUF" + bytes(60))
    assert resolve_reference("org/model") == resolve_reference("org/model:Q4_K_M") == repository / "m-Q4_K_M.gguf"
    assert [(model.reference, model.unfinished) for model in stored_models()] == [
        ("org/model:Q4_K_M", False),
        (str(repository / "m-Q8_0.gguf.part"), True),
    ]
    (repository / "config.json").write_text("{}")
    (repository / "model.safetensors").touch()
    assert resolve_reference("org/model") == repository
    shutil.rmtree(repository)
    refused("org/model", "the hub does not give such a model")
