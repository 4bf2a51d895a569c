"""Names of the peers, and loading them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from foretell.bench.peers import hf, isolated, llama_cpp
from foretell.bench.peers.base import ForwardBackend, Peer
from foretell.bench.peers.export import PRECISIONS, as_directory, export, name_of
from foretell.model.load.reference import resolve_reference
from foretell.model.load.transformers import import_transformers
from foretell.utils.names import unknown

TRANSFORMERS: dict[str, hf.Mode] = {
    "transformers-plain": "plain",
    "transformers-lookup": "lookup",
    "transformers-assisted": "assisted",
}
"""Modes by name."""
LLAMA_CPP = ("llama.cpp-plain", "llama.cpp-lookup")
GROUPS = {
    "transformers": ("transformers-plain", "transformers-lookup"),
    "llama.cpp": (*(f"llama.cpp-plain/{p}" for p in PRECISIONS), "llama.cpp-lookup/bf16"),
    **{name: tuple(f"{name}-{mode}" for mode in runtime.modes[:2]) for name, runtime in isolated.RUNTIMES.items()},
}
"""Peers that the bare name of a runtime selects."""
FORWARD = ("transformers", "llama.cpp")
"""Peers whose single passes are timed."""
_MODES = *TRANSFORMERS, *LLAMA_CPP, *isolated.MODES
_ASSISTED = {"transformers": "transformers-assisted"} | {
    name: f"{name}-draft" for name, runtime in isolated.RUNTIMES.items() if "draft" in runtime.modes
}
"""The further one with a draft model."""


@dataclass(frozen=True)
class PeerSettings:
    """Settings of the peers. `dtype`: of the torch peers; `folder`: for converted files."""

    model: str
    draft_model: str | None
    dtype: str
    context: int
    """Longest sequence, in tokens."""
    threads: int
    folder: Path


def expand_names(names: Sequence[str], dtype: str, has_draft_model: bool) -> list[str]:
    """Full names, `runtime-mode/precision`; the bare name of a runtime selects the modes in `GROUPS`.

    Raises:
        ValueError: an unknown name (the nearest is suggested).
    """
    known = [*GROUPS, *(f"{n}/{p}" for n in LLAMA_CPP for p in PRECISIONS), *_MODES]
    out: dict[str, None] = {}
    for name in names:
        if name not in known:
            raise unknown("peer", name, known)
        members = [*GROUPS.get(name, (name,))]
        members += [_ASSISTED[name]] if name in _ASSISTED and has_draft_model else []
        for member in members:
            out[member if "/" in member else f"{member}/{_precision(member, dtype)}"] = None
    return list(out)


def is_peer(name: str) -> bool:
    """Whether a competitor of this name, `name/precision`, is another runtime."""
    return name.split("/")[0] in _MODES


def drafts_with_model(name: str) -> bool:
    """Whether a peer drafts with the draft model."""
    return name.split("/")[0] in _ASSISTED.values()


def _precision(name: str, dtype: str) -> str:
    if name in isolated.MODES:
        return isolated.RUNTIMES[isolated.MODES[name][0]].precision
    return _torch_dtype(dtype) if name in TRANSFORMERS else "bf16"


def _torch_dtype(dtype: str) -> str:
    return "float32" if dtype == "float32" else "bfloat16"


def require_installed(names: Sequence[str]) -> None:
    """Check that the packages of these peers are installed.

    Raises:
        ValueError: a package is missing.
    """
    for name in names:
        if name.startswith("transformers"):
            import_transformers(hf.PURPOSE)
        elif name.split("/")[0] in isolated.MODES:
            isolated.require_installed(name)
        else:
            llama_cpp.import_llama_cpp()


def require_forward(names: Sequence[str]) -> None:
    """Check that single passes of these peers can be timed.

    Raises:
        ValueError: those of a peer cannot, or its package is missing.
    """
    for name in names:
        if name not in FORWARD:
            raise unknown("peer of single passes", name, FORWARD)
    require_installed(expand_names(names, "bfloat16", False))


def load_peers(names: Sequence[str], settings: PeerSettings) -> dict[str, Peer]:
    """Peers by full name; the modes of transformers share their weights."""
    out: dict[str, Peer] = {}
    torch_model = assistant = None
    for name in names:
        mode, precision = name.split("/")
        if mode in TRANSFORMERS:
            dtype = getattr(torch, precision)
            torch_model = torch_model or hf.load(settings.model, dtype)
            if mode == "transformers-assisted" and settings.draft_model:
                assistant = assistant or hf.load(settings.draft_model, dtype)
            out[name] = hf.TransformersPeer(torch_model, TRANSFORMERS[mode], assistant, name)
        elif mode in isolated.MODES:
            out[name] = _isolated(name, precision == isolated.FILE, settings)
        else:
            path = export(settings.model, precision, settings.folder)
            out[name] = llama_cpp.LlamaCppPeer(
                llama_cpp.load(path, settings.context, settings.threads, mode == "llama.cpp-lookup"), name
            )
    return out


def _isolated(name: str, reads_file: bool, settings: PeerSettings) -> isolated.IsolatedPeer:
    place = resolve_reference if reads_file else partial(as_directory, folder=settings.folder)
    model, draft = (place(reference) if reference else None for reference in (settings.model, settings.draft_model))
    assert model is not None
    converted = Path() if reads_file else settings.folder / f"{name_of(model)}-{name.split('-')[0]}"
    return isolated.IsolatedPeer(name, model, draft, settings.context, settings.threads, converted)


def load_forward_backends(names: Sequence[str], settings: PeerSettings) -> list[ForwardBackend]:
    """Backends of `foretell bench step`: transformers eager, llama.cpp in every precision."""
    out: list[ForwardBackend] = []
    for name in names:
        if name == "transformers":
            precision = _torch_dtype(settings.dtype)
            out.append(
                hf.TransformersForwardBackend(
                    hf.load(settings.model, getattr(torch, precision)), f"transformers eager {precision}"
                )
            )
        else:
            for precision in PRECISIONS:
                path = export(settings.model, precision, settings.folder)
                out.append(
                    llama_cpp.LlamaCppForwardBackend(
                        llama_cpp.load(path, settings.context, settings.threads), f"llama.cpp {precision}"
                    )
                )
    return out
