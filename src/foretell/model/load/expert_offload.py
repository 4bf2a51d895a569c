"""Mixtures of experts under a limit of memory: experts are read when a pass needs them, all else is in memory.

They are read from the file of packed weights, past the system's page cache.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from foretell.core.context import ModelOutput
from foretell.core.tree import NodeMask, TokenTree
from foretell.model.cache.base import Cache
from foretell.model.config.model import ModelConfig
from foretell.model.kernels import structures
from foretell.model.kernels.block_weights import PackedBlock
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.expert_cache import ExpertBytes, ExpertCache, ExpertReads, Key, RouterForecast
from foretell.model.kernels.packed_file import PackedFileError, PackedReader, checksum, restore_tensors
from foretell.model.kernels.structures import Precision, Sampling
from foretell.model.kernels.uncached_file import PAGE, UncachedFile
from foretell.model.load.native import OUTER_PARTS, restore_outer
from foretell.model.load.streamed import StreamedParts
from foretell.model.load.weights import Weights
from foretell.model.offload.block_store import weight_bytes

_WEIGHT = ctypes.sizeof(structures.Weight)
_FIELDS = {getattr(structures.Weight, name).offset: name for name in ("words", "bias")}


class _Piece(NamedTuple):
    """A pointer of an expert: whether it is one of down, the field, and the tensor that it points to."""

    is_down: bool
    field: str
    tensor: int


@dataclass(frozen=True)
class LayerParts:
    """What a part of the file, which is a block, holds of every expert; the other tensors are read at once."""

    part: Mapping[str, Any]
    experts: Sequence[Sequence[_Piece]]

    @classmethod
    def of(cls, part: Mapping[str, Any]) -> "LayerParts | None":
        """The experts of a part; None: the layer has none."""
        structs = part["structs"]
        at = next((i for i, s in enumerate(structs) if s["type"] == "Experts"), None)
        if at is None:
            return None
        fields = {structures.Experts.gate_up.offset: False, structures.Experts.down.offset: True}
        arrays = {target: fields[offset] for offset, target, _ in structs[at]["links"] if offset in fields}
        experts = [list[_Piece]() for _ in range(max(structs[i]["count"] for i in arrays))]
        for i, is_down in arrays.items():
            for offset, target, _ in structs[i]["links"]:
                field = _FIELDS.get(offset % _WEIGHT, "")
                experts[offset // _WEIGHT].append(_Piece(is_down, field, target - len(structs)))
        return cls(part, experts)

    @property
    def is_supported(self) -> bool:
        """Whether every expert is one run of tensors."""
        pieces = [p for expert in self.experts for p in expert]
        if any(not p.field or p.tensor < 0 for p in pieces):
            return False
        return all(len({p.tensor for p in e}) == _last(e) - _first(e) + 1 for e in self.experts)

    @property
    def dense(self) -> list[int]:
        """Tensors that are not of an expert."""
        taken = {p.tensor for expert in self.experts for p in expert}
        return [i for i in range(len(self.part["tensors"])) if i not in taken]

    @property
    def dense_bytes(self) -> int:
        """Bytes of these."""
        return sum(self.part["tensors"][i][1] for i in self.dense)

    def extent(self, expert: int) -> tuple[int, int]:
        """Where an expert begins and ends in the file."""
        tensors, pieces = self.part["tensors"], self.experts[expert]
        begin, (start, size) = tensors[_first(pieces)][0], tensors[_last(pieces)]
        return self.part["offset"] + begin, self.part["offset"] + start + size

    def pages(self, expert: int) -> tuple[int, int]:
        """Offset and size of the pages of the file with an expert."""
        begin, end = self.extent(expert)
        offset = begin // PAGE * PAGE
        return offset, -(-(end - offset) // PAGE) * PAGE

    def restore(self, file: UncachedFile) -> PackedBlock:
        """The block without its experts."""
        tensors = [torch.empty(0, dtype=torch.uint8) for _ in self.part["tensors"]]
        for i in self.dense:
            start, size = self.part["tensors"][i]
            begin = self.part["offset"] + start
            skipped = begin % PAGE
            pages = file.read(begin - skipped, -(-(skipped + size) // PAGE) * PAGE)
            tensors[i] = pages[skipped : skipped + size].clone()
        block = restore_tensors(self.part, tensors)
        return PackedBlock(block.structs, block.tensors)

    def bytes_of(self, expert: int, gate_up: Any, down: Any) -> ExpertBytes:
        """An expert in the file, and the pointers to it; `gate_up`, `down`: arrays of `Weight`."""
        offset, size = self.pages(expert)
        pointers = [
            ((down if p.is_down else gate_up)[expert], p.field, self._place(p.tensor) - offset)
            for p in self.experts[expert]
        ]
        return ExpertBytes(offset, size, pointers)

    def _place(self, tensor: int) -> int:
        return int(self.part["offset"] + self.part["tensors"][tensor][0])


def _first(pieces: Sequence[_Piece]) -> int:
    return min(p.tensor for p in pieces)


def _last(pieces: Sequence[_Piece]) -> int:
    return max(p.tensor for p in pieces)


class ExpertFile:
    """The experts of the layers of a file. The checksum of a layer is compared when all its experts have been read."""

    def __init__(self, file: UncachedFile, path: object, layers: Sequence[LayerParts]) -> None:
        self._file, self._path, self._layers = file, path, layers
        self._sums: list[dict[int, int]] = [{} for _ in layers]
        self._dense = [0] * len(layers)
        self._lock = threading.Lock()

    def restore(self, i: int) -> PackedBlock:
        """The block of a layer without its experts.

        Raises:
            OSError: the file cannot be read.
        """
        block = self._layers[i].restore(self._file)
        self._dense[i] = sum(checksum(tensor.numpy()) for tensor in block.tensors)
        return block

    def read(self, key: Key, target: memoryview) -> None:
        """Read an expert into memory.

        Raises:
            OSError: the file cannot be read.
            ValueError: a layer's checksum differs.
        """
        (layer, expert), parts = key, self._layers[key[0]]
        offset, _ = parts.pages(expert)
        self._file.read_into(target, offset)
        sums = self._sums[layer]
        if len(sums) == len(parts.experts):
            return
        own = 0
        for tensor in {p.tensor for p in parts.experts[expert]}:
            start, size = parts.part["tensors"][tensor]
            begin = parts.part["offset"] + start - offset
            own += checksum(np.frombuffer(target[begin : begin + size], np.uint8))
        with self._lock:
            sums[expert] = own
            complete = len(sums) == len(parts.experts)
        if complete and (self._dense[layer] + sum(sums.values())) % 2**64 != parts.part["sum"]:
            sums.clear()
            raise PackedFileError(f"{self._path}: damaged (the checksum of a layer with experts differs)")


class ExpertOffloadedDecoder(NativeDecoder):
    """A mixture of experts of which a part of the experts is in memory. Results are bit for bit those of the network in
    memory.

    What a pass needs is read while it runs; what its next layer will probably need is read ahead: of the first layer
    the experts that the drafted tokens had when they were last read, and of every other those that its router chooses
    from the residual stream of the layer before.
    """

    cache: ExpertCache
    fixed_bytes: int
    """Bytes of weights that stay in memory."""
    _last_experts: dict[int, Int[np.ndarray, " k"]]
    """Of the first layer, by token: those that the token had when it was last read."""

    @classmethod
    def of(cls, decoder: NativeDecoder, cache: ExpertCache, fixed_bytes: int) -> "ExpertOffloadedDecoder":
        """A decoder whose blocks read their experts from a cache."""
        made = object.__new__(cls)
        made.__dict__.update(decoder.__dict__)
        made.cache, made.fixed_bytes = cache, fixed_bytes
        made._last_experts = {}
        return made

    @property
    def reads(self) -> ExpertReads:
        """Which experts were in memory, read ahead, or waited for."""
        return self.cache.reads

    @property
    def peak_bytes(self) -> int:
        """Most bytes of weights in memory at once."""
        return self.fixed_bytes + self.cache.nbytes

    def forward_tree(
        self,
        tree: TokenTree,
        rows: Sequence[int],
        length: Sequence[int],
        cache: Cache,
        active: NodeMask,
        scored: NodeMask,
        hidden_layers: tuple[int, ...],
        sampling: Sequence[Sampling] = (),
    ) -> ModelOutput:
        """Run the active nodes of a tree, whose experts are read ahead; see `NativeDecoder.forward_tree`.

        Raises:
            ValueError: a node is outside the cache or the context; or the file is damaged.
            OSError: the file cannot be read.
        """
        tokens = tree.token[active]
        known = [last for token in set(tokens.tolist()) if (last := self._last_experts.get(token)) is not None]
        if known:
            number, count = np.unique(np.concatenate(known), return_counts=True)
            self.cache.begin_pass(number[np.argsort(-count, kind="stable")].tolist())
        output = super().forward_tree(tree, rows, length, cache, active, scored, hidden_layers, sampling)
        if output.routes:
            pairs = zip(tokens.tolist(), output.routes[0], strict=True)
            self._last_experts.update((token, experts.copy()) for token, experts in pairs)
        return output


class ExpertOffload:
    """What an offloaded mixture of experts needs of memory, and the network within a limit.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """

    def __init__(self, config: ModelConfig, weights: Weights, precision: Precision, kept: PackedReader) -> None:
        self._config, self._kept, self._weights, self._precision = config, kept, weights, precision
        parts = [LayerParts.of(kept.description(OUTER_PARTS + i)) for i in range(config.layers)]
        self._of_layer = {i: part for i, part in enumerate(parts) if part is not None}
        self._layers = list(self._of_layer.values())
        self.is_supported = bool(self._layers) and all(part.is_supported for part in self._layers)
        """Whether experts can be read one by one."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of memory that an expert takes."""
        return max(layer.pages(e)[1] for layer in self._layers for e in range(len(layer.experts)))

    def build(self, limit: int) -> ExpertOffloadedDecoder | int:
        """The network with at most `limit` bytes of weights in memory; or the least limit that is possible."""
        kept, parts = self._kept, StreamedParts(self._kept)
        outer = restore_outer(self._config, self._weights, self._precision, parts.read(0), parts.read(1))
        dense = [kept.sizes()[OUTER_PARTS + i] for i in range(self._config.layers) if i not in self._of_layer]
        fixed = weight_bytes(outer) + sum(dense) + sum(layer.dense_bytes for layer in self._layers)
        slots = (limit - fixed) // self.expert_bytes
        if slots < 1:
            return fixed + self.expert_bytes
        file = ExpertFile(UncachedFile(kept.path), kept.path, self._layers)
        order = list(self._of_layer)
        blocks = [
            file.restore(order.index(i)) if i in self._of_layer else _as_block(parts.read(OUTER_PARTS + i))
            for i in range(self._config.layers)
        ]
        decoder = outer.with_blocks([outer.stack.attach(i, block) for i, block in enumerate(blocks)])
        cache = self._connect(decoder, [blocks[i] for i in order], file, slots)
        return ExpertOffloadedDecoder.of(decoder, cache, fixed)

    def _connect(
        self, decoder: NativeDecoder, blocks: Sequence[PackedBlock], file: ExpertFile, slots: int
    ) -> ExpertCache:
        """Let the experts of blocks be read through a cache."""
        stack, config, layers = decoder.stack, self._config, [block.struct for block in blocks]
        structs = [structures.Experts.from_address(layer.experts) for layer in layers]
        expert_bytes = list[list[ExpertBytes]]()
        for parts, experts in zip(self._layers, structs, strict=True):
            array = structures.Weight * experts.count
            gate_up, down = array.from_address(experts.gate_up), array.from_address(experts.down)
            expert_bytes.append([parts.bytes_of(e, gate_up, down) for e in range(experts.count)])
        predict = RouterForecast(layers, config.hidden, config.norm_eps, stack.kernels)
        cache = ExpertCache(expert_bytes, file.read, predict, config.hidden, slots)
        for i, experts in enumerate(structs):
            experts.load, experts.layer = cache.address, i
        stack.expert_cache = cache
        return cache


def _as_block(part: Any) -> PackedBlock:
    return PackedBlock(part.structs, part.tensors)


def build_expert_network(
    config: ModelConfig, weights: Weights, precision: Precision, limit: int, kept: PackedReader
) -> ExpertOffloadedDecoder | int | None:
    """A mixture of experts with at most `limit` bytes of weights in memory; or the least limit that is possible. None:
    its experts cannot be read one by one.
    """
    offload = ExpertOffload(config, weights, precision, kept)
    return offload.build(limit) if offload.is_supported else None
