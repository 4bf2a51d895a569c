"""From the names that users write to peers that are ready to run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.bench.peers import hf
from foretell.bench.peers import llama_cpp as llama
from foretell.bench.peers.base import ForwardBackend, Peer
from foretell.bench.peers.export import PRECISIONS, export
from foretell.utils.names import unknown

TRANSFORMERS = ("transformers-plain", "transformers-lookup", "transformers-assisted")
LLAMA_CPP = ("llama.cpp-plain", "llama.cpp-lookup")
GROUPS = {
    "transformers": ("transformers-plain", "transformers-lookup"),
    "llama.cpp": (*(f"llama.cpp-plain/{p}" for p in PRECISIONS), "llama.cpp-lookup/bf16"),
}
"""What a runtime's bare name stands for."""


@dataclass(frozen=True)
class PeerSettings:
    """What peers need to know: the model, its draft model, precision of the torch peers, longest text, threads, where
    converted files go.
    """

    model: str
    draft_model: str | None
    dtype: str
    context: int
    threads: int
    folder: Path


def expand_names(names: Sequence[str], dtype: str, has_draft_model: bool) -> list[str]:
    """Full names, `runtime-mode/precision`; a runtime's bare name stands for its usual modes.

    Raises:
        ValueError: an unknown name (the nearest is suggested).
    """
    known = [*GROUPS, *TRANSFORMERS, *(f"{n}/{p}" for n in LLAMA_CPP for p in PRECISIONS), *LLAMA_CPP]
    out: dict[str, None] = {}
    for name in names:
        if name not in known:
            raise unknown("peer", name, known)
        members = [*GROUPS.get(name, (name,))]
        members += ["transformers-assisted"] if name == "transformers" and has_draft_model else []
        for member in members:
            full = member if "/" in member else f"{member}/{_torch_dtype(dtype) if member in TRANSFORMERS else 'bf16'}"
            out[full] = None
    return list(out)


def _torch_dtype(dtype: str) -> str:
    return "float32" if dtype == "float32" else "bfloat16"


def require_installed(names: Sequence[str]) -> None:
    """Fail early where a peer's package is missing.

    Raises:
        ValueError: says how to install it.
    """
    for name in names:
        if name.startswith("transformers"):
            hf.import_transformers()
        else:
            llama.import_llama_cpp()


def load_peers(names: Sequence[str], setting: PeerSettings) -> dict[str, Peer]:
    """Ready peers by full name; modes of one runtime and precision share their weights where they can."""
    out: dict[str, Peer] = {}
    torch_model = assistant = None
    for name in names:
        kind, precision = name.split("/")
        if kind in TRANSFORMERS:
            dtype = getattr(torch, precision)
            torch_model = torch_model or hf.load(setting.model, dtype)
            if kind == "transformers-assisted" and setting.draft_model:
                assistant = assistant or hf.load(setting.draft_model, dtype)
            modes: dict[str, hf.Mode] = {
                "transformers-plain": "plain",
                "transformers-lookup": "lookup",
                "transformers-assisted": "assisted",
            }
            out[name] = hf.TransformersPeer(torch_model, modes[kind], assistant, name)
        else:
            path = export(setting.model, precision, setting.folder)
            out[name] = llama.LlamaCppPeer(
                llama.load(path, setting.context, setting.threads, kind == "llama.cpp-lookup"), name
            )
    return out


def load_forward_backends(names: Sequence[str], setting: PeerSettings) -> list[ForwardBackend]:
    """The peers of a step measurement: transformers eager, llama.cpp in every precision."""
    out: list[ForwardBackend] = []
    for name in names:
        if name == "transformers":
            precision = _torch_dtype(setting.dtype)
            out.append(
                hf.TransformersForwardBackend(
                    hf.load(setting.model, getattr(torch, precision)), f"transformers eager {precision}"
                )
            )
        elif name == "llama.cpp":
            for precision in PRECISIONS:
                path = export(setting.model, precision, setting.folder)
                out.append(
                    llama.LlamaCppForwardBackend(
                        llama.load(path, setting.context, setting.threads), f"llama.cpp {precision}"
                    )
                )
        else:
            raise unknown("peer", name, GROUPS)
    return out
