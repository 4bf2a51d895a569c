"""`foretell calibrate placement`: the neurons of a sparse model that stay in memory, and the file of the others."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from jaxtyping import Int
from rich.console import Console

from foretell.api import Model
from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.lab.cli.quantize import CalibrationTokens, Text, TextSeed
from foretell.lab.cli.sparsity import LEAST_TOKENS, fingerprint, open_source, read_calibration_text
from foretell.lab.quantize.calibration import CalibrationText
from foretell.lab.sparsify.profile import count_choices, shares_of_most_frequent, write_profile
from foretell.load import load
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.linear import float_precision
from foretell.model.kernels.neuron_file import record_bytes
from foretell.model.load.network import choose_precision, parse_device
from foretell.model.load.placed import check_placeable
from foretell.model.offload.block_store import OffloadedDecoder
from foretell.model.offload.neuron_placement import Placement, place_neurons
from foretell.model.offload.placement_file import NEURONS, PlacementFile
from foretell.model.offload.sparsity_file import directory_of, read_sparsity
from foretell.roofline.hardware import known_hardware, memory_tier
from foretell.roofline.neurons import Side, Sides, predict_placement
from foretell.verify.logits import read_chunk

_PARTS = (0.1, 0.25, 0.5, 0.75)
"""Shares of the neurons in the report."""
_TURN = 8
"""Passes that a model runs before the other one does."""
_SYNCHRONISE = 20e-6
"""Assumed seconds to combine the sums of two devices, or of two groups of cores."""


def placement(
    ctx: typer.Context,
    model: options.SourceModel,
    sparsity: Annotated[
        Path, typer.Option(metavar="DIR", help="Sparse model (cats or deja_vu), which receives the profile.")
    ],
    target_memory_limit: Annotated[
        int | None,
        typer.Option(metavar="MIB", min=1, help="Measure one-token passes at this limit, beside plain offload."),
    ] = None,
    least_neurons: Annotated[
        int, typer.Option(metavar="N", min=0, help="A layer has no neurons in memory, or at least N.")
    ] = 0,
    text: Text = None,
    calibration_tokens: CalibrationTokens = 4096,
    passes: Annotated[int, typer.Option(metavar="N", min=1, help="Passes of one token to measure.")] = 32,
    dtype: options.Dtype = "auto",
    seed: TextSeed = 0,
) -> None:
    """Count how often tokens choose every neuron of a sparse model (PowerInfer), so that under a limit of memory the
    most frequent ones stay in it and the others are read from a mapped file. Answers are those of the sparse model.

    foretell calibrate sparsity smollm2-135m --sparsity 0.5 --out half

    foretell calibrate placement smollm2-135m --sparsity half --target-memory-limit 160 --dtype bfloat16

    foretell generate "Why is the sky blue?" --sparsity half --target-memory-limit 160 --dtype bfloat16
    """
    refuse_unused(ctx, ("seed",), "--text names the text", bool(text))
    refuse_unused(ctx, ("passes",), "passes are measured at a --target-memory-limit", target_memory_limit is None)
    console, source = Console(stderr=True), open_source(model, "profiled")
    config = source.config
    sparse = read_sparsity(sparsity, fingerprint(source), config)
    sparsity = directory_of(sparsity)
    check_placeable(config, parse_device("cpu"), sparse)
    if least_neurons > config.ffn:
        raise ValueError(f"--least-neurons {least_neurons}: the model has {config.ffn} neurons per layer")
    precision = choose_precision(model, dtype, config, source.weights, parse_device("cpu"))
    calibration_text = read_calibration_text(source, text, calibration_tokens, LEAST_TOKENS, seed, console)
    with console.status("counting") as status:
        counts = count_choices(
            config, source.weights, sparse, calibration_text.calibration,
            lambda done: status.update(f"{done} of {config.layers} blocks"),
        )  # fmt: skip
        status.update("writing the neurons")
        file = PlacementFile(
            layers=config.layers, neurons=config.ffn, hidden=config.hidden, floats=float_precision(precision),
            tokens=calibration_text.calibration.numel(), text=calibration_text.origin,
            thresholds=sparse.file.thresholds, least_neurons=least_neurons,
        )  # fmt: skip
        write_profile(sparsity, config, source.weights, precision, file, counts)
    size = record_bytes(config.hidden, file.floats)
    typer.echo(_profile(sparsity, file, counts))
    if target_memory_limit is not None:
        with console.status("measuring"):
            report = _measured(model, dtype, sparsity, target_memory_limit << 20, calibration_text, passes)
        typer.echo(report)
    half = place_neurons(counts.numpy(), counts.numel() // 2, least_neurons)
    typer.echo(_predicted(counts.numpy(), file.tokens, half, size))


def _profile(folder: Path, file: PlacementFile, counts: Int[torch.Tensor, "l f"]) -> str:
    shares = zip(_PARTS, shares_of_most_frequent(counts, _PARTS), strict=True)
    mean = counts.double().mean() / file.tokens
    return (
        f"{folder}: {file.tokens:,} tokens of {file.text}; a token chooses {mean:.1%} of the neurons\n"
        f"choices that fall on the most frequent neurons: "
        f"{', '.join(f'{share:.1%} on {part:.0%}' for part, share in shares)}\n"
        f"{folder / NEURONS}: {(folder / NEURONS).stat().st_size / 1e6:,.1f} MB, {file.floats}"
    )


def _measured(model: str, dtype: str, folder: Path, limit: int, text: CalibrationText, passes: int) -> str:
    """Times of one-token passes of both, in turns of some passes on one text."""
    placed, offloaded = load(model, dtype, memory_limit=limit, sparsity=folder), load(model, dtype, memory_limit=limit)
    network = placed.network
    assert isinstance(network, NativeDecoder) and network.file_reads is not None
    reading = text.held_back[0][:passes]
    seconds = token_seconds([placed, offloaded], reading)
    neurons, requests, size = (n / len(reading) for n in network.file_reads.total())
    return (
        f"{network.sparsity}\n"
        f"at a limit of {limit >> 20} MiB, medians of {len(reading)} passes of one token: {1e3 * seconds[0]:.1f} ms "
        f"placed, {1e3 * seconds[1]:.1f} ms plain offload ({seconds[1] / seconds[0]:.2f} times as fast)\n"
        f"a token reads {neurons:,.0f} neurons of the file in {requests:,.0f} requests, {size / 1e6:.1f} MB"
    )


def token_seconds(models: Sequence[Model], tokens: Int[torch.Tensor, " s"]) -> list[float]:
    """Median time of a pass of one token of each model. They take turns of `_TURN` passes, so that reading ahead helps
    the model that does it; the first pass of a turn does not count where there are others.
    """
    runners, times = [m.runner() for m in models], [list[float]() for _ in models]
    for turn in tokens.split(_TURN):
        for model, runner, own in zip(models, runners, times, strict=True):
            for i, token in enumerate(turn.tolist()):
                start = time.perf_counter()
                read_chunk(runner, [token], 1)
                if i or len(turn) == 1:
                    own.append(time.perf_counter() - start)
            if isinstance(model.network, OffloadedDecoder):
                model.network.store.wait()
    return [statistics.median(own) for own in times]


def _predicted(counts: Int[np.ndarray, "l f"], tokens: int, half: Placement, neuron_bytes: int) -> str:
    """What the roofline says of half of the neurons on a fast side."""
    known = known_hardware()
    pairs = {
        "memory and mapped file": Sides(Side.of(memory_tier("ddr")), Side.of(memory_tier("nvme"))),
        "GPU and CPU": Sides(Side.of(known["rtx-4090"]), Side.of(known["core-i9-13900k"]), _SYNCHRONISE),
        "many cores and few": Sides(Side.of(known["epyc-9654"]), Side.of(known["core-i9-13900k"]), _SYNCHRONISE),
    }
    lines = [f"half of the neurons in the fast memory ({half.solver}), {half.share:.1%} of the choices; by datasheets:"]
    for name, sides in pairs.items():
        placed, layered = predict_placement(counts, tokens, half.hot, neuron_bytes, sides)
        lines.append(
            f"  {name} ({sides.fast.name}, {sides.slow.name}): {1e3 * placed:.2f} ms per token, by whole layers "
            f"{1e3 * layered:.2f} ms ({layered / placed:.2f} times as fast)"
        )
    return "\n".join(lines)
