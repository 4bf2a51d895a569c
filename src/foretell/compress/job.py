"""Compresses a model, one block at a time, and writes it with a card; the output appears whole or not at all."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float

from foretell.compress import LASER, LOW_RANK, METHODS, PRUNING, SHORTGPT
from foretell.compress.base import Compressor
from foretell.compress.card import Card, write_card
from foretell.compress.laser import SHARES, best_reduction
from foretell.compress.low_rank import check_share
from foretell.compress.sparsity import Pattern, Sparsity
from foretell.compress.unfinished import UnfinishedResult, text_digest
from foretell.load import open_checkpoint
from foretell.model.kernels.pack import TWO_OF_FOUR_INPUTS
from foretell.model.load.build import build_block
from foretell.quantize.base import linears
from foretell.quantize.calibration import CalibrationText, collect, model_rope_tables, run_block
from foretell.quantize.directory import CheckpointDirectory
from foretell.quantize.evaluate import compare
from foretell.quantize.job import Source, put_in_place, remove
from foretell.quantize.layout import EMBEDDING, FINAL_NORM, HEAD, block_tensors, inputs_of, parts_of
from foretell.utils.names import unknown
from foretell.utils.validation import read_json

Tensor = torch.Tensor
_CPU = torch.device("cpu")
ChangedBlocks = Callable[[int], Mapping[str, Tensor] | None]
"""The tensors of a block, by its index in the source; None: it stays as it is."""


@dataclass(frozen=True)
class Plan:
    """A method with its amount: of a method for matrices the compressor, of ShortGPT the number of blocks left out, of
    LASER the shares of a rank that it tries.
    """

    method: str
    amount: str
    compressor: Compressor | None = None
    dropped: int = 0
    shares: tuple[float, ...] = ()
    two_of_four: bool = False
    """Whether at most two of four consecutive weights stay."""

    @property
    def calibrated(self) -> bool:
        """Whether the method needs calibration text."""
        return self.compressor is None or self.compressor.calibrated


def plan(source: Source, method: str, sparsity: float | None, pattern: str | None, rank_share: float | None) -> Plan:
    """Choose what is done.

    Raises:
        ValueError: an unknown method, an amount that is not the method's, or a model that it cannot compress.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    given = {"--sparsity": sparsity, "--pattern": pattern, "--rank-share": rank_share}
    wanted = (
        ["--rank-share"] if method in (*LOW_RANK, LASER) else ["--sparsity"] if method == SHORTGPT else list(given)[:2]
    )
    found = [name for name, value in given.items() if value is not None]
    if method == LASER and found in ([], ["--rank-share"]):
        return _plan_reduction(rank_share)
    if len(found) != 1 or found[0] not in wanted:
        raise ValueError(f"--method {method} takes {' or '.join(wanted)}, found {' and '.join(found) or 'neither'}")
    if method == SHORTGPT:
        return _plan_blocks(source, Sparsity(sparsity or 0).share)
    if rank_share is not None:
        chosen, amount = LOW_RANK[method](rank_share), f"rank share {rank_share:g}"
    else:
        share = Sparsity.of(Pattern.parse(pattern)) if pattern is not None else Sparsity(sparsity or 0)
        chosen, amount = PRUNING[method](share), f"sparsity {share}"
    for role, inputs in inputs_of(source.config).items():
        chosen.check(sum(part.outputs for part in parts_of(source.config)[role]), inputs, f"{role} in {source.name}")
    return Plan(method, amount, chosen, two_of_four=pattern is not None and _within_two_of_four(Pattern.parse(pattern)))


def _within_two_of_four(pattern: Pattern) -> bool:
    return pattern.group == 4 and pattern.kept <= 2


def _plan_reduction(rank_share: float | None) -> Plan:
    if rank_share is None:
        return Plan(LASER, "the best rank share", shares=SHARES)
    check_share(rank_share)
    return Plan(LASER, f"rank share {rank_share:g}", shares=(rank_share,))


def _plan_blocks(source: Source, share: float) -> Plan:
    layers = source.config.layers
    dropped = round(share * layers)
    if not 0 < dropped < layers:
        raise ValueError(
            f"--sparsity {share:g} leaves out {dropped} of {layers} blocks; leave out at least 1 and keep at least 1"
        )
    if source.config.window:
        raise ValueError(f"{source.name}: layers with a sliding window come in a fixed order, so none is left out")
    return Plan(SHORTGPT, f"{dropped} of {layers} blocks left out", dropped=dropped)


def compress_model(
    source: Source,
    chosen: Plan,
    job: Mapping[str, object],
    read_text: Callable[[], CalibrationText],
    out: Path,
    progress: Callable[[int], None] = lambda block: None,
) -> Card:
    """Compress, write, read what was written, compare it with the source, and only then put it in its place.

    `job`: everything that decides the result; an interrupted run of the same job is continued. `progress` is called
    with the number of blocks done.

    Raises:
        ValueError: the text is too short, or the model cannot be written.
    """
    work = UnfinishedResult(out, job)
    try:
        text = work.text(read_text)
        if chosen.shares:
            chosen, changed = _reduce(source, chosen, text, progress)
            kept = list(range(source.config.layers))
        else:
            kept = _run_blocks(source, chosen, text, work, progress)
            changed = work.block if chosen.compressor is not None else _unchanged
    except ValueError:
        work.remove()
        raise
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        _write(source, kept, changed, part)
        opened = open_checkpoint(part)
        compared = compare((source.config, source.weights), (opened.config, opened.weights), text.held_back)
        card = Card(
            method=chosen.method,
            amount=chosen.amount,
            source=source.name,
            blocks=tuple(kept),
            two_of_four=_runs_two_of_four(source, chosen),
            zeros=_share_of_zeros(part),
            calibration=text.origin if chosen.calibrated else "none",
            calibration_tokens=text.calibration.numel(),
            calibration_sha256=text_digest(text),
            comparison_text=text.origin,
            comparison=compared,
        )
        write_card(part, card)
        put_in_place(part, out)
        work.remove()
        return card
    finally:
        remove(part)


def _unchanged(i: int) -> None:
    """No block is changed."""


def _reduce(
    source: Source, chosen: Plan, text: CalibrationText, progress: Callable[[int], None]
) -> tuple[Plan, ChangedBlocks]:
    """Lower the rank of the best matrix; the plan that says which it is, and the tensors of its block."""
    found, block = best_reduction(source, text.calibration, chosen.shares, progress)
    tensors = _dense_tensors(source, found.block, found.block, block)
    return replace(chosen, amount=found.amount), {found.block: tensors}.get


def _run_blocks(
    source: Source, chosen: Plan, text: CalibrationText, work: UnfinishedResult, progress: Callable[[int], None]
) -> list[int]:
    """Compress the blocks, or measure them; returns the indices of those that stay."""
    c, weights, dtype, ropes = source.config, source.weights, _dtype(source), model_rope_tables(source.config)
    done, x = work.resume()
    if x is None:
        x = weights.require(EMBEDDING, c.vocab, c.hidden)[text.calibration].float() * c.embedding_scale
    for i in range(done, c.layers):
        block = build_block(c, i, weights, torch.float32, _CPU)
        if chosen.compressor is None:
            after = run_block(c, ropes, i, block, x)
            found = {"influence": 1 - torch.cosine_similarity(x.double(), after.double(), -1).mean()}
        else:
            inputs = collect(c, ropes, i, block, x) if chosen.compressor.calibrated else {}
            with torch.inference_mode():
                for role, linear in linears(block).items():
                    matrix = chosen.compressor.compress(linear.weight.data, inputs.get(role))
                    linear.weight.data = matrix.to(dtype).float()
            after = run_block(c, ropes, i, block, x) if chosen.compressor.calibrated else x
            found = _dense_tensors(source, i, i, block)
        x = after
        work.add(i, found, x)
        weights.release_pages()
        progress(i + 1)
    if chosen.compressor is not None:
        return list(range(c.layers))
    influence = [float(work.block(i)["influence"]) for i in range(c.layers)]
    least = sorted(range(c.layers), key=lambda i: (influence[i], -i))[: chosen.dropped]
    return [i for i in range(c.layers) if i not in least]


def _dense_tensors(source: Source, old: int, new: int, block: Any) -> dict[str, Tensor]:
    """The tensors of a block that becomes block `new`."""
    found = {}
    for name, tensor in block_tensors(source.config, new, block, {}):
        assert isinstance(tensor, Tensor)
        found[name] = tensor.float()
    return found


def _write(source: Source, kept: list[int], changed: ChangedBlocks, part: Path) -> None:
    """Write the checkpoint."""
    c, dtype = source.config, _dtype(source)
    folder = source.path if source.path.is_dir() else None
    name = str(dtype).removeprefix("torch.")
    further: dict[str, Any] = {"torch_dtype": name, "num_hidden_layers": len(kept)}
    if folder is not None:
        raw = read_json(folder / "config.json")
        further |= {"dtype": name} if "dtype" in raw else {}
        further |= {
            key: [value[i] for i in kept]
            for key, value in raw.items()
            if isinstance(value, list) and key.startswith("layer") and len(value) == c.layers
        }
    directory = CheckpointDirectory(part, replace(c, layers=len(kept)), dtype, folder, source.codec, further)
    for key, tensor in _tensors(source, kept, changed):
        directory.add(key, tensor)
    directory.finish()


def _tensors(source: Source, kept: list[int], changed: ChangedBlocks) -> Iterator[tuple[str, Float[Tensor, "*shape"]]]:
    c, weights = source.config, source.weights
    yield EMBEDDING, weights.require(EMBEDDING, c.vocab, c.hidden)
    for new, old in enumerate(kept):
        tensors = changed(old)
        if tensors is not None:
            yield from tensors.items()
        else:
            yield from _dense_tensors(source, old, new, build_block(c, old, weights, torch.float32, _CPU)).items()
        weights.release_pages()
    yield FINAL_NORM, weights.require(FINAL_NORM, c.hidden).float() + c.norm_offset
    if not c.tied:
        head = weights.head(c.vocab, c.hidden)
        assert head is not None
        yield HEAD, head


def _dtype(source: Source) -> torch.dtype:
    """Dtype of the checkpoint: float32 of a float32 source, else bfloat16."""
    return torch.float32 if source.weights.storage == "float32" else torch.bfloat16


def _runs_two_of_four(source: Source, chosen: Plan) -> bool:
    """Whether the CPU kernels pack the matrices by the pattern."""
    blocks = all(inputs % TWO_OF_FOUR_INPUTS == 0 for inputs in inputs_of(source.config).values())
    return chosen.two_of_four and blocks and _dtype(source) == torch.bfloat16


def _share_of_zeros(path: Path) -> float:
    """Share of the numbers of the blocks' matrices that are zero."""
    config, weights, _, _ = open_checkpoint(path)
    zeros = total = 0
    for i in range(config.layers):
        block = build_block(config, i, weights, torch.float32, _CPU)
        for linear in linears(block).values():
            zeros += int((linear.weight == 0).sum())
            total += linear.weight.numel()
    return zeros / total
