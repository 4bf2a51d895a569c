"""Quantises a model, one block at a time, and writes it; the output appears whole or not at all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float, Int

from foretell.lab.quantize.base import InputStatistics, Quantizer, Role, linears
from foretell.lab.quantize.calibration import BlocksOnText, CalibrationText, embedded
from foretell.lab.quantize.directory import QuantizedDirectory, written_config
from foretell.lab.quantize.evaluate import compare
from foretell.lab.quantize.gguf_file import GGUFFile, embedding_kind
from foretell.lab.quantize.gguf_grids import FALLBACK, GGUF_GRIDS, GGUFGrid
from foretell.lab.quantize.grid import Grid, Parameters, QuantizedRows
from foretell.lab.quantize.integer_grid import IntegerGrid
from foretell.lab.quantize.layout import TensorEntry, block_tensors, require_supported, shapes_of
from foretell.lab.quantize.rtn import round_to_nearest
from foretell.load import open_checkpoint
from foretell.model.block.layer import DecoderBlock
from foretell.model.config.model import ModelConfig
from foretell.model.load.gguf import GGUF
from foretell.model.load.weights import EMBEDDING, FINAL_NORM, HEAD, Weights
from foretell.tokenizer.codec import TextCodec
from foretell.utils.names import unknown
from foretell.utils.unfinished import whole
from foretell.verify.comparison import Comparison

Tensor = torch.Tensor
_DIRECTORY_TYPES: Mapping[str, tuple[int, bool]] = {"Q4_0": (4, True), "Q4_1": (4, False), "Q8_0": (8, True)}
"""Bits and symmetry of the types that a directory can hold."""
_GROUPS = (128, 96, 64, 32, 16, 8)
"""Usual groups of a directory; the default is the first that divides the inputs of all matrices."""
_ROWS = 8192
"""Rows of the embedding that are quantised at once."""


class Output(Protocol):
    """A file or directory that is being written."""

    def add(self, name: str, tensor: QuantizedRows | Float[Tensor, "*shape"]) -> None:
        """Write the next tensor."""

    def finish(self) -> None:
        """Complete the output."""

    def abandon(self) -> None:
        """Close what is open."""


@dataclass(frozen=True)
class Source:
    """The model that is quantised."""

    name: str
    path: Path
    config: ModelConfig
    weights: Weights
    codec: TextCodec
    eos: tuple[int, ...]

    @staticmethod
    def open(name: str, path: Path, action: str = "quantised") -> "Source":
        """Open a directory or a GGUF file; `action`: what is to be done with it.

        Raises:
            ValueError: see `load`; or an architecture that is not supported.
        """
        config, weights, read_codec, eos = open_checkpoint(path)
        require_supported(config, name, action)
        return Source(name, path, config, weights, read_codec(), eos)

    @property
    def folder(self) -> Path | None:
        """Its directory; None: it is a GGUF file."""
        return self.path if self.path.is_dir() else None

    def compare_with(self, path: Path, tokens: Int[torch.Tensor, "b s"]) -> Comparison:
        """The next-token distributions of what was made of the model beside its own."""
        made = open_checkpoint(path)
        return compare((self.config, self.weights), (made.config, made.weights), tokens)


@dataclass(frozen=True)
class Target:
    """What is written: a GGUF file (by its suffix) or a directory, and the grids of its matrices."""

    path: Path
    kind: str
    roles: Mapping[Role, Grid]
    outer: GGUFGrid | None
    """Grid of embedding and head; None: they stay in 16 bits."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Matrices that have another type than asked for, in words."""
        return tuple(
            f"{role}: {grid.name}, as its rows are no whole blocks of {GGUF_GRIDS[self.kind].block} ({self.kind})"
            for role, grid in self.roles.items()
            if isinstance(grid, GGUFGrid) and grid.kind != self.kind
        )


def plan(source: Source, out: Path, kind: str, group: int | None) -> Target:
    """Choose the grids.

    Raises:
        ValueError: an unknown type, a group that does not divide the inputs, rows that are no whole blocks, or a model
            that no directory can hold.
    """
    inputs = {role: inputs for role, (_, inputs) in shapes_of(source.config).items()}
    if kind not in GGUF_GRIDS:
        raise unknown("type", kind, GGUF_GRIDS)
    if out.suffix == ".gguf":
        if group is not None:
            raise ValueError(
                f"--group-size: the groups of GGUF types are fixed ({kind}); leave it out, or write a directory"
            )
        outer = GGUF_GRIDS[embedding_kind(GGUF_GRIDS[kind].kind)]
        roles: dict[Role, Grid] = {role: _gguf_grid(kind, n, source.name, role) for role, n in inputs.items()}
        return Target(out, kind, roles, _gguf_grid(outer.kind, source.config.hidden, source.name, "the embedding"))
    if kind not in _DIRECTORY_TYPES:
        raise ValueError(
            f"--type {kind}: a directory holds {', '.join(_DIRECTORY_TYPES)}; name a .gguf file for other types"
        )
    written_config(source.folder, source.config)
    fitting = [g for g in _GROUPS if not any(n % g for n in inputs.values())]
    group = group or (fitting or _GROUPS)[0]
    wrong = next(((role, n) for role, n in inputs.items() if n % group), None)
    if wrong is not None:
        advice = f"take {' or '.join(map(str, fitting))}" if fitting else "no usual group size divides all of them"
        raise ValueError(
            f"--group-size {group} does not divide the {wrong[1]} inputs of {wrong[0]} in {source.name}; {advice}"
        )
    bits, symmetric = _DIRECTORY_TYPES[kind]
    grid = IntegerGrid(bits, group, symmetric)
    return Target(out, kind, dict.fromkeys(inputs, grid), None)


def _gguf_grid(kind: str, inputs: int, name: str, role: str) -> GGUFGrid:
    grid = GGUF_GRIDS[kind]
    if inputs % grid.block and kind in FALLBACK:
        grid = GGUF_GRIDS[FALLBACK[kind]]
    if inputs % grid.block:
        raise ValueError(
            f"{name}: the {inputs} inputs of {role} are no whole blocks of {grid.block}, as {grid.name} needs; write a "
            "directory with a --group-size that divides them"
        )
    return grid


def quantize_model(
    source: Source,
    quantizer: Quantizer,
    target: Target,
    text: CalibrationText,
    progress: Callable[[int], None] = lambda block: None,
) -> Comparison:
    """Quantise, write, read what was written, compare it with the source, and only then put it in its place.

    `progress` is called with the number of blocks done.

    Raises:
        ValueError: the model cannot be written in this format.
    """
    with whole(target.path) as part:
        output = _open_output(part, source, target)
        try:
            _write(source, quantizer, target, text, output, progress)
            output.finish()
        except BaseException:
            output.abandon()
            raise
        return source.compare_with(part, text.held_back)


def _open_output(part: Path, source: Source, target: Target) -> Output:
    grid = target.roles["qkv"]
    if isinstance(grid, IntegerGrid):
        return QuantizedDirectory(part, source.config, grid, source.folder, source.codec)
    file = None if source.path.is_dir() else GGUF(source.path)

    def grid_of(entry: TensorEntry) -> GGUFGrid:
        entry_grid = target.outer if entry.role is None else target.roles[entry.role]
        assert isinstance(entry_grid, GGUFGrid)
        return entry_grid

    return GGUFFile(part, source.config, grid_of, target.kind, file, source.codec, source.eos, Path(source.name).name)


def _write(
    source: Source,
    quantizer: Quantizer,
    target: Target,
    text: CalibrationText,
    output: Output,
    progress: Callable[[int], None],
) -> None:
    c, weights = source.config, source.weights
    output.add(EMBEDDING, _outer(weights.require(EMBEDDING, c.vocab, c.hidden), target))
    walk = BlocksOnText(c, weights, embedded(c, weights, text.calibration) if quantizer.calibrated else None)
    for i, block in walk:
        inputs = walk.inputs(i, block)
        with torch.inference_mode():
            quantized = quantize_block(c, block, quantizer, target.roles, inputs)
        for name, tensor in block_tensors(c, i, block, quantized):
            output.add(name, tensor)
        progress(i + 1)
    output.add(FINAL_NORM, weights.require(FINAL_NORM, c.hidden).float() + c.norm_offset)
    if not c.tied:
        head = weights.head(c.vocab, c.hidden)
        assert head is not None
        output.add(HEAD, _outer(head, target))


def quantize_block(
    config: ModelConfig,
    block: DecoderBlock,
    quantizer: Quantizer,
    grids: Mapping[Role, Grid],
    inputs: Mapping[Role, InputStatistics],
) -> dict[Role, QuantizedRows]:
    """Quantise the matrices of a block; the block computes with the quantised numbers afterwards."""
    inputs = quantizer.fold(block, config, grids, inputs)
    quantized = {}
    for role, linear in linears(block).items():
        quantized[role] = quantizer.quantize(role, linear.weight.data, grids[role], inputs.get(role))
        linear.weight.data = quantized[role].values()
    return quantized


def _outer(matrix: Float[Tensor, "v d"], target: Target) -> QuantizedRows | Float[Tensor, "v d"]:
    """Embedding or head as the target holds it, rounded to nearest."""
    if target.outer is None:
        return matrix
    parts = [round_to_nearest(rows.float(), target.outer) for rows in matrix.split(_ROWS)]
    level = torch.cat([p.level for p in parts])
    return QuantizedRows(target.outer, level, Parameters.stack([p.parameters for p in parts]))
