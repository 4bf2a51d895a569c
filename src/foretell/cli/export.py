"""`foretell export`: write a trained speculator for other engines."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from foretell.api import Model
from foretell.cli import options
from foretell.cli.setup import spinner
from foretell.load import load, open_checkpoint
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.speculator.config_file import CONFIG
from foretell.speculator.export import export as write
from foretell.speculator.export import find_exports
from foretell.speculator.formats.base import Verifier
from foretell.speculator.formats.mtp_gguf import write_prediction
from foretell.speculator.load import is_speculator
from foretell.train.exits.states import FIRST_POSITION, text_states
from foretell.utils.paths import require_empty
from foretell.utils.unfinished import whole
from foretell.verify.prompts import PROMPTS

app = typer.Typer(pretty_exceptions_enable=False)
_ANSWER = 48
"""Tokens of the answers along which hidden states are read."""
_ON_THE_HUB = {DEFAULT_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct"}


@app.command()
def export(
    speculator: Annotated[
        str,
        typer.Argument(
            help="Directory of a speculator or of a model with multi-token prediction, or the kind of an installed one."
        ),
    ],
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="speculators, eagle3, eagle, dflash, gguf, vllm-medusa, vllm-mlp, redrafter or hf.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write, new or empty.")],
    model: options.Model = options.DEFAULT_MODEL,
    verifier: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What readers shall call the target. [default: its hub id or --model]"),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32 or bfloat16.")] = "bfloat16",
) -> None:
    """Write a trained speculator as vLLM, SGLang and the speculators library read it.

    speculators is for EAGLE-3, P-EAGLE, DFlash and mtp, eagle3 for EAGLE-3, gguf for EAGLE-3, DFlash and multi-token
    prediction in llama.cpp, eagle for EAGLE-1 and 2, hf for draft models, PARD, mtp and assistant; see docs/formats.md.
    """
    find_exports(format_name)
    require_empty(out)
    if format_name == "gguf" and _is_model(Path(speculator)):
        _export_prediction(Path(speculator), resolve_reference(model), out, dtype)
        return
    with spinner(f"loading {model}"):
        target = load(model, dtype)
        network = target.speculator(speculator)
    name = verifier or _ON_THE_HUB.get(model, model)
    path, states = resolve_reference(model), partial(_states, target)
    about = Verifier(name, target.config, target.codec, states, path if path.is_file() else None)
    write(network, about, format_name, out)
    typer.echo(f"{out}: {network.kind} speculator in the format {format_name}")


def _is_model(folder: Path) -> bool:
    """Whether a directory holds a language model and no speculator."""
    return (folder / CONFIG).is_file() and not is_speculator(folder)


def _export_prediction(folder: Path, target: Path, out: Path, dtype: str) -> None:
    """Write the layers of multi-token prediction of a checkpoint beside a GGUF file of it."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype {dtype}: the matrices of the layer are written in float32 or bfloat16")
    if not target.is_file():
        raise ValueError(
            f"{folder}: a layer of multi-token prediction in GGUF has the metadata of the model's GGUF file; name that "
            "file with --model"
        )
    checkpoint = open_checkpoint(folder)
    name = f"mtp-{target.stem}.gguf"
    with whole(out) as part:
        part.mkdir()
        count = write_prediction(checkpoint.config, checkpoint.weights, target, part / name, getattr(torch, dtype))
    further = "" if count == 1 else f" ({count} of them, and llama.cpp drafts with one alone)"
    typer.echo(f"{out / name}: the layers of multi-token prediction in the format gguf{further}")


@torch.inference_mode()
def _states(model: Model, layers: Sequence[int]) -> list[torch.Tensor]:
    """The target's hidden states of these layers along its answers to the prompts of `foretell verify`."""
    parts = []
    for prompt, answer in zip(PROMPTS, model.generate(PROMPTS, max_new_tokens=_ANSWER), strict=True):
        tokens = [*model.tokens(prompt), *answer.tokens]
        parts.append([state[FIRST_POSITION:].float() for state in text_states(model.runner(), tokens, layers)])
    return [torch.cat(part) for part in zip(*parts, strict=True)]
