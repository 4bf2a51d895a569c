"""Reads the record of a block from a checkpoint, and walks its tensors; see `foretell.model.block.spec`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float

from foretell.model.block.spec import (
    LINEARS,
    BlockWeights,
    GatedWeights,
    LinearSpec,
    LinearWeights,
    PartSpec,
    Place,
    VectorSpec,
    specs_of,
)
from foretell.model.config.families import family_of
from foretell.model.config.families.base import Rows
from foretell.model.config.model import ModelConfig
from foretell.model.matrices.mapped_file import MappedFile
from foretell.model.matrices.stored import Matrix, StoredMatrix

Tensor = torch.Tensor
P = TypeVar("P")


class TensorSource(Protocol):
    """Where tensors come from; see `foretell.model.load.weights.Weights`."""

    source: str
    mapped: Sequence[MappedFile]

    def get(self, name: str) -> Float[Tensor, "*shape"] | None: ...  # noqa: D102
    def require(self, name: str, *shape: int) -> Float[Tensor, "*shape"]: ...  # noqa: D102
    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix: ...  # noqa: D102
    def expert_matrices(  # noqa: D102
        self, name: str, count: int, outputs: int, inputs: int
    ) -> Iterator[StoredMatrix]: ...


def read_block(config: ModelConfig, i: int, source: TensorSource) -> BlockWeights:
    """The weights of block `i`, its matrices as the checkpoint stores them; experts are read while they are iterated.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    return _Reader(config, f"model.layers.{i}.", source).part(BlockWeights, Place(config, i), "")


class _Reader:
    """Reads the parts of a block; `path` is that of a field from the block, as `mlp.gate_up`."""

    def __init__(self, config: ModelConfig, prefix: str, source: TensorSource, expert: int = 0) -> None:
        self._config, self._prefix, self._source, self._expert = config, prefix, source, expert
        self._family = family_of(config.architecture)

    def part(self, kind: type[P], at: Place, path: str) -> P:
        """A part with all its fields."""
        values = dict[str, Any]()
        for name, spec in specs_of(kind).items():
            whole = f"{path}{name}"
            if not spec.when(at):
                values[name] = None
            elif isinstance(spec, VectorSpec):
                values[name] = self._vector(spec, at)
            elif isinstance(spec, LinearSpec):
                values[name] = self._linear(spec, at, whole)
            elif spec.each:
                values[name] = self._experts(spec.at(at))
            else:
                values[name] = self.part(spec.kind, spec.at(at), f"{whole}.")
        return kind(**values)

    def _name(self, name: str) -> str:
        return f"{self._prefix}{self._family.name(name).format(self._expert)}"

    def _vector(self, spec: VectorSpec, at: Place) -> Tensor:
        name, shape = spec.name(at), spec.shape(at)
        if name is None:
            return torch.ones(shape)
        stored: Tensor = self._source.require(self._name(name), *shape)
        if spec.by_width:
            stored = stored.float() * at.hidden**-0.5
        return stored.float() + self._config.norm_offset if spec.offset else stored

    def _linear(self, spec: LinearSpec, at: Place, path: str) -> LinearWeights:
        layer = linear_of(spec, at, path)
        rows = layer.rows
        parts = tuple(self._matrix(each, layer.rank or layer.inputs) for each in rows)
        factor = self._matrix(Rows(layer.factor, layer.rank), layer.inputs) if layer.rank else None
        return LinearWeights(parts, self._bias(rows) if spec.bias(at) else None, factor)

    def _matrix(self, rows: Rows, inputs: int) -> StoredMatrix:
        whole = self._source.matrix(self._name(f"{rows.name}.weight"), rows.outputs, inputs)
        return whole if rows.chosen is None else whole.rows(torch.tensor(rows.chosen))

    def _bias(self, rows: list[Rows]) -> Tensor:
        whole = [self._source.require(self._name(f"{each.name}.bias"), each.outputs) for each in rows]
        return torch.cat(
            [b if r.chosen is None else b[torch.tensor(r.chosen)] for r, b in zip(rows, whole, strict=True)]
        )

    def _experts(self, at: Place) -> Iterator[GatedWeights]:
        experts, family = self._config.experts, self._family
        assert experts is not None
        gate_up, down = (self._name(name) for name in family.stacked_names)
        stored = family.expert_storage
        in_one = self._source.get(f"{gate_up}_bias" if stored == "alternating" else gate_up) is not None
        if in_one != (stored != "each"):
            stored = "stacked" if in_one else "each"  # transformers saves them stacked, GGUF has one tensor per matrix
        if stored == "each":
            for j in range(experts.count):
                yield _Reader(self._config, self._prefix, self._source, j).part(GatedWeights, at, "experts.experts.")
        elif stored == "stacked":
            yield from self._stacked(gate_up, down)
        else:
            yield from self._turned(gate_up, down, stored == "alternating")

    def _stacked(self, gate_up: str, down: str) -> Iterator[GatedWeights]:
        """All experts of a layer in one tensor, gate rows before up rows."""
        experts, hidden, source = self._config.experts, self._config.hidden, self._source
        assert experts is not None
        both = source.require(gate_up, experts.count, 2 * experts.ffn, hidden)
        last = source.require(down, experts.count, hidden, experts.ffn)
        for first, second in zip(both, last, strict=True):
            halves = (StoredMatrix.of(half, source.mapped) for half in torch.split(first, experts.ffn))
            matrix = StoredMatrix.of(second, source.mapped)
            yield GatedWeights(LinearWeights(tuple(halves)), LinearWeights((matrix,)))

    def _turned(self, gate_up: str, down: str, alternating: bool) -> Iterator[GatedWeights]:
        """All experts in one tensor [experts, inputs, outputs]: gate before up, or both in turns and with biases."""
        experts, hidden, source = self._config.experts, self._config.hidden, self._source
        assert experts is not None
        count, ffn = experts.count, experts.ffn
        biases = None
        if alternating:
            biases = source.require(f"{gate_up}_bias", count, 2 * ffn), source.require(f"{down}_bias", count, hidden)
        order = torch.arange(2 * ffn).view(ffn, 2).T if alternating else torch.arange(2 * ffn).view(2, ffn)
        both = source.expert_matrices(gate_up, count, 2 * ffn, hidden)
        last = source.expert_matrices(down, count, hidden, ffn)
        for j, (first, second) in enumerate(zip(both, last, strict=True)):
            bias, down_bias = (None, None) if biases is None else (biases[0][j][order.flatten()], biases[1][j])
            parts = tuple(first.rows(half) for half in order)
            yield GatedWeights(LinearWeights(parts, bias), LinearWeights((second,), down_bias))


@dataclass(frozen=True)
class LinearPlace:
    """The matrices of a linear layer of a block."""

    rows: list[Rows]
    """By the names that their parts have in Llama's checkpoint."""
    inputs: int
    rank: int = 0
    """The matrices are of this rank, and each is two factors; 0: they are whole."""
    factor: str = ""
    """Name of the factor that reads the inputs."""


LOW_RANK = ("qkv", "output", "mlp.gate_up", "mlp.down")
"""Linear layers that may be of low rank."""


def linear_of(spec: LinearSpec, at: Place, path: str) -> LinearPlace:
    """The matrices of a linear layer of a block, whose field is at `path`.

    Of matrices of low rank V reads the inputs and U gives the outputs (SVD-LLM, arXiv 2403.07378); matrices of the same
    inputs share V.
    """
    family = family_of(at.config.architecture)
    own = family.rows[path](at.config, at.layer) if path in family.rows else None
    rows = spec.rows(at) if own is None else own
    rank = getattr(at.config.low_rank, path.rpartition(".")[2]) if path in LOW_RANK else 0
    if rank:
        rows = [replace(each, name=each.name.removesuffix("_proj") + "_u_proj") for each in rows]
    return LinearPlace(rows, spec.inputs(at), rank, spec.factor)


def map_linears(part: P, change: Callable[[str, LinearWeights], LinearWeights], path: str = "") -> P:
    """The record with `change(path, linear)` in place of its linear layers; those of experts change while they are
    iterated.
    """
    changed = dict[str, Any]()
    for name, spec in specs_of(type(part)).items():
        value, whole = getattr(part, name), f"{path}{name}"
        if value is None or isinstance(spec, VectorSpec):
            continue
        if isinstance(spec, LinearSpec):
            changed[name] = change(whole, value)
        elif spec.each:
            changed[name] = map(partial(map_linears, change=change, path=f"{whole}."), value)
        else:
            changed[name] = map_linears(value, change, f"{whole}.")
    return replace(part, **changed)  # type: ignore[type-var]


def map_matrices(block: BlockWeights, change: Callable[[str, Matrix], Matrix]) -> BlockWeights:
    """The record with `change(path, matrix)` in place of its matrices that may be quantised."""

    def change_linear(path: str, linear: LinearWeights) -> LinearWeights:
        if LINEARS[path].narrowest != "blocks":
            return linear
        factor = None if linear.factor is None else change(f"{path}.factor", linear.factor)
        return replace(linear, parts=tuple(change(path, part) for part in linear.parts), factor=factor)

    return map_linears(block, change_linear)


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a block in a checkpoint."""

    name: str
    """`{}` in it is the number of an expert."""
    shape: tuple[int, ...]
    path: str
    """Its field in the record of the block; of a bias or a factor that of the layer, and `.bias` or `.factor`."""
    rows: slice | None = None
    """Which outputs of the linear layer it has; None: it is none, or has all."""
    chosen: bool = False
    """Whether it has rows of several linear layers."""


def places_of(config: ModelConfig, i: int) -> Iterator[TensorPlace]:
    """The tensors of block `i` in a checkpoint, linear layers first.

    Raises:
        ValueError: the checkpoint holds rows in another order than the block, or the block has experts.
    """
    for place in _places(BlockWeights, Place(config, i), ""):
        if place.chosen or "{}" in place.name:
            what = "matrices" if place.chosen else "experts"
            raise ValueError(f"the {what} of {config.architecture} cannot be written yet")
        yield replace(place, name=f"model.layers.{i}.{place.name}")


def names_of(config: ModelConfig, i: int) -> set[str]:
    """Names in block `i` of all its tensors in a checkpoint; `{}` is the number of an expert. Of experts they are those
    of one tensor for each matrix, and those of all experts in one tensor.
    """
    family, at = family_of(config.architecture), Place(config, i)
    stacked = family.stacked_names if specs_of(BlockWeights)["experts"].when(at) else ()
    own = {place.name for place in _places(BlockWeights, at, "")}
    return own | {family.name(f"{name}{end}") for name in stacked for end in ("", "_bias")}


def _places(kind: type[Any], at: Place, path: str) -> Iterator[TensorPlace]:
    """The tensors of a part by their names in the block."""
    name_of = family_of(at.config.architecture).name
    for field, spec in specs_of(kind).items():
        whole = f"{path}{field}"
        if not spec.when(at):
            continue
        if isinstance(spec, VectorSpec):
            name = spec.name(at)
            yield from () if name is None else (TensorPlace(name_of(name), spec.shape(at), whole),)
        elif isinstance(spec, PartSpec):
            yield from _places(spec.kind, spec.at(at), f"{whole}.")
        else:
            layer, first = linear_of(spec, at, whole), 0
            if layer.rank:
                yield TensorPlace(name_of(f"{layer.factor}.weight"), (layer.rank, layer.inputs), f"{whole}.factor")
            for part in layer.rows:
                rows, first = slice(first, first + part.outputs), first + part.outputs
                shape, chosen = (part.outputs, layer.rank or layer.inputs), part.chosen is not None
                yield TensorPlace(name_of(f"{part.name}.weight"), shape, whole, rows, chosen)
                if spec.bias(at):
                    yield TensorPlace(name_of(f"{part.name}.bias"), shape[:1], f"{whole}.bias", rows, chosen)


def tensors_of(config: ModelConfig, i: int, block: BlockWeights) -> dict[str, Float[Tensor, "*shape"]]:
    """The tensors of block `i` in a checkpoint, each expert's for itself: `read_block` gives the block again."""
    out = dict[str, Tensor]()
    _collect(block, Place(config, i), "", out)
    at, family = f"model.layers.{i}.", family_of(config.architecture)
    return {f"{at}{family.name(name)}": tensor for name, tensor in out.items()}


def _collect(part: Any, at: Place, path: str, out: dict[str, Tensor], expert: int = 0) -> None:
    for field, spec in specs_of(type(part)).items():
        value, whole = getattr(part, field), f"{path}{field}"
        if not spec.when(at) or value is None:
            continue
        if isinstance(spec, VectorSpec):
            name = spec.name(at)
            if name is not None:
                value = value - at.config.norm_offset if spec.offset else value
                out[name] = value / at.hidden**-0.5 if spec.by_width else value
        elif isinstance(spec, LinearSpec):
            collect_rows(linear_of(spec, at, whole), value, expert, out)
        else:
            for j, each in enumerate(value if spec.each else [value]):
                _collect(each, spec.at(at), f"{whole}.", out, j if spec.each else expert)


def collect_rows(layer: LinearPlace, linear: LinearWeights, expert: int, out: dict[str, Tensor]) -> None:
    """Add the tensors that a checkpoint has of a linear layer, by the names that Llama's has in a block.

    Raises:
        ValueError: its matrices are of low rank there, and whole here.
    """
    if layer.rank:
        if not isinstance(linear.factor, Tensor):
            raise ValueError("matrices of low rank cannot be written; use the model that they were made of")
        out[f"{layer.factor}.weight"] = linear.factor
    first = 0
    for rows in layer.rows:
        last = first + len(rows)
        for end, tensor in (("weight", torch.cat(linear.parts)), ("bias", linear.bias)):  # type: ignore[arg-type]
            if tensor is None:
                continue
            name, own = f"{rows.name}.{end}".format(expert), tensor[first:last]
            if rows.chosen is not None:
                # A matrix may hold the rows of several layers.
                stored = out.get(name, tensor.new_zeros(rows.outputs, *tensor.shape[1:]))
                own = stored.index_copy(0, torch.tensor(rows.chosen, device=own.device), own)
            out[name] = own
        first = last


def linear_places(config: ModelConfig, i: int) -> dict[str, LinearPlace]:
    """The linear layers of block `i` that every token reads, by the path of their field."""
    at, dense = Place(config, i), specs_of(BlockWeights)["mlp"]
    assert isinstance(dense, PartSpec)
    places = dict.fromkeys(("qkv", "attention_gate", "output"), at)
    if dense.when(at):
        places |= dict.fromkeys(("mlp.gate_up", "mlp.down"), dense.at(at))
    return {path: linear_of(LINEARS[path], where, path) for path, where in places.items() if LINEARS[path].when(where)}


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of the first block, by the path of their field, its experts left out."""
    at, shapes = Place(config, 0), dict[str, tuple[int, int]]()
    dense = specs_of(BlockWeights)["mlp"]
    assert isinstance(dense, PartSpec)
    for path in LOW_RANK:
        where = dense.at(at) if path.startswith("mlp.") else at
        layer = linear_of(LINEARS[path], where, path)
        shapes[path] = sum(map(len, layer.rows)), layer.inputs
    return shapes


def further_fields(config: ModelConfig) -> set[str]:
    """The fields of `BlockWeights` that some block has and those of Llama have not."""
    places, llama = (
        [Place(config, i) for i in range(config.layers)],
        {"qkv", "output", "mlp", "attention_norm", "mlp_norm"},
    )
    return {name for name, spec in specs_of(BlockWeights).items() if any(map(spec.when, places))} - llama
